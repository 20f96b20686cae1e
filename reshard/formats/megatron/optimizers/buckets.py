"""The distributed optimizer's flat buffers, and the position of each parameter in them.

A buffer takes the parameters of one model chunk, dtype and kind (dense, expert) from the last to
the first. Each starts at a multiple of 64 elements. A bucket closes when it is full, and before and
after a copy of the embedding that two stages share. Files hold the buckets without the padding at
their ends, one after the other or by themselves.

Source: Megatron-LM core_v0.16.1 ``core/distributed/param_and_grad_buffer.py``
(_ParamAndGradBuffer.__init__), ``core/optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from reshard.core.box import Index
from reshard.layouts.partition import Member
from reshard.units import round_up

ALIGNMENT = 64  # elements: 128 bytes of the smallest dtype, which has 16 bits


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter as one rank holds it.

    Args:
        alone: whether two stages share it, so that it has a separate bucket.
    """

    fqn: str
    shape: Index
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket: its members' positions, and its elements without the padding at its end."""

    members: tuple[Member, ...]
    numel: int


def make_buckets(params: Sequence[Param], size: int | None) -> list[Bucket]:
    """Return the buckets of a buffer.

    Args:
        params: in the order of ``named_parameters``.
        size: elements that close a bucket; None: only a shared parameter closes one.
    """
    closed: list[Bucket] = []
    members: list[Member] = []
    end = 0

    def close(numel: int) -> None:
        nonlocal end
        closed.append(Bucket(tuple(members), numel))
        members.clear()
        end = 0

    for param in reversed(params):
        start = round_up(end, ALIGNMENT)
        # Megatron aligns first and closes then, so the gap before a shared parameter counts as
        # elements of the bucket in front of it.
        if param.alone and members:
            close(start)
            start = 0
        members.append(Member(param.fqn, param.shape, start))
        end = start + prod(param.shape)
        if param.alone or (size is not None and end >= size):
            close(end)
    if members:
        close(end)
    return closed


def fit_buckets(params: Sequence[Param], numels: Sequence[int]) -> list[Bucket] | None:
    """Return the buckets of a buffer whose bucket sizes are known; None if they do not fit."""
    fitted: list[Bucket] = []
    left = list(params)
    for numel in numels:
        members: list[Member] = []
        end = 0
        # Taking as many as fit is exact: the order is fixed, and the next one would exceed the
        # bucket.
        while left:
            start = round_up(end, ALIGNMENT)
            stop = start + prod(left[-1].shape)
            if stop > numel or (left[-1].alone and members):
                break
            param = left.pop()
            members.append(Member(param.fqn, param.shape, start))
            end = stop
            if param.alone:
                break
        # A bucket that a shared parameter closes reaches to the aligned start of that parameter.
        if numel not in (end, round_up(end, ALIGNMENT)):
            return None
        fitted.append(Bucket(tuple(members), numel))
    return None if left else fitted


def concatenate(stored: Iterable[Bucket]) -> tuple[list[Member], int]:
    """Return the members of buckets stored one after the other, and the number of elements."""
    stored = list(stored)
    starts = [0, *accumulate(bucket.numel for bucket in stored)]
    members = [
        Member(member.fqn, member.shape, start + member.start)
        for start, bucket in zip(starts, stored, strict=False)
        for member in bucket.members
    ]
    return members, starts[-1]
