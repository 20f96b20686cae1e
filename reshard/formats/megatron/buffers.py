"""Where parameters stand in the flat buffers of Megatron's distributed optimizer.

The parameters of a buffer stand in reverse order, each from a multiple of 64 elements on. A bucket
closes at ``bucket_size`` elements or more; an embedding that the first and the last pipeline stage
share is alone in its bucket. What a checkpoint holds is the buckets without the padding at their
ends, which depends on the number of data-parallel ranks.

Source: Megatron-LM core_v0.16.1 ``core/distributed/param_and_grad_buffer.py``
(``_ParamAndGradBuffer.__init__``), ``core/optimizer/distrib_optimizer.py``
(``get_parameter_state_dp_zero``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 64  # elements


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a buffer: its name, elements, and whether it is a shared embedding."""

    name: str
    numel: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters with the element of the bucket at which each begins, and the bucket's elements."""

    places: tuple[tuple[Member, int], ...]
    numel: int


def buckets(members: Iterable[Member], bucket_size: int | None = None) -> list[Bucket]:
    """The buckets of one buffer.

    A bucket begins at a multiple of 128 elements of the buffer, so that alignment within it is
    alignment in the buffer.

    Args:
        members: in the model's order.
        bucket_size: elements from which on a bucket closes; None: there is one.
    """
    found: list[Bucket] = []
    places: list[tuple[Member, int]] = []
    end = 0

    def close(numel: int) -> None:
        found.append(Bucket(tuple(places), numel))
        places.clear()

    for member in reversed(list(members)):
        start = end + -end % ALIGNMENT
        if member.shared and places:
            close(start)
            start = 0
        places.append((member, start))
        end = start + member.numel
        if member.shared or (bucket_size is not None and end >= bucket_size):
            close(end)
            end = 0
    if places:
        close(end)
    return found
