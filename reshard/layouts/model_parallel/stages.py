"""The layers of each pipeline stage, and of each model chunk of an interleaved schedule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from reshard.errors import UsageError
from reshard.layouts.model_parallel.sizes import Sizes


def list_chunks(sizes: Sizes) -> list[tuple[int, int]]:
    """Return each (pipeline rank, its chunk) in the order in which layers pass through them."""
    return [(stage, chunk) for chunk in range(sizes.virtual) for stage in range(sizes.pipeline)]


def assign_layers(sizes: Sizes, count: int, counts: Sequence[int] | None) -> list[range]:
    """Return the layers of each of `list_chunks`, by their numbers in the whole model.

    Args:
        counts: number of layers of each; None: the same for all.

    Raises:
        UsageError: ``counts`` do not add up, or ``count`` cannot be shared evenly.
    """
    chunks = sizes.pipeline * sizes.virtual
    if counts is None:
        if count % chunks:
            raise UsageError(
                f"pipeline parallel size {sizes.pipeline}"
                + (f" with {sizes.virtual} chunks each" if sizes.virtual > 1 else ""),
                f"does not divide the model's {count} layers",
                "state the number of layers of each stage: --stage-layers N,N,...",
            )
        counts = [count // chunks] * chunks
    if len(counts) != chunks or sum(counts) != count or min(counts) < 0:
        raise UsageError(
            f"--stage-layers {','.join(map(str, counts))}",
            f"does not share {count} layers among {chunks} stages",
        )
    ends = list(accumulate(counts))
    return [range(end - n, end) for end, n in zip(ends, counts, strict=True)]


def parse_stage_layers(text: str | None) -> tuple[int, ...] | None:
    """Return the number of layers of each pipeline stage, as ``--stage-layers`` states it.

    Raises:
        UsageError: the text is not a list of numbers.
    """
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--stage-layers {text}", "is not a list of numbers", "e.g. 3,4,4,3")
    return tuple(map(int, parts))
