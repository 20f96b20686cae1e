"""AutoTP training of DeepSpeed 0.18, whose files hardly state how ranks share the parameters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

import reshard
from tests.judges import old_autotp, old_deepspeed, programs
from tests.trainer import worlds

PROGRAM = "deepspeed-0.18.9"
pytestmark = [pytest.mark.slow, programs.need(PROGRAM)]
CASES = {  # model -> stage, grid (tensor, data) of the run and the next one, relative difference
    "llama": (1, (2, 1), (4, 1), 1e-5),
    "phi": (2, (2, 2), (1, 2), 2e-2),
    "gpt_neox": (1, (2, 1), (1, 2), 1e-5),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with a run, its split and its resumed run, of each model."""
    root = tmp_path_factory.mktemp("autotp")
    enter = partial(old_deepspeed.enter, PROGRAM)
    worlds.run_in_turn(
        enter,
        [
            (tp * dp, old_autotp.save, root / f"run_{kind}", kind, tp, stage)
            for kind, (stage, (tp, dp), _, _) in CASES.items()
        ],
    )
    resumes = []
    for kind, (stage, _, (tp, dp), _) in CASES.items():
        out, resumed = root / f"split_{kind}", root / f"resumed_{kind}"
        reshard.split(root / f"run_{kind}", out, tp=tp, dp=dp)
        resumes.append((tp * dp, old_autotp.resume, resumed, kind, tp, stage, out))
    worlds.run_in_turn(enter, resumes)
    return root


@pytest.mark.parametrize("kind", CASES)
def test_deepspeed_goes_on_at_another_size(kind, place, tmp_path):
    source, noise = place / f"run_{kind}", CASES[kind][-1]
    expected = torch.load(source / "expected.pt", weights_only=False)
    with reshard.open(source) as checkpoint:
        assert set(checkpoint) == set(expected["params"])
        for name, value in expected["params"].items():
            assert torch.equal(checkpoint[name][...].to(value.dtype), value), name
    report = reshard.merge(source, tmp_path / "model", dtype="fp32")
    assert any("AutoTP before 0.19" in text for text in report.warnings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        logits = model.eval()(expected["tokens"]).logits
    assert (logits - expected["logits"]).abs().max() < noise * expected["logits"].abs().max()
    assert reshard.diff(source, place / f"split_{kind}", kinds=["weight", "optimizer"]).same
    found = torch.load(place / f"resumed_{kind}" / "expected.pt", weights_only=False)
    assert found["later"] == pytest.approx(expected["later"], abs=noise)
