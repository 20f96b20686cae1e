"""Which parameters an optimizer has, told by the values of its masters."""

from __future__ import annotations

import pytest
import torch

from reshard.core.box import Box, whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import BFLOAT16, FLOAT32
from reshard.formats.megatron.optimizers.buckets import Param, concatenate, make_buckets
from reshard.formats.megatron.optimizers.frozen import (
    Ambiguous,
    FlatMasters,
    ListedMasters,
    choose_trained,
    sample_block,
    sample_tensor,
)
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.system.files import SourceFiles

SHAPES = {f"layers.{i}.{n}": s for i in range(4) for n, s in (("norm", (9,)), ("fc", (9, 7)))}


@pytest.fixture
def params(tmp_path):
    """Return name -> (fp32 values, bf16 weight as a file has it)."""
    torch.manual_seed(0)
    found = {}
    for number, (fqn, shape) in enumerate(SHAPES.items()):
        values = torch.randn(shape)
        path = tmp_path / f"{number}.bin"
        path.write_bytes(values.bfloat16().view(torch.uint8).numpy().tobytes())
        found[fqn] = values, (contiguous(str(path), 0, BFLOAT16, whole(shape)),)
    return found


def sampler(params, files):
    return lambda fqn: sample_tensor(SHAPES[fqn], params[fqn][1], files)


def store_flat(tmp_path, params, trained, size):
    """Store the masters of some parameters as `distrib_optim.pt` has them."""
    members, numel = concatenate(make_buckets([Param(f, SHAPES[f]) for f in trained], size))
    flat = torch.full((numel,), float("nan"))
    for member in members:
        flat[member.start : member.stop] = params[member.fqn][0].reshape(-1)
    path = tmp_path / "flat.bin"
    path.write_bytes(flat.view(torch.uint8).numpy().tobytes())
    return [(0, contiguous(str(path), 0, FLOAT32, Box((0,), (numel,))))]


@pytest.mark.parametrize("size", [None, 100])
@pytest.mark.parametrize(
    "frozen", [(), ("layers.0", "layers.1"), ("fc",), ("norm",), ("layers.3.fc", "layers.1.norm")]
)
def test_the_values_tell_which_parameters_a_buffer_holds(tmp_path, params, size, frozen):
    trained = [fqn for fqn in SHAPES if not any(part in fqn for part in frozen)]
    pieces = store_flat(tmp_path, params, trained, size)
    backwards = [Param(fqn, shape) for fqn, shape in reversed(SHAPES.items())]
    with SourceFiles() as files:
        masters = FlatMasters(size, pieces, files)
        found = choose_trained(backwards, masters, sampler(params, files))
    assert [param.fqn for param in reversed(found)] == trained


def test_the_values_tell_which_parameters_a_group_holds(tmp_path, params):
    trained = [fqn for fqn in SHAPES if "layers.2" not in fqn]
    tensors = []
    for number, fqn in enumerate(trained):
        path = tmp_path / f"master{number}.bin"
        path.write_bytes(params[fqn][0].view(torch.uint8).numpy().tobytes())
        box = whole(SHAPES[fqn])
        tensors.append(
            GlobalTensor(FLOAT32, SHAPES[fqn], (contiguous(str(path), 0, FLOAT32, box),))
        )
    with SourceFiles() as files:
        found = choose_trained(
            [Param(fqn, shape) for fqn, shape in SHAPES.items()],
            ListedMasters(tensors, files),
            sampler(params, files),
        )
    assert [param.fqn for param in found] == trained


def test_neighbours_of_equal_values_are_not_told_apart(tmp_path, params):
    params["layers.1.norm"] = params["layers.2.norm"]
    pieces = store_flat(tmp_path, params, ["layers.0.fc", "layers.1.norm"], None)
    backwards = [Param(fqn, shape) for fqn, shape in reversed(SHAPES.items())]
    with SourceFiles() as files, pytest.raises(Ambiguous, match="norm"):
        choose_trained(backwards, FlatMasters(None, pieces, files), sampler(params, files))


def test_a_rank_s_piece_is_sampled_at_its_own_positions(params):
    values, chunks = params["layers.0.fc"]
    block, piece = Box((3, 0), (3, 7)), Box((0, 0), (3, 7))
    with SourceFiles() as files:
        found = sample_block((3, 7), chunks, block, piece, files)
    rows = values.bfloat16()[3:6].reshape(-1)
    assert len(found) > 4
    assert all(rows[position] == value for position, value in found)
