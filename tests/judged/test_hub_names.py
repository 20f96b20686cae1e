"""Published names of representative families: trained, merged, loaded, and converted back.

`tests.judged.hub_names` proves all model types; docs/hub-names.md has its results.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.judged import hub_names
from tests.judges import server
from tests.support.programs import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {
    "gpt2": "a tied head, and nothing to convert",
    "bloom": "a head that is tied to an embedding of another name",
    "mixtral": "experts that are stacked in memory",
    "qwen3_moe": "experts, and gate and up joined",
    "llava": "prefixes of a composite model",
    "vit": "layers with other names",
    "whisper": "a tied head that files leave out",
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return case -> what each step of the proof found."""
    out = tmp_path_factory.mktemp("hub")
    subprocess.run(
        [*server.fork_python(server.DEEPSPEED), "-m", hub_names.__name__, out, "--only", *FAMILIES],
        cwd=ROOT,
        check=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        timeout=LIMIT_S,
    )
    return {name: hub_names.read_result(out, name) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_merged_model_is_what_transformers_would_have_saved(name, results):
    steps = results[name]["steps"]
    assert set(steps.values()) == {"ok"}, steps
    assert len(steps) == 8  # two frameworks: train, merge, load; build and back
    assert results[name]["loss"] == "forward"
