"""Comparison of two tensors in blocks: where, and by how much, they differ.

Blocks are first compared as raw memory; numbers are computed only for blocks that differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.box import Box, contiguous_cuts, flat_span
from reshard.dtypes import DType
from reshard.files import SourceFiles
from reshard.manifest import Entry
from reshard.tensors import read_block
from reshard.threads import parallel_for


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed distance of two elements: ``|a - b| <= atol + rtol |b|``, or ``ulp`` steps.

    If all are zero, only equal bits are equal: two NaNs with different bits differ.
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
        max_ulp: the largest distance in units in the last place; 0 if the dtype is not a float.
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
        tolerance: how far elements may be apart.
        workers: the number of threads.
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
        block = _compare_block(pool, *pairs[number], box, tolerance)
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


def _compare_block(
    pool: SourceFiles, a: Entry, b: Entry, dtype: DType, box: Box, tolerance: Tolerance
) -> TensorDifference | None:
    """Compare one block of two tensors as if cast to ``dtype``; return None if they are equal.

    ``box`` must be contiguous in the tensor, like the boxes of `box.contiguous_cuts`.
    """
    left, right = read_block(pool, a, box, dtype), read_block(pool, b, box, dtype)
    if left == right:
        return None
    return compare_blocks(left, right, dtype, tolerance, flat_span(box, a.shape)[0])


def compare_blocks(
    left: bytearray, right: bytearray, dtype: DType, tolerance: Tolerance, start: int
) -> TensorDifference | None:
    """Compare two blocks with unequal bytes; return None if the tolerance allows all differences.

    Args:
        left, right: contiguous elements of ``dtype``.
        dtype: the dtype of both sides.
        tolerance: how far elements may be apart.
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
        apart = np.abs(one - two)
        larger = np.maximum(np.abs(one), np.abs(two))
        ulps = _count_ulps(raw, unequal, dtype)
        finite = np.isfinite(apart)
        if not tolerance.is_exact:
            near = (apart <= tolerance.atol + tolerance.rtol * np.abs(two)) & finite
            near |= finite & (ulps <= tolerance.ulp) & (tolerance.ulp > 0)
            near |= np.isnan(one) & np.isnan(
                two
            )  # with a tolerance, the bits of a NaN do not count
            unequal, one, two = unequal[~near], one[~near], two[~near]
            apart, larger, finite, ulps = (x[~near] for x in (apart, larger, finite, ulps))
        if not unequal.size:
            return None
        relative = np.where(larger > 0, apart / larger, 0.0)
    return TensorDifference(
        first=start + int(unequal[0]),
        first_values=(one[0].item(), two[0].item()),
        count=int(unequal.size),
        max_abs=float(apart[finite].max(initial=0.0)),
        max_rel=float(relative[finite].max(initial=0.0)),
        max_ulp=int(ulps[finite].max(initial=0)),
        not_finite=int((~finite).sum()),
    )


def _to_numbers(side: bytearray, at: Any, dtype: DType) -> Any:
    """Return the elements at positions ``at`` as float64 or complex128."""
    import numpy as np

    from reshard.move import cast

    if dtype.family == "float8":
        import torch  # numpy has no float8

        elements = torch.frombuffer(side, dtype=getattr(torch, dtype.name))
        return elements[torch.from_numpy(at)].to(torch.float64).numpy()
    if dtype.family == "float":
        stored: Any = np.frombuffer(side, cast.numpy_dtype(dtype, casting=True))[at]
        return cast.as_numbers(stored, dtype).astype(np.float64)
    values: Any = np.frombuffer(side, np.dtype(dtype.name))[at]
    if dtype.family == "complex":
        return values.astype(np.complex128)
    return values.astype(np.float64)  # precise enough for the distance of two integers


def _count_ulps(raw: list[Any], at: Any, dtype: DType) -> Any:
    """Return the distances of the elements at ``at`` in ulp; zeros if the dtype is not a float."""
    import numpy as np

    if dtype.family not in ("float", "float8"):
        return np.zeros(at.size, np.int64)
    sign = np.uint64(1 << (8 * dtype.itemsize - 1))
    # Without the sign bit, the bits of floats are integers in the order of the magnitudes.
    ordered = []
    for side in raw:
        bits = side[at, 0].astype(np.uint64)
        magnitude = (bits & ~sign).astype(np.int64)
        ordered.append(np.where(bits & sign, -magnitude, magnitude))
    return np.abs(ordered[0] - ordered[1])
