"""Offsets of parameters in an FSDP1 flat parameter, in elements.

Source: torch 2.13 ``torch/distributed/fsdp/_flat_param.py``, ``_init_flat_param_and_metadata`` and
``_get_aligned_numel``. `partition.compute_equal_piece` then cuts the whole over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from reshard.core.box import Index
from reshard.core.dtypes import DType
from reshard.units import round_up

_ALIGNMENT = 16  # bytes; TorchInductor requires it of addresses


def get_alignment(compute: DType) -> int:
    """Return the elements to which ``use_orig_params=True`` aligns each member.

    Args:
        compute: dtype of forward: ``MixedPrecision.param_dtype``, else the parameters' own dtype.
            The flat parameter may be stored in another dtype (float32 beside bfloat16).

    >>> from reshard.core.dtypes import parse
    >>> get_alignment(parse("fp32")), get_alignment(parse("bf16"))
    (4, 8)
    """
    return _ALIGNMENT // compute.itemsize


def place_members(
    members: Sequence[tuple[str, Index]], *, aligned_to: int, ranks: int
) -> tuple[dict[str, int], int]:
    """Return the first flat element of each member, and the number of elements before the cut.

    Args:
        members: names and shapes, in flat order.
        aligned_to: 1 puts the members end to end (``use_orig_params=False``). A larger number
            (``use_orig_params=True``: `get_alignment`) starts each at a multiple of it, and pads
            the end to a multiple of ``ranks``.
        ranks: number of ranks that share the flat parameter; with hybrid sharding, those of one
            replica.

    >>> place_members([("odd", (7, 13)), ("small", (3,))], aligned_to=1, ranks=4)
    ({'odd': 0, 'small': 91}, 94)
    >>> place_members([("odd", (7, 13)), ("small", (3,))], aligned_to=4, ranks=4)
    ({'odd': 0, 'small': 92}, 96)
    """
    starts: dict[str, int] = {}
    total = 0
    for fqn, shape in members:
        starts[fqn] = round_up(total, aligned_to)
        total = starts[fqn] + prod(shape)
    # FSDP with aligned members pads to a multiple of the ranks, to spare the reduce-scatter a copy.
    return starts, total if aligned_to == 1 else round_up(total, ranks)
