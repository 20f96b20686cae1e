"""torchtune's gathered optimizer, beside weights of either of its checkpointers."""

from __future__ import annotations

import shutil

import pytest

import reshard
from tests.judges import torchtune_worker as worker
from tests.trainer import worlds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not worker.LIBRARY, reason="RESHARD_TORCHTUNE is not set"),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("family", "form"), [("llama3", "HF"), ("qwen2", "HF"), ("llama3", "TorchTune")]
)
def test_torchtune_resumes_with_its_optimizer_at_other_sizes(family, form, world, tmp_path):
    ((losses, expected), *_) = worlds.run(world, worker.save, family, form, tmp_path)
    source = [tmp_path / "run" / "epoch_0", tmp_path / "run" / "recipe_state"]
    with reshard.open(source) as checkpoint:
        assert not any("not among the weights" in each for each in checkpoint.manifest.warnings)
        weights, *slots = expected
        if form == "HF":
            assert {name: checkpoint[name][...].tolist() for name in checkpoint} == weights
            for slot, wanted in zip(("exp_avg", "exp_avg_sq"), slots, strict=True):
                found = checkpoint.optimizer(slot)
                assert {name: found[name][...].tolist() for name in found} == wanted
    for ranks in (1, 2):
        out = tmp_path / f"out{ranks}"
        report = reshard.split(source, out, to="dcp", world_size=ranks)
        assert report.optimizer_tensors_in == report.optimizer_tensors_out
        assert worlds.run(ranks, worker.resume, family, form, out) == [losses] * ranks
    shutil.move(source[0], source[0].with_name("epoch_1"))
    again = reshard.inspect([source[0].with_name("epoch_1"), source[1]])
    assert any("is of the end of epoch_0" in each for each in again.manifest.warnings)
