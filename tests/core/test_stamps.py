"""The stamp of a file: read where there is one, refused where it is malformed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard import formats
from reshard.commands.split.command import plan_split
from reshard.commands.split.options import SplitOptions
from reshard.containers import torch_reader
from reshard.core import stamps
from reshard.core.stamps import KEY, Stamp
from reshard.errors import CorruptError

STAMP = Stamp(save_id="9f3a", rank=1, world_size=2, step=None, file="rank_1.pt")


@pytest.mark.parametrize("root", [{}, {"model": 1}, [], None, "text", {KEY: None}])
def test_a_root_without_a_stamp(root):
    assert stamps.read(root) is None


@pytest.mark.parametrize(
    "held", [STAMP.as_dict(), json.dumps(STAMP.as_dict())], ids=["pickle", "header"]
)
def test_a_stamp_is_read_back(held):
    assert stamps.read({"model": 1, KEY: held}) == STAMP


def test_keys_of_later_versions_are_ignored():
    assert stamps.read({KEY: {**STAMP.as_dict(), "later": object()}}) == STAMP


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([], "reshard_stamp is \\[\\], expected a dict"),
        ("{", "reshard_stamp is '{', not JSON"),
        ({"save_id": "x"}, "reshard_stamp has no 'rank'"),
        ({**STAMP.as_dict(), "rank": "1"}, "reshard_stamp.rank is '1', expected a number"),
        ({**STAMP.as_dict(), "step": -1}, "reshard_stamp.step is -1"),
        ({**STAMP.as_dict(), "rank": 2}, "reshard_stamp states rank 2 of 2 ranks"),
        ({**STAMP.as_dict(), "world_size": 1 << 70}, "reshard_stamp states rank 1 of"),
    ],
)
def test_a_malformed_stamp_is_refused(held, said):
    with pytest.raises(CorruptError, match=f"a.pt: {said}"):
        stamps.read({KEY: held}, "a.pt")


def stamped_state_dict():
    state = torch.nn.Linear(2, 2).state_dict()
    state.reshard_stamp = STAMP.as_dict()
    return state


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "root", [{"model": 1, KEY: STAMP.as_dict()}, stamped_state_dict()], ids=["key", "attribute"]
)
def test_the_root_of_a_file_is_without_its_stamp(tmp_path, root, zipped):
    path = tmp_path / "rank_1.pt"
    torch.save(root, path, _use_new_zipfile_serialization=zipped)
    assert hasattr(root, KEY) == hasattr(torch.load(path), KEY)
    file = torch_reader.read(path)
    assert file.stamp == STAMP
    assert list(file.root) == [key for key in root if key != KEY]


def test_a_file_with_a_malformed_stamp_is_refused(tmp_path):
    torch.save({KEY: 7}, tmp_path / "a.pt")
    with pytest.raises(CorruptError, match=r"a.pt: reshard_stamp is 7, expected a dict"):
        torch_reader.read(tmp_path / "a.pt")


def test_two_sources_of_equal_names_and_sizes_give_two_ids(tmp_path):
    """Files of safetensors store no checksum: a sample of their bytes tells two runs apart."""
    for name, value in (("one", 1.0), ("two", 2.0), ("again", 1.0)):
        (tmp_path / name).mkdir()
        weights = {"a": torch.full((40, 3), value), "b": torch.zeros(5)}
        save_file(weights, tmp_path / name / "model.safetensors")
        out = tmp_path / f"{name}_split"
        reshard.split(tmp_path / name, out, to="fsdp2", world_size=2, init_optimizer="none")
    files = {path.name: path for path in (tmp_path / "one_split").iterdir()}
    for name, path in files.items():
        assert path.read_bytes() == (tmp_path / "again_split" / name).read_bytes()
    last = max(name for name in files if "rank" in name)
    shutil.copy(tmp_path / "two_split" / last, files[last])
    with pytest.raises(CorruptError, match="files of two saves are mixed"):
        reshard.merge(tmp_path / "one_split", tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    ("options", "save_id"),
    [
        ({"to": "torch"}, "bd0795e52744ef9865d0baaa7acda604"),
        ({"to": "dcp", "dtype": "bf16"}, "26f84e0a6fb3402d1f424d6b87f4fca0"),
        (
            {"to": "fsdp2", "mesh": "dp_replicate=2,dp_shard=2", "device": "cpu"},
            "9e7d524365e25a8216341589f348d870",
        ),
        ({"to": "deepspeed", "world_size": 2, "zero_stage": 3}, "243d5bfd17b82d7ecdd9c3c23e9b3fc6"),
        (
            {"to": "accelerate", "world_size": 2, "zero_stage": 1, "dtype": "fp16"},
            "edc632ebf70fc14b0ac627d2b524528e",
        ),
    ],
)
def test_the_same_command_writes_the_same_id(tmp_path, options, save_id):
    """The id is a part of every output, so no change of the code may change it."""
    tensors = {
        "layer.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
        "layer.bias": {"dtype": "F32", "shape": [4], "data_offsets": [32, 48]},
    }
    header = json.dumps(tensors).encode()
    source = tmp_path / "model.safetensors"
    source.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(48)))
    chosen = SplitOptions(**options, init_optimizer="none")
    job = plan_split(formats.read(source), tmp_path / "out", chosen)
    assert job.save_id == save_id
