"""Rows of a fused parameter that are cut apart: each rank has its share of every segment."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.errors import CorruptError, UsageError
from reshard.formats.megatron import dist
from reshard.layouts.model_parallel import segments, shards
from reshard.layouts.model_parallel.rules import load_whole_table
from reshard.state_dict.global_tensor import GlobalTensor

ARGS = {"mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_num_groups": 4, "mamba_state_dim": 3}
DELTA = {
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 3,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 5,
}
IN_PROJ = "decoder.layers.1.mixer.in_proj.weight"


def split_of(name, args):
    rule = load_whole_table("megatron").require(name, {}).rule
    return rule.split(gated=False, args=args, source="args")


@pytest.mark.parametrize(
    ("name", "args", "rows"),
    [
        (IN_PROJ, ARGS, (32, 32, 12, 12, 8)),
        ("decoder.layers.1.mixer.conv1d.bias", ARGS, (32, 12, 12)),
        ("decoder.layers.1.self_attention.in_proj.weight", DELTA, (12, 12, 40, 40, 8, 8)),
        ("decoder.layers.1.self_attention.conv1d.weight", DELTA, (12, 12, 40)),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_its_share_of_each_segment(name, args, rows, ranks):
    """As mamba_mixer.py and gated_delta_net.py of megatron-core split it in sharded_state_dict."""
    whole = torch.arange(sum(rows))
    split = split_of(name, args)
    for rank in range(ranks):
        wanted = torch.cat([part.chunk(ranks)[rank] for part in whole.split(rows)])
        shape, blocks = shards.list_blocks(name, (sum(rows),), split, ranks, rank)
        found = torch.full(shape, -1)
        for block, local in blocks:
            at, to, count = block.origin[0], local.origin[0], block.shape[0]
            found[to : to + count] = whole[at : at + count]
        assert torch.equal(found, wanted)


def test_the_number_of_heads_follows_from_the_width_where_it_is_not_given():
    args = {**ARGS, "mamba_num_heads": None, "hidden_size": 16}
    assert split_of(IN_PROJ, args) == split_of(IN_PROJ, ARGS)


def test_segments_of_other_rows_than_the_tensor_are_refused():
    with pytest.raises(CorruptError, match="has 90 rows along dim 0, and its parts have 96"):
        shards.list_blocks(IN_PROJ, (90, 4), split_of(IN_PROJ, ARGS), 2, 0)
    with pytest.raises(UsageError, match="does not state mamba_states"):
        split_of(IN_PROJ, {"mamba_num_heads": 8, "mamba_head_dim": 4})
    with pytest.raises(CorruptError, match="not a whole number"):
        segments.evaluate("heads/3", {}, {"heads": 8}, "args")


def test_torch_dist_s_segments_are_joined(tmp_path):
    """Each is a tensor of its own there, under the parameter's key."""
    rows = {"z": 32, "x": 32, "B": 12, "C": 12, "dt": 8}
    whole = torch.arange(96 * 4, dtype=torch.float32).reshape(96, 4)
    parts = dict(zip(rows, whole.split([*rows.values()]), strict=True))
    save_file(
        {f"{IN_PROJ}.{k}": v.contiguous() for k, v in parts.items()}, tmp_path / "a.safetensors"
    )
    with reshard.open(tmp_path / "a.safetensors") as held:
        stored = {
            e.fqn: GlobalTensor(e.dtype, e.shape, tuple(e.chunks))
            for e in held.manifest.entries.values()
        }
    table = load_whole_table("megatron")
    joined = dist._join_segments(stored, table)
    assert list(joined) == [IN_PROJ]
    starts = [chunk.box.origin[0] for chunk in joined[IN_PROJ].chunks]
    assert starts == [
        {"z": 0, "x": 32, "B": 64, "C": 76, "dt": 88}[k.rpartition(".")[2]]
        for k in (f"{IN_PROJ}.{name}" for name in rows)
    ]
    assert joined[IN_PROJ].shape == (96, 4)
    del stored[f"{IN_PROJ}.C"]
    with pytest.raises(reshard.errors.IncompleteError, match="has no segment 'C'"):
        dist._join_segments(stored, table)
