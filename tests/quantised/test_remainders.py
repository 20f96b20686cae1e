"""fp32 masters that are stored as bf16 weights and 16-bit remainders."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.checks.identity.crosscheck import compare_masters
from reshard.core.box import row_major, whole
from reshard.core.chunks import Chunk
from reshard.core.dtypes import BFLOAT16, FLOAT32
from reshard.core.manifest import MASTER, PARAM, Entry, Manifest, Origin, SourceFile, index_entries
from reshard.errors import CorruptError, IncompleteError
from reshard.quantised.remainders import INT16, complete_masters, is_computed
from reshard.system.files import SourceFiles
from reshard.tensors.lazy import LazyTensor
from tests.judges.megatron_adam import whole_master

SHAPE = (70, 50)


def split_masters(masters):
    """Return weights and remainders as the kernel of Transformer Engine divides fp32 masters."""
    bits = masters.view(torch.int32)
    weights = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return weights, bits.to(torch.int16)


@pytest.fixture
def masters():
    torch.manual_seed(0)
    found = torch.randn(SHAPE)
    bits = found.view(torch.int32)
    bits[0] = (bits[0] & ~0xFFFF) | 0x8000  # in the middle between two weights
    bits[1] = (bits[1] & ~0xFFFF) | 0x7FFF
    bits[2] &= ~0xFFFF
    return found


def store(tmp_path, name, tensor, dtype, *, kind, transposed=False):
    """Write a tensor; return its entry and file."""
    path = tmp_path / name
    stored = tensor.T.contiguous() if transposed else tensor.contiguous()
    path.write_bytes(stored.view(torch.uint8).numpy().tobytes())
    strides = row_major(stored.shape, dtype.itemsize)
    strides = strides[::-1] if transposed else strides
    shape = tuple(tensor.shape)
    chunk = Chunk(whole(shape), str(path), 0, strides, dtype)
    return Entry("w", kind, dtype, shape, (chunk,)), SourceFile(str(path), path.stat().st_size)


def manifest_of(*stored):
    return Manifest(
        Origin("megatron", "run"),
        index_entries(entry for entry, _ in stored),
        {file.path: file for _, file in stored},
        ordered=True,
    )


def read(manifest):
    (master,) = manifest.of_kind(MASTER)
    assert is_computed(master)
    assert master.dtype == FLOAT32
    with SourceFiles() as pool:
        return LazyTensor(master, pool)[...]


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_masters_are_computed_bit_by_bit(tmp_path, masters, as_float, transposed):
    weights, remainders = split_masters(masters)
    assert torch.equal(whole_master(weights, remainders), masters)  # as the judge computes them
    lower = remainders.float() if as_float else remainders
    manifest = manifest_of(
        store(tmp_path, "weights", weights, BFLOAT16, kind=PARAM),
        store(
            tmp_path,
            "optimizer",
            lower,
            FLOAT32 if as_float else INT16,
            kind=MASTER,
            transposed=transposed,
        ),
    )
    found = complete_masters(manifest, may_be_float=as_float)
    assert torch.equal(read(found), masters)
    assert "remainders" in found.warnings[-1]


def test_float_masters_are_not_remainders(tmp_path, masters):
    for value in (masters, torch.ones(SHAPE), torch.zeros(SHAPE)):
        manifest = manifest_of(
            store(tmp_path, "weights", value.bfloat16(), BFLOAT16, kind=PARAM),
            store(tmp_path, "optimizer", value, FLOAT32, kind=MASTER),
        )
        assert complete_masters(manifest, may_be_float=True) is manifest


def test_another_number_among_remainders_is_refused(tmp_path, masters):
    weights, remainders = split_masters(masters)
    lower = remainders.float()
    lower[-1, -1] = 0.5
    manifest = manifest_of(
        store(tmp_path, "weights", weights, BFLOAT16, kind=PARAM),
        store(tmp_path, "optimizer", lower, FLOAT32, kind=MASTER),
    )
    with pytest.raises(CorruptError, match=r"0\.5 at element 3499"):
        read(complete_masters(manifest, may_be_float=True))


def test_missing_remainders_are_refused(tmp_path, masters):
    weights, remainders = split_masters(masters)
    entry, file = store(tmp_path, "optimizer", remainders[:60], INT16, kind=MASTER)
    part = Entry("w", MASTER, INT16, SHAPE, entry.chunks)
    manifest = manifest_of(store(tmp_path, "weights", weights, BFLOAT16, kind=PARAM), (part, file))
    with pytest.raises((CorruptError, IncompleteError), match="3000 of 3500"):
        complete_masters(manifest, may_be_float=False)


@pytest.mark.parametrize("every_element", [False, True])
def test_weights_that_were_rounded_half_up_belong_to_their_masters(
    tmp_path, masters, every_element
):
    weights, _ = split_masters(masters)
    assert not torch.equal(weights, masters.bfloat16())
    stored = store(tmp_path, "optimizer", masters, FLOAT32, kind=MASTER)
    manifest = manifest_of(store(tmp_path, "weights", weights, BFLOAT16, kind=PARAM), stored)
    assert not compare_masters(manifest, every_element=every_element).unequal
    weights.view(torch.int16)[3] += 1
    manifest = manifest_of(store(tmp_path, "weights", weights, BFLOAT16, kind=PARAM), stored)
    assert compare_masters(manifest, every_element=True).unequal


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("whole_masters", [False, True])
def test_masters_of_a_state_dict_by_name_travel_to_other_layouts(tmp_path, masters, whole_masters):
    import torch.distributed.checkpoint as dcp

    weights, lower = split_masters(masters)
    state = {
        "exp_avg": torch.randn(SHAPE),
        "exp_avg_sq": torch.rand(SHAPE),
        "master_param": masters if whole_masters else lower,
        "step": torch.tensor(3.0),
    }
    group = {"params": ["w"], "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    dcp.save(
        {"model": {"w": weights}, "optim": {"state": {"w": state}, "param_groups": [group]}},
        checkpoint_id=str(tmp_path / "te"),
        no_dist=True,
    )
    reshard.split(tmp_path / "te", tmp_path / "ds", to="deepspeed", world_size=2)
    with reshard.open(tmp_path / "ds") as checkpoint:
        assert torch.equal(checkpoint.optimizer("master")["w"][...], masters)
        assert "master_param" not in {kind for kind, _ in checkpoint.manifest.entries}
    reshard.split(tmp_path / "te", tmp_path / "same", world_size=2)
    with reshard.open(tmp_path / "same") as checkpoint:  # what the same optimizer loads
        assert torch.equal(checkpoint.optimizer("master_param")["w"][...], state["master_param"])
    reshard.merge(tmp_path / "te", tmp_path / "full.safetensors", dtype="fp32")
    assert torch.equal(load_file(tmp_path / "full.safetensors")["w"], masters)
