"""Checkpoints of diffusers' training scripts, whose hooks save the model into folders or files."""

from __future__ import annotations

import sys

import pytest
from safetensors.torch import load_file

import reshard
from reshard.errors import ReshardError
from tests.judges import diffusers_worker as worker
from tests.judges import programs
from tests.trainer import worlds

pytestmark = [pytest.mark.slow, programs.need(worker.PROGRAM)]
RUNS = {"full": {}, "lora": {"model": "tests.judges.diffusers_worker:make_adapted"}}
SIZES = {1: 2, 2: 1}  # ranks of the source -> of the output
NOISE = 1e-5  # relative, of another order of summing gradients


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return (run, its ranks) -> its checkpoint, the split one, and what each run saw."""
    root = tmp_path_factory.mktemp("runs")
    programs.enter(worker.PROGRAM)
    cases = [(name, size) for name in RUNS for size in SIZES]
    places = {case: root.joinpath(*map(str, case)) for case in cases}
    saves = [(case[1], worker.train, case[0], places[case] / "checkpoint-3") for case in cases]
    saved = worlds.run_in_turn(worker.enter, saves)
    resumes = []
    for name, size in cases:
        source, out = (places[name, size] / each for each in ("checkpoint-3", "out"))
        reshard.split(source, out, world_size=SIZES[size], **RUNS[name])
        resumes.append((SIZES[size], worker.train, name, source, out))
    resumed = worlds.run_in_turn(worker.enter, resumes)
    rows = zip(cases, resumes, saved, resumed, strict=True)
    yield {case: (*resume[-2:], *seen) for case, resume, *seen in rows}
    sys.path.remove(str(programs.FOLDER / worker.PROGRAM))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RUNS)
def test_the_run_continues_at_other_sizes(name, size, runs):
    source, out, expected, found = runs[name, size]
    for path in (source, out):
        with reshard.open(path, **RUNS[name]) as checkpoint:
            moments = checkpoint.optimizer("exp_avg")
            for read, wanted in ((checkpoint, "weights"), (moments, "moments")):
                assert {fqn: read[fqn][...].tolist() for fqn in read} == expected[wanted]
    assert found["losses"] == pytest.approx(expected["losses"][3:], rel=NOISE)
    ours = ("weights", "moments", "rate", *(("average",) if name == "full" else ()))
    assert {each: found[each] for each in ours} == {each: expected[each] for each in ours}
    files = {path.name for path in out.iterdir()}
    assert files.isdisjoint({"model.safetensors", "adapter_model.safetensors"})


def test_each_folder_is_a_model_and_only_the_trained_one_has_the_optimizer(runs, tmp_path):
    source = runs["full", 1][0]
    for key in ("unet", "unet_ema"):
        report = reshard.merge(source, tmp_path / key, key=key)
        name = "diffusion_pytorch_model.safetensors"
        stored, found = load_file(source / key / name), load_file(tmp_path / key / name)
        assert found.keys() == stored.keys()
        assert all((found[fqn] == each).all() for fqn, each in stored.items())
        assert "diffusers.UNet2DConditionModel" in report.load_line
    with pytest.raises(ReshardError, match="trains those of unet"):
        reshard.split(source, tmp_path / "split", key="unet_ema")
    report = reshard.split(source, tmp_path / "dcp", to="dcp")
    assert any(text.startswith("unet_ema/ was not copied") for text in report.notes)
