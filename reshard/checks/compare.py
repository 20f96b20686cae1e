"""Comparison of two tensors in blocks: where, and by how much, they differ.

Blocks are first compared as raw memory; numbers are computed only for blocks that differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.core import dtypes
from reshard.core.box import Box, contiguous_cuts, flat_span
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry
from reshard.system.files import SourceFiles
from reshard.system.threads import parallel_for
from reshard.tensors.lazy import read_block

_NO_ULPS = (1 << 64) - 1  # the distance of two elements that no number of ulps makes equal
_UNSIGNED_FLOAT = "float8_e8m0fnu"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed distance of two elements: ``|a - b| <= atol + rtol |b|``, or ``ulp`` steps.

    If all are zero, only equal bits are equal: two NaNs with different bits differ. Otherwise, two
    NaNs are equal, as are 0 and -0, and an infinity equals only itself. ``ulp`` applies to the
    elements of floating point and, part by part, of complex tensors; ``atol`` and ``rtol`` apply
    to all, and for complex numbers to the modulus of a finite difference.
    """

    atol: float = 0.0
    rtol: float = 0.0
    ulp: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether elements must have equal bits."""
        return not (self.atol or self.rtol or self.ulp)


@dataclass(slots=True)
class TensorDifference:
    """The unequal elements of a tensor, or of a block of it.

    Args:
        first: the flat index of the first unequal element, with both values there.
        count: how many elements are unequal under the tolerance.
        max_abs, max_rel: the largest distance between finite elements, absolute and relative to
            the larger of the two.
        max_ulp: the largest distance of finite elements in units in the last place; 0 if the dtype
            is neither floating point nor complex.
        not_finite: the number of unequal elements of which one is NaN or infinite.
    """

    first: int
    first_values: tuple[Any, Any]
    count: int
    max_abs: float
    max_rel: float
    max_ulp: int
    not_finite: int

    def add(self, other: TensorDifference) -> None:
        """Add the unequal elements of another block of the same tensor."""
        if other.first < self.first:
            self.first, self.first_values = other.first, other.first_values
        self.count += other.count
        self.not_finite += other.not_finite
        self.max_abs = max(self.max_abs, other.max_abs)
        self.max_rel = max(self.max_rel, other.max_rel)
        self.max_ulp = max(self.max_ulp, other.max_ulp)


def find_differences(
    pairs: Sequence[tuple[Entry, Entry, DType]],
    tolerance: Tolerance,
    *,
    workers: int,
    window_bytes: int,
    progress: Callable[[int], None],
) -> dict[int, TensorDifference]:
    """Compare pairs of equal shape, each as if cast to its dtype, streaming both sides.

    Args:
        pairs: two tensors of equal shape, and the dtype to compare them in.
        window_bytes: the size of a block of one side.
        progress: called with the number of bytes read from both sides.

    Returns:
        The differences by position in ``pairs``; equal pairs have no item.
    """
    result: dict[int, TensorDifference] = {}
    lock = threading.Lock()

    def items() -> Iterator[tuple[int, Box]]:
        for number, (a, b, dtype) in enumerate(pairs):
            widest = max(a.dtype.itemsize, b.dtype.itemsize, dtype.itemsize)
            for box in contiguous_cuts(a.shape, max(window_bytes // widest, 1)):
                yield number, box

    def compare(item: tuple[int, Box]) -> None:
        number, box = item
        a, b, dtype = pairs[number]
        left, right = read_block(pool, a, box, dtype), read_block(pool, b, box, dtype)
        if left == right:
            return
        block = compare_blocks(left, right, dtype, tolerance, flat_span(box, a.shape)[0])
        if block is not None:
            with lock:
                if number in result:
                    result[number].add(block)
                else:
                    result[number] = block

    def done(item: tuple[int, Box]) -> None:
        number, box = item
        a, b, _ = pairs[number]
        progress(box.volume * (a.dtype.itemsize + b.dtype.itemsize))

    with SourceFiles() as pool:
        parallel_for(items(), lambda: compare, workers, done)
    return result


def compare_blocks(
    left: bytearray, right: bytearray, dtype: DType, tolerance: Tolerance, start: int
) -> TensorDifference | None:
    """Compare two blocks with unequal bytes; return None if the tolerance allows all differences.

    Args:
        left, right: contiguous elements of ``dtype``.
        start: the flat index of the first element.
    """
    import numpy as np

    # numpy has no integer of 16 bytes: complex128 is compared as two words.
    bits = np.dtype(f"<u{min(dtype.itemsize, 8)}")
    word_count = dtype.itemsize // bits.itemsize
    raw = [np.frombuffer(side, bits).reshape(-1, word_count) for side in (left, right)]
    unequal = (raw[0] != raw[1]).any(axis=1).nonzero()[0]
    one, two = (_to_numbers(side, unequal, dtype) for side in (left, right))
    with np.errstate(all="ignore"):
        apart = _measure_distances(one, two)
        sizes = [np.abs(side * 1.0) for side in (one, two)]
        ulps = _count_ulps(left, right, unequal, dtype)
        finite = np.isfinite(apart)
        if not tolerance.is_exact:
            near = (apart <= tolerance.atol + tolerance.rtol * sizes[1]) & finite
            near |= ulps <= min(tolerance.ulp, _NO_ULPS - 1)
            unequal, one, two = unequal[~near], one[~near], two[~near]
            apart, finite, ulps = (x[~near] for x in (apart, finite, ulps))
            sizes = [side[~near] for side in sizes]
        if not unequal.size:
            return None
        larger = np.maximum(*sizes)
        relative = np.where(larger > 0, apart / larger, 0.0)
    return TensorDifference(
        first=start + int(unequal[0]),
        first_values=(one[0].item(), two[0].item()),
        count=int(unequal.size),
        max_abs=float(apart[finite].max(initial=0.0)),
        max_rel=float(relative[finite].max(initial=0.0)),
        max_ulp=int(ulps[ulps < _NO_ULPS].max(initial=0)),
        not_finite=int((~finite).sum()),
    )


def _to_numbers(side: bytearray, at: Any, dtype: DType) -> Any:
    """Return the elements at positions ``at`` as float64, complex128, int64 or uint64."""
    import numpy as np

    from reshard.engine.move import cast
    from reshard.quantised.decode import decode_table

    if dtype.family == "float8":
        return decode_table(dtype.name)[np.frombuffer(side, np.uint8)[at]].astype(np.float64)
    if dtype.family == "float":
        stored: Any = np.frombuffer(side, cast.get_numpy_dtype(dtype, casting=True))[at]
        return cast.as_numbers(stored, dtype).astype(np.float64)
    # An element of two packed numbers is compared as its byte.
    values: Any = np.frombuffer(side, np.dtype("u1" if dtype.packed > 1 else dtype.name))[at]
    if dtype.family == "complex":
        return values.astype(np.complex128)
    return values.astype(np.uint64 if dtype.name == "uint64" else np.int64)


def _measure_distances(one: Any, two: Any) -> Any:
    """Return the distances of the elements as float64; those of unequal integers are not 0."""
    import numpy as np

    if one.dtype.kind in "iu":
        # float64 does not have every integer above 2**53. The difference modulo 2**64 is exact.
        larger, smaller = np.maximum(one, two), np.minimum(one, two)
        return (larger.astype(np.uint64) - smaller.astype(np.uint64)).astype(np.float64)
    return np.abs(one - two)


def _count_ulps(left: bytearray, right: bytearray, at: Any, dtype: DType) -> Any:
    """Return the distances of the elements at ``at`` in ulp, as uint64.

    Equal values are 0 ulp apart: 0 and -0, and two NaNs with any bits. `_NO_ULPS` is the distance
    of a NaN or an infinity to another value, and of unequal elements that are not floats. The
    distance of complex numbers is the larger of those of their real and imaginary parts.
    """
    import numpy as np

    if dtype.family == "complex":
        half = dtypes.FLOAT32 if dtype.itemsize == 2 * dtypes.FLOAT32.itemsize else dtypes.FLOAT64
        parts = [_count_ulps(left, right, 2 * at + part, half) for part in (0, 1)]
        return np.maximum(*parts)
    if dtype.family not in ("float", "float8"):
        return np.full(at.size, _NO_ULPS, np.uint64)
    words = [np.frombuffer(side, f"<u{dtype.itemsize}")[at] for side in (left, right)]
    a, b = (_to_numbers(side, at, dtype) for side in (left, right))
    # Without the sign bit, the bits of floats are integers in the order of the magnitudes.
    sign = 0 if dtype.name == _UNSIGNED_FLOAT else 1 << (8 * dtype.itemsize - 1)
    x, y = ((word & ~word.dtype.type(sign)).astype(np.uint64) for word in words)
    same_sign = (words[0] ^ words[1]) & words[0].dtype.type(sign) == 0
    ulps = np.where(same_sign, np.maximum(x, y) - np.minimum(x, y), x + y)
    ulps[~(np.isfinite(a) & np.isfinite(b))] = _NO_ULPS
    ulps[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
    return ulps
