"""Casts of contiguous elements by the compiled module ``_cast``, if this installation has it.

It is optional: `reshard.engine.move.cast` computes the same bits with numpy. This module needs no
import of numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from reshard.system.checksum import crc32
from reshard.system.compiled import find_compiled

if TYPE_CHECKING:
    from typing_extensions import Buffer

PIECE_BYTES = 128 << 10  # `read` casts so many at a time: they and the target stay in the cache
_NAMES = [dtype.name for dtype in (FLOAT32, FLOAT16, BFLOAT16)]
_PAIRS = {(source, target) for source in _NAMES for target in _NAMES if source != target}

_compiled = find_compiled("reshard.engine.move._cast")


def can_cast(dtype: DType, target_dtype: DType) -> bool:
    """Return whether the module exists and has a loop for these dtypes."""
    # A hash of text is faster than that of a DType.
    return _compiled is not None and (dtype.name, target_dtype.name) in _PAIRS


def cast(
    source: Buffer, target: Buffer, dtype: DType, target_dtype: DType, *, clamp: bool
) -> tuple[int, int] | None:
    """Fill ``target`` with the values of ``source``; see `reshard.engine.move.cast.cast`.

    Returns:
        The counts of `reshard.engine.move.cast.cast`, or None if numpy must do this cast: the
        module does not exist, it has no loop for these dtypes, or values must be clamped.
    """
    if _compiled is None or not can_cast(dtype, target_dtype):
        return None
    counts: tuple[int, int] = _compiled.cast(dtype.name, target_dtype.name, source, target)
    # The compiled loops do not clamp: numpy repeats a cast in which a value became infinite.
    return None if clamp and counts[0] else counts


def read(
    descriptor: int,
    byte_offset: int,
    target: Buffer,
    dtype: DType,
    target_dtype: DType,
    *,
    piece: Buffer,
    crc: int | None,
) -> tuple[int, int, int | None] | None:
    """Fill ``target`` with the values at an offset of a file, which are cast as they are read.

    Args:
        descriptor: an open file.
        byte_offset: where its first value is.
        target: bytes, in ``target_dtype``; their number determines the number of values.
        dtype: the dtype of the file.
        target_dtype: the dtype of the target; `can_cast` must be true for both.
        piece: memory for the bytes that are read at a time (`PIECE_BYTES`).
        crc: the checksum that those of the bytes read continue; None if it is not needed.

    Returns:
        The counts of `reshard.engine.move.cast.cast` without clamping, and the checksum; or None if
        the file cannot be read: it ended or failed, which another read explains.
    """
    assert _compiled is not None
    result: tuple[int, int, int | None] | None = _compiled.read(
        *(dtype.name, target_dtype.name, descriptor, byte_offset, target, piece),
        *(None if crc is None else crc32, crc),
    )
    return result
