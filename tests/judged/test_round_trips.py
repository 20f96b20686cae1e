"""Real checkpoints split to another size and back: the same state whole, and no false alarm.

Some cases of each library and form are covered here; ``python -m tests.judged.round_trips OUT``
makes all and tells what is not the same.
"""

from __future__ import annotations

import io
from pathlib import PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard
from tests.judged import round_trips

pytestmark = pytest.mark.slow

LIBRARIES = (
    "acc_fsdp1_sharded_flat",
    "acc_fsdp1_full",
    "acc_fsdp2_sharded_tied_ws4",
    "acc_fsdp2_sharded_ranks",
    "acc_ddp_bin",
    "acc_automatic",
    "trainer_single",
    "trainer_ddp",
    "trainer_fsdp1_sharded",
    "trainer_fsdp2_full",
)
TORCH = (
    "fsdp1_sharded_shardedtensor_ws4",
    "fsdp1_sharded_dtensor",
    "fsdp1_sharded_model_only",
    "fsdp2_ranks_named_groups_ws4",
    "fsdp2_ranks_gets",
    "fsdp2_dcp",
    "fsdp2_dcp_named",
    "dcp_model_only",
    "dcp_app",
    "dcp_no_collectives",
    "dcp_no_collectives_item_files",
)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_round_trip_restores_a_librarys_checkpoint(name, libraries, tmp_path):
    round_trips.check(round_trips.of_library(name, libraries), tmp_path)


@pytest.mark.parametrize("name", TORCH)
def test_a_round_trip_restores_a_checkpoint_of_torch(name, torch_made, tmp_path):
    round_trips.check(round_trips.of_torch(name, torch_made), tmp_path)


def test_weights_alone_are_written_for_a_source_without_optimizer(torch_made, tmp_path):
    source = torch_made / "dcp_model_only/ckpt"
    for target in ("dcp", "fsdp2", "torch"):
        report = reshard.split(source, tmp_path / target, to=target, world_size=2)
        assert any(text.startswith("weights only ") for text in report.warnings)
    for target in ("deepspeed", "accelerate"):
        with pytest.raises(reshard.ReshardError, match="no optimizer"):
            reshard.split(source, tmp_path / target, to=target, world_size=2)
        assert not (tmp_path / target).exists()


def test_numbers_of_parameters_stay_in_the_order_of_the_program(libraries, tmp_path):
    source = libraries / "trainer_ddp/ckpt/checkpoint-4"
    reshard.split(source, tmp_path / "three", world_size=3)
    (tmp_path / "three/checkpoint-4/config.json").unlink()
    reshard.split(tmp_path / "three", tmp_path / "two", world_size=2)
    three, two = (reshard.open(tmp_path / name) for name in ("three", "two"))
    with three, two:
        assert two.manifest.train.param_groups == three.manifest.train.param_groups


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_scripts_own_objects_go_from_dcp_to_dcp(tmp_path):
    own = {"path": PurePosixPath("data/train"), "dtype": torch.bfloat16, "range": (1, 2)}
    state = {"model": {"weight": torch.arange(12.0).reshape(4, 3)}, "own": own}
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    reshard.split(tmp_path / "source", tmp_path / "there", world_size=3)
    reshard.split(tmp_path / "there", tmp_path / "back", world_size=1)
    found = objects_in(tmp_path / "back")
    assert found == {f"own.{name}": value for name, value in own.items()}


def objects_in(directory):
    """Return the script's own objects in a DCP directory, as torch itself reads them."""
    about = dcp.FileSystemReader(directory).read_metadata()
    found = {}
    for index, info in about.storage_data.items():
        if index.fqn.startswith("own."):
            data = (directory / info.relative_path).read_bytes()
            item = io.BytesIO(data[info.offset : info.offset + info.length])
            found[index.fqn] = torch.load(item, weights_only=False)
    return found
