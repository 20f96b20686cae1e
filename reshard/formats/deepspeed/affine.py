"""AutoTP's affine maps: where the blocks of each rank lie in the whole tensor.

Offsets and strides are those of ``torch.as_strided``, in elements. Source: DeepSpeed 0.19.8
``checkpoint/affine.py`` (``ParamAffineMap.to_dict``), ``module_inject/layers.py``
(``collect_autotp_universal_checkpoint_info``).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from reshard.box import Index, row_major
from reshard.model_parallel.shards import REPLICATED, Split


def split(described: Mapping[str, Any]) -> Split | None:
    """How ranks share a tensor of which each holds one block; None where they hold others."""
    shape = tuple(int(n) for n in described["logical_shape"])
    ranks = [described["ranks"][rank] for rank in sorted(described["ranks"], key=int)]
    held = [tuple(int(n) for n in rank["shard_shape"]) for rank in ranks]
    strides = row_major(shape, 1)
    if any(len(local) != len(shape) for local in held):
        return None
    if all(local == shape for local in held):
        whole = all(_is_block(rank, shape, 0, strides) for rank in ranks)
        return REPLICATED if whole else None
    for dim in range(len(shape)):
        widths = [local[dim] for local in held]
        starts = [0, *accumulate(widths)]
        if starts[-1] == shape[dim] and all(
            _is_block(rank, local, start * strides[dim], strides)
            for rank, local, start in zip(ranks, held, starts, strict=False)
        ):
            return Split(dim, widths=(tuple(widths),))
    return None


def _is_block(rank: Mapping[str, Any], local: Index, offset: int, strides: Index) -> bool:
    """Whether a rank holds one unscaled block, whose first element lies there in the whole."""
    pieces = [piece for piece in rank["pieces"] if 0 not in piece["shape"]]
    if 0 in local:
        return not pieces
    return len(pieces) == 1 and (
        tuple(pieces[0]["shape"]) == local
        and _view(pieces[0]["source"]) == (offset, strides)
        and _view(pieces[0]["dest"]) == (0, row_major(local, 1))
        and pieces[0].get("scale", 1.0) == 1.0
    )


def _view(said: Any) -> tuple[int, Index]:
    return int(said[0]), tuple(int(stride) for stride in said[1])
