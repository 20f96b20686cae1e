"""Compare values that a checkpoint holds twice: 16-bit weights and their fp32 master weights.

A run in mixed precision saves each weight in the dtype of training, usually from one rank, and its
master weights from the ranks that own their partitions. The first is the cast of the second. A file
of another rank, step or run breaks that, although its name, sizes and steps may be right.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.checks.identity.claims import Conflict
from reshard.core.box import Box, contiguous_cuts
from reshard.core.chunks import Chunk
from reshard.core.dtypes import BFLOAT16, FLOAT32, DType
from reshard.core.manifest import MASTER, PARAM, Entry, Manifest
from reshard.engine.move import compiled
from reshard.engine.move.ahead import AHEAD_BYTES, Held, ReadAhead
from reshard.engine.move.fill import fill, group_into_batches, list_ranges
from reshard.engine.planning.copies import Copy, CopyPlanner
from reshard.quantised.remainders import is_computed, round_ties_as_stored
from reshard.system.derived import Derived
from reshard.system.files import SourceFiles
from reshard.training.optimizers import NEVER_NEGATIVE
from reshard.units import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

_SAMPLED = 128  # elements of each stored block
_BATCH = 1 << 18  # elements that are read before they are compared together
_EVERY = 1 << 20  # elements of a box if all elements are compared


@dataclass(slots=True)
class Compared:
    """The result of a comparison: the files of masters that do not belong to their weights."""

    elements: int = 0
    unequal: list[Conflict] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Sample:
    """One box of a weight that is inside of one block of its master weights."""

    fqn: str
    box: Box
    master: Sequence[Copy]
    weight: Sequence[Copy]
    dtypes: tuple[DType, DType]


def are_comparable(a: Entry, b: Entry) -> bool:
    """Return whether the cast of one tensor can be compared with the other."""
    floats = a.dtype.family == b.dtype.family == "float"
    return a.shape == b.shape and (a.dtype == b.dtype or floats)


def compare_masters(manifest: Manifest, *, every_element: bool) -> Compared:
    """Compare the weights of the module with the cast of their master weights.

    Args:
        every_element: compare all elements, not a sample of each stored block.

    Returns:
        The number of elements that were compared, and the files whose values disagree.
    """
    result = Compared()
    mismatches: Counter[tuple[str, str]] = Counter()  # (file of masters, file of weights)
    totals: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    with SourceFiles(manifest.files) as pool, _read_ahead(pool, _list_copies) as ahead:
        samples = _choose_samples(manifest, every_element=every_element)
        batches = group_into_batches(samples, lambda sample: sample.box.volume, _BATCH)
        for batch, held in ahead.iterate(batches):
            result.elements += sum(sample.box.volume for sample in batch)
            with held:
                equal = _compare(pool, held, batch)
            for sample, is_equal in zip(batch, equal, strict=True):
                pair = sample.master[0].file, sample.weight[0].file
                totals[pair] += 1
                if not is_equal:
                    mismatches[pair] += 1
                    examples.setdefault(pair, sample.fqn)
    for (master, weight), number in mismatches.most_common():
        result.unequal.append(
            Conflict(
                master,
                f"its master weights do not belong to the weights in {PurePath(weight).name}:"
                f" {number} of {counted(totals[master, weight], 'block')} that were compared"
                f" differ, for example in {examples[master, weight]!r}; one of the two files is of"
                " another rank, step or run",
            )
        )
    return result


def find_negative(manifest: Manifest) -> Iterator[str]:
    """Yield the means of squares that are below zero in a sample of a stored block."""
    samples = (
        (entry, chunk.file, _plan_sample(entry, chunk))
        for entry in manifest.entries.values()
        if entry.kind in NEVER_NEGATIVE and entry.dtype.family == "float"
        for chunk in _list_distinct_blocks(entry)
        if chunk.box.volume and not isinstance(chunk.file, Derived)
    )
    with SourceFiles() as pool, _read_ahead(pool, _get_copies) as ahead:
        for (entry, file, copies), held in ahead.iterate(samples):
            with held:
                values = _read(pool, held, [copies], entry.dtype)
            if _has_negative(values, entry.dtype):
                yield f"{file}: the {entry.kind} of {entry.fqn!r} is below zero"


def _get_copies(sample: tuple[Entry, str, Sequence[Copy]]) -> Sequence[Copy]:
    return sample[2]


def _plan_sample(entry: Entry, chunk: Chunk) -> Sequence[Copy]:
    planner = CopyPlanner(replace(entry, chunks=(chunk,)))
    return planner.plan_block(_choose_box(entry.fqn, chunk), entry.dtype).copies


def _has_negative(values: bytearray, dtype: DType) -> bool:
    """Return whether a number is below zero; -0.0 is not."""
    size = dtype.itemsize
    if max(values[size - 1 :: size], default=0) < 1 << 7:  # no sign bit is set
        return False
    zero = bytes([*bytes(size - 1), 1 << 7])
    numbers = (values[at : at + size] for at in range(0, len(values), size))
    return any(number[-1] >= 1 << 7 and number != zero for number in numbers)


def _choose_samples(manifest: Manifest, *, every_element: bool) -> Iterator[_Sample]:
    for weight in manifest.of_kind(PARAM):
        master = manifest.entries.get((MASTER, weight.fqn))
        if master is None or is_computed(master) or not are_comparable(master, weight):
            continue  # a master that is computed from its weight cannot disagree with it
        blocks = CopyPlanner(weight)
        for chunk in _list_distinct_blocks(master):
            if not chunk.box.volume:
                continue
            own = CopyPlanner(replace(master, chunks=(chunk,)))
            origin, cuts = chunk.box.origin, contiguous_cuts(chunk.box.shape, _EVERY)
            all_boxes = (cut.shift(origin) for cut in cuts)
            for box in all_boxes if every_element else [_choose_box(weight.fqn, chunk)]:
                yield _Sample(
                    weight.fqn,
                    box,
                    own.plan_block(box, master.dtype).copies,
                    blocks.plan_block(box, weight.dtype).copies,
                    (master.dtype, weight.dtype),
                )


def _list_distinct_blocks(entry: Entry) -> Iterator[Chunk]:
    seen: set[Box] = set()
    for chunk in entry.chunks:
        if chunk.box not in seen:
            seen.add(chunk.box)
            yield chunk


def _choose_box(fqn: str, chunk: Chunk) -> Box:
    # Its position depends on the name, so that weights of one shape are not all compared at the
    # same position, where a pattern of the data (a first row of zeros) could hide a difference.
    seed = zlib.crc32(fqn.encode())
    room, shape = _SAMPLED, []
    for extent in reversed(chunk.box.shape):
        shape.append(min(extent, room))
        room = max(room // max(extent, 1), 1)
    shape.reverse()
    origin: list[int] = []
    for start, extent, own in zip(chunk.box.origin, chunk.box.shape, shape, strict=True):
        # Knuth's multiplicative hash; the quotient is the seed of the next dim.
        seed, at = divmod(seed * 2654435761 % (1 << 61), extent - own + 1)
        origin.append(start + at)
    return Box(tuple(origin), tuple(shape))


def _list_copies(batch: Sequence[_Sample]) -> Iterator[Copy]:
    return (copy for sample in batch for copy in (*sample.master, *sample.weight))


def _read_ahead(pool: SourceFiles, list_copies: Callable[[T], Iterable[Copy]]) -> ReadAhead[T]:
    return ReadAhead(
        pool, lambda item: list_ranges(list_copies(item)), nbytes=AHEAD_BYTES, workers=1
    )


def _compare(pool: SourceFiles, held: Held, batch: Sequence[_Sample]) -> list[bool]:
    groups: dict[tuple[DType, DType], list[int]] = defaultdict(list)
    for number, sample in enumerate(batch):
        groups[sample.dtypes].append(number)
    equal = [True] * len(batch)
    for (source, trained), numbers in groups.items():
        masters = _read(pool, held, [batch[n].master for n in numbers], source)
        weights = _read(pool, held, [batch[n].weight for n in numbers], trained)
        different = _mark_unequal(masters, weights, source, trained)
        stop = 0
        for number in numbers:
            start, stop = stop, stop + batch[number].box.volume
            equal[number] = not any(different[start:stop])
    return equal


def _read(
    pool: SourceFiles, held: Held, blocks: Sequence[Sequence[Copy]], dtype: DType
) -> bytearray:
    sizes = [sum(copy.numel for copy in copies) * dtype.itemsize for copies in blocks]
    buffer = bytearray(sum(sizes))
    view, at = memoryview(buffer), 0
    for copies, nbytes in zip(blocks, sizes, strict=True):
        fill(pool, copies, view[at : at + nbytes], held=held)
        at += nbytes
    return buffer


def _mark_unequal(masters: bytearray, weights: bytearray, source: DType, trained: DType) -> bytes:
    """Return 1 for each element that is not the cast of its master, else 0.

    numpy is not imported if the casts are compiled: that takes longer than a small merge.
    """
    made = masters if source == trained else bytearray(len(weights))
    is_cast = source == trained or compiled.cast(masters, made, source, trained, clamp=False)
    if is_cast and made == weights:
        return bytes(len(weights) // trained.itemsize)
    return _mark_unequal_numbers(masters, weights, source, trained)


def _mark_unequal_numbers(
    masters: bytearray, weights: bytearray, source: DType, trained: DType
) -> bytes:
    import numpy as np

    from reshard.engine.move import cast

    expected: NDArray[Any] = np.frombuffer(masters, cast.get_numpy_dtype(source, casting=True))
    stored: NDArray[Any] = np.frombuffer(weights, cast.get_numpy_dtype(trained, casting=True))
    if source != trained:
        filled = bytearray(len(weights))
        rounded: NDArray[Any] = np.frombuffer(filled, stored.dtype)
        cast.cast(expected, rounded, source, trained, clamp=False)
        if (source, trained) == (FLOAT32, BFLOAT16):
            round_ties_as_stored(masters, filled, weights)
        expected = rounded
    bits = f"u{trained.itemsize}"
    different: NDArray[Any] = expected.view(bits) != stored.view(bits)
    if different.any():  # a NaN has many bit patterns
        numbers = [cast.as_numbers(array, trained) for array in (expected, stored)]
        different &= ~(np.isnan(numbers[0]) & np.isnan(numbers[1]))
    return different.tobytes()
