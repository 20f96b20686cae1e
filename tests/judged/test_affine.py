"""AutoTP's affine maps, compared with those that DeepSpeed itself writes."""

from __future__ import annotations

import pytest

from reshard.formats.deepspeed.cuts import find_affine_split as split
from reshard.layouts.model_parallel.shards import REPLICATED, Split

affine = pytest.importorskip("deepspeed.checkpoint.affine")


def test_one_block_per_rank_is_a_cut_with_its_widths():
    for dim, widths in ((0, (15, 14)), (1, (8, 8, 4, 4)), (0, (2, 0))):
        shape = (sum(widths), 7) if dim == 0 else (7, sum(widths))
        made = affine.contiguous_split_map(shape, list(widths), dim).to_dict()
        assert split(made) == Split(dim, widths=(widths,))


def test_a_copy_on_every_rank_is_not_a_cut_unless_it_is_scaled():
    assert split(affine.replicated_map((5, 3), 2).to_dict()) == REPLICATED
    assert split(affine.replicated_map((5,), 2, scale=0.5).to_dict()) is None


def test_blocks_with_gaps_are_not_a_cut():
    fused = affine.segmented_map((12, 4), [(8, False), (4, True)], 0, 2, split_widths=[[4, 4]])
    assert split(fused.to_dict()) is None
    turned = affine.block_gather_map((8, 4), {0: [0, 2], 1: [1, 3]}, 2, 0)
    assert split(turned.to_dict()) is None
