"""Where a parameter lies in an FSDP1 flat parameter, in elements.

Source: torch 2.13 ``torch/distributed/fsdp/_flat_param.py``, ``_init_flat_param_and_metadata`` and
``_get_aligned_numel``. How the whole is then cut over the ranks is ``layout.equal_piece``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from reshard.box import Index
from reshard.dtypes import DType

_ALIGNMENT = 16  # bytes: what TorchInductor asks of an address


def alignment(compute: DType) -> int:
    """Elements to which ``use_orig_params=True`` aligns each member.

    Args:
        compute: the dtype in which forward runs: ``MixedPrecision.param_dtype``, else the
            parameters' own. The flat parameter may be stored in another (float32 beside bfloat16).

    >>> from reshard.dtypes import parse
    >>> alignment(parse("fp32")), alignment(parse("bf16"))
    (4, 8)
    """
    return _ALIGNMENT // compute.itemsize


def place(
    members: Sequence[tuple[str, Index]], *, aligned_to: int, ranks: int
) -> tuple[dict[str, int], int]:
    """First flat element of each member, and the elements of the whole before it is cut.

    Args:
        members: names and shapes, in flat order.
        aligned_to: 1 lays them end to end (``use_orig_params=False``). More
            (``use_orig_params=True``: ``alignment``) starts each at a multiple of it, and pads the
            end to a multiple of ``ranks``.
        ranks: how many share the flat parameter; with hybrid sharding, those of one replica.

    >>> place([("odd", (7, 13)), ("small", (3,))], aligned_to=1, ranks=4)
    ({'odd': 0, 'small': 91}, 94)
    >>> place([("odd", (7, 13)), ("small", (3,))], aligned_to=4, ranks=4)
    ({'odd': 0, 'small': 92}, 96)
    """
    starts: dict[str, int] = {}
    total = 0
    for fqn, shape in members:
        starts[fqn] = _rounded_up(total, aligned_to)
        total = starts[fqn] + prod(shape)
    return starts, total if aligned_to == 1 else _rounded_up(total, ranks)


def _rounded_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
