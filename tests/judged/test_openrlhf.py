"""Engines as OpenRLHF and TRL make them continue at other sizes: value heads, LoRA in float32."""

from __future__ import annotations

import pytest
import torch

import reshard
from tests.judges import server
from tests.judges.server import Missing

pytestmark = pytest.mark.slow
pytest.importorskip("peft")
JUDGE = server.Judge("tests.judges.openrlhf_worker", "openrlhf", {})
RUNS = {  # name -> program, role, stage and ranks; and those of the resume
    "lora": ("", "lora", (3, 1), (3, 2)),
    "headed": ("", "headed", (2, 2), (2, 1)),
    "openrlhf lora": ("openrlhf", "lora", (3, 2), (3, 1)),
    "openrlhf critic": ("openrlhf", "critic", (2, 2), (3, 1)),
}
NOISE = 1e-3  # of a loss: bf16 sums gradients in another order


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the directory of runs and outputs, and what each saw."""
    place, first, later = tmp_path_factory.mktemp("runs"), {}, {}
    for name, (program, role, (stage, world), _) in RUNS.items():
        first[name] = world, {"program": program, "role": role, "stage": stage}
    seen = JUDGE.run(place, first)
    for name, (program, role, _, (stage, world)) in RUNS.items():
        if isinstance(seen[name], dict):
            out = place / f"{name} out"
            reshard.split(place / name / "run", out, world_size=world, zero_stage=stage)
            told = {"program": program, "role": role, "stage": stage, "resume": out}
            later[f"{name} resumed"] = world, told
    return place, seen | JUDGE.run(place, later)


@pytest.mark.parametrize("name", RUNS)
def test_the_run_continues_at_another_size(name, runs):
    place, seen = runs
    expected = seen[name]
    if isinstance(expected, Missing):
        pytest.skip(expected)
    assert isinstance(expected, dict), expected
    kinds = ("masters", "exp_avg", "exp_avg_sq")
    for path in (place / name / "run", place / f"{name} out"):
        assert reshard.verify(path, deep=True).passed
        with reshard.open(path) as checkpoint:
            for kind in kinds:
                stored = checkpoint if kind == "masters" else checkpoint.optimizer(kind)
                for fqn, value in expected[kind].items():
                    (own,) = (name for name in stored if name in (fqn, f"pretrained_model.{fqn}"))
                    assert torch.equal(stored[own][...].float(), value), (path, kind, fqn)
    found = seen[f"{name} resumed"]
    assert isinstance(found, dict), found
    for kind in kinds:
        assert found[kind].keys() == expected[kind].keys()
        assert all(torch.equal(found[kind][fqn], each) for fqn, each in expected[kind].items())
    assert found["losses"] == pytest.approx(expected["losses"][3:], abs=NOISE)
    assert found.get("client") == (12 if name.startswith("openrlhf") else None)
