"""Casts of contiguous elements by the compiled module ``_cast``, if this installation has it.

It is optional: `reshard.engine.move.cast` computes the same bits with numpy. This module needs no
import of numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from reshard.system.compiled import find_compiled

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NAMES = [dtype.name for dtype in (FLOAT32, FLOAT16, BFLOAT16)]
_PAIRS = {(source, target) for source in _NAMES for target in _NAMES if source != target}

_cast: Callable[[str, str, Buffer, Buffer], tuple[int, int]] | None = getattr(
    find_compiled("reshard.engine.move._cast"), "cast", None
)


def cast(
    source: Buffer, target: Buffer, dtype: DType, target_dtype: DType, *, clamp: bool
) -> tuple[int, int] | None:
    """Fill ``target`` with the values of ``source``; see `reshard.engine.move.cast.cast`.

    Returns:
        The counts of `reshard.engine.move.cast.cast`, or None if numpy must do this cast: the
        module does not exist, it has no loop for these dtypes, or values must be clamped.
    """
    pair = dtype.name, target_dtype.name  # a hash of text is faster than that of a DType
    if _cast is None or pair not in _PAIRS:
        return None
    counts = _cast(*pair, source, target)
    # The compiled loops do not clamp: numpy repeats a cast in which a value became infinite.
    return None if clamp and counts[0] else counts
