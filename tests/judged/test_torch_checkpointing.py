"""torch_checkpointing's safetensors of ranks, whose cuts its metadata states."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

import reshard
from reshard.errors import CorruptError, IncompleteError
from tests.judges import programs
from tests.judges import torch_checkpointing_worker as worker
from tests.trainer import worlds

pytestmark = [pytest.mark.slow, programs.need(worker.PROGRAM)]


@pytest.mark.parametrize("world", [2, 4])
def test_the_state_of_the_ranks_is_read(world, tmp_path):
    source = tmp_path / "step2"
    weights, slots = worlds.run(world, worker.save, source)[0]
    with reshard.open(source) as checkpoint:
        assert {name: checkpoint[name][...].tolist() for name in checkpoint} == weights
        for (slot, name), value in slots.items():
            assert checkpoint.optimizer(slot)[name][...].tolist() == value
        assert checkpoint.manifest.train.step == worker.STEPS
    report = reshard.split(source, tmp_path / "out", world_size=3, device="cpu")
    assert not any("not read" in line for line in report.lines())
    assert reshard.diff(source, tmp_path / "out").same
    for path in source.glob("*.pt"):
        path.unlink()
    with reshard.open(source) as checkpoint:
        assert {name: checkpoint[name][...].tolist() for name in checkpoint} == weights
    (source / "model_1.safetensors").rename(tmp_path / "lost.safetensors")
    with pytest.raises(IncompleteError, match=r"model_1\.safetensors is missing"):
        reshard.inspect(source)
    (tmp_path / "lost.safetensors").rename(source / "model_1.safetensors")
    path = source / "model_1.safetensors"
    written = path.read_bytes()
    save_file({name: value.half() for name, value in load_file(path).items()}, path)
    with pytest.raises(CorruptError, match=r"a sharded float16 .* float32 .* in .*model_0"):
        reshard.inspect(source)
    path.write_bytes(written)
    metadata = source / "metadata.pkl"
    metadata.write_bytes(metadata.read_bytes().replace(b"global_shape", b"global_shade"))
    with pytest.raises(CorruptError, match="is not metadata of torch_checkpointing"):
        reshard.inspect(source)
