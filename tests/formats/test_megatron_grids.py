"""Real Megatron checkpoints through random grids and forms, and back: every bit as it was."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reshard
from reshard.containers import torch_reader
from reshard.errors import UsageError
from reshard.formats.megatron.write.ranks import list_ranks
from reshard.layouts.model_parallel.sizes import Sizes

DATA = Path(__file__).parents[1] / "data" / "megatron"
SOURCES = {
    "llama": (DATA / "llama_tp2pp2" / "ckpt", {"tp": 2, "pp": 2}),  # fp32, torch's AdamW
    "gpt2": (DATA / "gpt2_vpp_distopt" / "torch", {"tp": 1, "pp": 2, "vpp": 2}),  # tied, buckets
    "buckets": (DATA / "llama_buckets_dp2" / "torch_dist", {"tp": 1, "pp": 1}),
}
GRIDS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2, 4]),
        "dp": st.sampled_from([1, 2]),
    },
    optional={
        "ckpt_format": st.sampled_from(["torch", "torch_dist"]),
        "distributed_optimizer": st.booleans(),
    },
)


def same(a, b):
    """Return whether weights and optimizer are equal bit by bit, and the step."""
    report = reshard.diff(a, b, kinds=["weight", "optimizer"])
    return not report.unequal and not report.only_a and not report.only_b and report.equal > 0


@pytest.mark.parametrize("name", SOURCES)
@settings(
    max_examples=4,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(steps=st.lists(GRIDS, min_size=1, max_size=3))
def test_any_chain_of_grids_ends_in_the_same_state(name, tmp_path_factory, steps):
    source, _ = SOURCES[name]
    place = source
    work = tmp_path_factory.mktemp("chain")
    for number, step in enumerate(steps):
        target = work / str(number)
        reshard.split(place, target, vpp=1, to="megatron", **step)
        place = target
    assert same(source, place)
    shutil.rmtree(work)


def test_the_same_grid_gives_megatrons_own_weights_file_by_file(tmp_path):
    source, grid = SOURCES["llama"]
    reshard.split(source, tmp_path / "out", **grid)
    files = sorted(source.rglob("model_optim_rng.pt"))
    assert len(files) == 4
    for theirs in files:
        ours = tmp_path / "out" / theirs.relative_to(source)
        a, b = torch_reader.read(theirs), torch_reader.read(ours)
        assert list(a.root["model"]) == list(b.root["model"])
        for name, tensor in a.root["model"].items():
            mine = b.root["model"][name]
            assert (mine is None) == (tensor is None)
            if tensor is not None:
                assert (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype)
                assert _bytes(b, mine) == _bytes(a, tensor)
        groups = a.root["optimizer"]["param_groups"]
        assert [g["params"] for g in b.root["optimizer"]["param_groups"]] == [
            g["params"] for g in groups
        ]
        for index, slots in a.root["optimizer"]["state"].items():
            for slot, tensor in slots.items():
                assert _bytes(b, b.root["optimizer"]["state"][index][slot]) == _bytes(a, tensor)


def _bytes(file, tensor):
    chunk = tensor.chunk
    data = Path(file.path).read_bytes()
    nbytes = tensor.numel * tensor.dtype.itemsize
    return hashlib.sha256(data[chunk.byte_offset : chunk.byte_offset + nbytes]).digest()


def test_what_a_trainer_puts_beside_is_no_checkpoint_of_another_kind(tmp_path):
    source, _ = SOURCES["llama"]
    run = shutil.copytree(source, tmp_path / "run" / "global_step3")
    (run / "trainer_state.json").write_text("{}")
    (tmp_path / "run" / "latest").write_text("global_step3")
    assert same(tmp_path / "run", source)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"pp": 3}, "does not divide the model's 4 layers"),
        ({"tp": 3}, r"does not divide num_attention_heads, which is 4\n.*--tp 1\|2\|4"),
        ({"tp": 8}, "does not divide num_attention_heads, which is 4"),
        ({"pp": 2, "stage_layers": "3,3"}, "does not share 4 layers among 2 stages"),
        ({"ep": 2, "dp": 2}, "has no experts"),
    ],
)
def test_a_grid_that_does_not_fit_the_model_is_refused(grid, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        reshard.split(SOURCES["llama"][0], tmp_path / "out", **{"tp": 1, "pp": 1, "dp": 1, **grid})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("expert", [1, 2, 8])
@pytest.mark.parametrize("expert_tensor", [None, 1, 2])
def test_one_rank_of_each_tensor_rank_and_stage_keeps_the_dense_layers(
    tensor, expert, expert_tensor
):
    sizes = Sizes(tensor=tensor, pipeline=2, expert=expert, expert_tensor=expert_tensor)
    first = [(rank.tensor, rank.stage) for rank in list_ranks(sizes) if rank.is_first]
    assert sorted(first) == [(t, stage) for t in range(tensor) for stage in range(2)]
