"""What changed from each checkpoint of a run to the next, counted in the same elements of all.

Every tensor is read in short runs of elements, at positions that depend on its name alone; or as a
whole. A run of elements is read from all checkpoints, one after the other, so that memory depends
neither on the model nor on the number of checkpoints.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.checks.history.tags import Tag
from reshard.core.dtypes import FLOAT32, FLOAT64, DType
from reshard.core.manifest import Entry
from reshard.engine.move.tiles import TileReader, find_reader
from reshard.engine.planning.copies import CopyPlanner
from reshard.system.checksum import crc32
from reshard.system.files import SourceFiles
from reshard.system.ranks.team import Progress, ignore_progress
from reshard.system.threads import parallel_for
from reshard.training.optimizers import MOMENTS, MomentBound, bound_moments, is_bounded

Array = NDArray[Any]

_SAMPLED = 512  # elements of a tensor
_FEWEST_RUNS, _MOST_RUNS = 4, 8  # limits of the runs of a tensor: one for each part on a rank
_BLOCK = 1 << 17  # elements that are read at a time if all are read
_JUDGED = 4096  # elements of a run whose update is computed
_MARGIN = 16  # roundings of a weight; an update below this many may leave its bits as they are
_TINY = 1e-37  # just above the smallest normal float32: a smaller update may become zero
_TINY_SQUARE = 1e-30  # of a gradient: below, the squares in a second moment lose bits
_SLACK = 1.001  # for the rounding of the bound itself
_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}  # bits of a stored significand


@dataclass(slots=True)
class Change:
    """What changed in some elements from one checkpoint to the next.

    Args:
        moved: the number of them whose weight has other bits.
        expected: the number of elements that must move, because the update that the optimizer's
            state implies is many times the rounding of the weight; 0 without such state. Some
            thousands of each run of elements are judged, at equal distances.
        expected_moved: the number of expected elements that moved.
        momenta: the number of elements whose first slot is not zero in the later checkpoint.
        momenta_moved: the number of such elements that have other bits in any slot.
        judged: the number of elements whose moments are compared with what Adam can make of the
            earlier ones.
        foreign: the number of such elements for which they are something else.
        largest: the largest change of a weight.
        largest_weight: the largest magnitude of a weight in both checkpoints.
        squares: the sum of the squares of the changes.
        weight_squares: the sum of the squares of the weights in the later checkpoint.
    """

    elements: int = 0
    moved: int = 0
    expected: int = 0
    expected_moved: int = 0
    momenta: int = 0
    momenta_moved: int = 0
    judged: int = 0
    foreign: int = 0
    largest: float = 0.0
    largest_weight: float = 0.0
    squares: float = 0.0
    weight_squares: float = 0.0

    def add(self, other: Change) -> None:
        """Add other elements of the same pair of checkpoints."""
        for name in self.__slots__:
            one, two = getattr(self, name), getattr(other, name)
            setattr(self, name, max(one, two) if name.startswith("largest") else one + two)


@dataclass(slots=True)
class Movement:
    """The changes of one tensor over all checkpoints.

    Args:
        changes: from each checkpoint to the next.
        jumps: the sum of squared changes from each checkpoint to the one after the next.
        digests: for each checkpoint, the CRC-32 of the weights and slots that were read.
        not_finite: for each checkpoint, the number of weights that are infinite or NaN.
        weight_files: (number of the later checkpoint, path of the file in it) -> what changed in
            the elements whose weight that file stores.
        slot_files: the same for the slots that the file stores.
    """

    fqn: str
    changes: list[Change]
    jumps: list[float]
    digests: list[int]
    not_finite: list[int]
    weight_files: dict[tuple[int, str], Change] = field(default_factory=dict)
    slot_files: dict[tuple[int, str], Change] = field(default_factory=dict)
    bytes_read: int = 0


def measure(
    tags: Sequence[Tag],
    names: Sequence[str],
    *,
    every_element: bool,
    workers: int,
    progress: Progress = ignore_progress,
) -> list[Movement]:
    """Return the movements of weights, in the order of their names.

    Args:
        tags: the checkpoints, oldest first; each has the weights, all with one shape.
        every_element: read everything, not a sample.
    """
    found: dict[str, Movement] = {}
    with SourceFiles() as pool:

        def measure_one(fqn: str) -> None:
            series = _TensorSeries(tags, fqn, find_reader(pool))
            for start, stop in list_runs(series.numel, series.parts, fqn, whole=every_element):
                series.add(start, stop)
            found[fqn] = series.found
            progress(found[fqn].bytes_read)

        parallel_for(names, lambda: measure_one, workers)
    return [found[fqn] for fqn in names]


def count_bytes(tags: Sequence[Tag], names: Sequence[str], *, every_element: bool) -> int:
    """Return the number of bytes that `measure` reads."""
    total = 0
    for tag in tags:
        for fqn in names:
            read = [tag.weights[fqn], *tag.slots.get(fqn, {}).values()]
            numel = read[0].numel if every_element else min(read[0].numel, _SAMPLED)
            total += sum(numel * entry.dtype.itemsize for entry in read)
    return total


def list_runs(numel: int, parts: int, fqn: str, *, whole: bool) -> Iterator[tuple[int, int]]:
    """Yield the runs of elements to read: all in blocks, or one at random in each equal part.

    Args:
        parts: the number of parts in which ranks store the tensor.
        fqn: the name of the tensor, the seed of the positions.
    """
    if whole or numel <= _SAMPLED:
        for start in range(0, numel, _BLOCK):
            yield start, min(start + _BLOCK, numel)
        return
    count = min(max(parts, _FEWEST_RUNS), _MOST_RUNS)
    length = _SAMPLED // count
    chance = random.Random(fqn)  # noqa: S311 - the same positions in every run of the command
    for number in range(count):
        low, high = number * numel // count, (number + 1) * numel // count
        start = chance.randrange(low, max(high - length, low) + 1)
        yield start, min(start + length, numel)


class _RunValues(NamedTuple):
    weight: Array
    slots: dict[str, Array]


class _TensorSeries:
    def __init__(self, tags: Sequence[Tag], fqn: str, reader: TileReader) -> None:
        self._tags, self._fqn, self._reader = tags, fqn, reader
        self._weights = [tag.weights[fqn] for tag in tags]
        self._planners = [
            {
                "": CopyPlanner(tag.weights[fqn]),
                **{kind: CopyPlanner(entry) for kind, entry in tag.slots.get(fqn, {}).items()},
            }
            for tag in tags
        ]
        self._rates = [tag.find_rate(fqn) for tag in tags]
        self._bounds = [_bound_moments(before, now, fqn) for before, now in pairwise(tags)]
        self.numel = self._weights[0].numel
        self.parts = max(entry.layout.part_count for entry in self._weights)
        pairs = len(tags) - 1
        self.found = Movement(
            fqn,
            [Change() for _ in range(pairs)],
            [0.0] * max(pairs - 1, 0),
            [0] * len(tags),
            [0] * len(tags),
            defaultdict(Change),
            defaultdict(Change),
        )

    def add(self, start: int, stop: int) -> None:
        # Only the last two checkpoints are kept, which `jumps` needs.
        earlier: list[_RunValues] = []
        for number in range(len(self._tags)):
            now, pieces = self._read(number, start, stop)
            finite = np.isfinite(now.weight)
            self.found.not_finite[number] += int(finite.size - np.count_nonzero(finite))
            if earlier:
                self._compare(number, earlier[-1], now, pieces)
            if len(earlier) > 1:
                self.found.jumps[number - 2] += _measure_distance(now.weight, earlier[-2].weight)
            earlier = [*earlier[-1:], now]

    def _read(
        self, number: int, start: int, stop: int
    ) -> tuple[_RunValues, dict[str, list[tuple[slice, str]]]]:
        """Return the elements of a checkpoint, and for each tensor which file stores which."""
        values, pieces = {}, {}
        for kind, planner in self._planners[number].items():
            entry = self._weights[number] if not kind else self._tags[number].slots[self._fqn][kind]
            values[kind], pieces[kind] = self._read_run(planner, entry, start, stop)
            data = values[kind].data.cast("B")
            self.found.digests[number] = crc32(data, self.found.digests[number])
        weight = values.pop("")
        return _RunValues(weight, values), pieces

    def _read_run(
        self, planner: CopyPlanner, entry: Entry, start: int, stop: int
    ) -> tuple[Array, list[tuple[slice, str]]]:
        dtype = _choose_dtype(entry)
        size = dtype.itemsize
        values = np.empty(stop - start, f"<f{size}")
        copies = list(planner.plan_run(start, stop, dtype, 0))
        self._reader.fill(copies, values.data.cast("B"))
        self.found.bytes_read += len(values) * entry.dtype.itemsize
        # A strided copy fills elements between those of others: they are
        # counted for no single file.
        pieces = [
            (slice(copy.target_offset // size, copy.target_offset // size + copy.numel), copy.file)
            for copy in copies
            if copy.is_run
        ]
        return values, pieces

    def _compare(
        self,
        number: int,
        before: _RunValues,
        now: _RunValues,
        pieces: dict[str, list[tuple[slice, str]]],
    ) -> None:
        moved = _mark_moved(before.weight, now.weight)
        expected = self._find_expected(number, now)
        shared = [kind for kind in now.slots if kind in before.slots]
        momenta = np.zeros(len(moved), bool)
        momenta_moved = np.zeros(len(moved), bool)
        if shared:
            momenta = now.slots[_find_first(shared)] != 0
            for kind in shared:
                momenta_moved |= _mark_moved(before.slots[kind], now.slots[kind])
            momenta_moved &= momenta
        found = self.found
        bound = self._bounds[number - 1]
        if bound is not None:
            found.changes[number - 1].add(_judge_moments(bound, before.slots, now.slots))
        flags = moved, expected, momenta, momenta_moved
        found.changes[number - 1].add(_count_change(before.weight, now.weight, flags))
        for part, file in pieces[""]:
            name = self._tags[number].name_file(file)
            found.weight_files[number, name].add(_count_flags([flag[part] for flag in flags]))
        if shared:
            for part, file in pieces[_find_first(shared)]:
                name = self._tags[number].name_file(file)
                found.slot_files[number, name].add(_count_flags([flag[part] for flag in flags]))

    def _find_expected(self, number: int, now: _RunValues) -> Array:
        flags: Array = np.zeros(len(now.weight), bool)
        rates = self._rates[number - 1], self._rates[number]
        is_adam = set(MOMENTS) <= now.slots.keys()
        if not all(rates) or not (is_adam or "momentum_buffer" in now.slots):
            return flags
        judged = slice(None, None, max(len(flags) // _JUDGED, 1))
        update = np.abs(now.slots[_find_first(list(now.slots))][judged])
        if is_adam:
            with np.errstate(all="ignore"):
                # 1e-8 is the default `eps` of torch's Adam.
                update = update / (np.sqrt(now.slots[MOMENTS[1]][judged]) + 1e-8)
        bits = _BITS[self._weights[number].dtype.name]
        rounding = np.abs(now.weight[judged]) * (_MARGIN * 2.0**-bits)
        # The rate between the two saves is not known: the smaller one is the cautious choice.
        flags[judged] = update * min(rate or 0 for rate in rates) > np.maximum(rounding, _TINY)
        return flags


def _bound_moments(before: Tag, now: Tag, fqn: str) -> MomentBound | None:
    """Return None if the bound is not known, or if the optimizer is not Adam."""
    groups, slots = [tag.groups.get(fqn) for tag in (before, now)], now.slots.get(fqn, {})
    one, other = before.count_updates(fqn), now.count_updates(fqn)
    if None in groups or one is None or other is None or not 0 < other - one < inf:
        return None
    first, last = (dict(group.hyper) for group in groups if group is not None)
    both = before.slots.get(fqn, {}).keys() & slots.keys()
    is_same = first.get("betas") == last.get("betas")
    if not is_same or not is_bounded(last, slots) or not set(MOMENTS) <= both:
        return None
    bits = min(_BITS[tag.slots[fqn][kind].dtype.name] for tag in (before, now) for kind in MOMENTS)
    return bound_moments(last, int(other - one), 2.0**-bits)


def _judge_moments(
    bound: MomentBound, before: Mapping[str, Array], now: Mapping[str, Array]
) -> Change:
    (m0, v0), (m, v) = ([slots[kind] for kind in MOMENTS] for slots in (before, now))
    judged = slice(None, None, max(len(v) // _JUDGED, 1))
    m0, v0, m, v = (values[judged].astype(np.float64) for values in (m0, v0, m, v))
    with np.errstate(all="ignore"):
        added = np.maximum(v - bound.decayed * v0, 0) + bound.rounding * np.maximum(v, v0)
        # Optimizers that count for all weights together skip those without a gradient, so that
        # a moment can have kept more.
        ends = np.minimum(m0, bound.kept * m0), np.maximum(m0, bound.kept * m0)
        moved = np.abs(m - np.clip(m, *ends)) - bound.rounding * np.maximum(np.abs(m), np.abs(m0))
        outside = (v < bound.least * v0) | (moved > bound.reach * np.sqrt(added) * _SLACK)
    # The square of a tiny gradient is rounded to zero.
    is_judged = np.maximum(v, v0) > _TINY_SQUARE
    return Change(
        judged=int(np.count_nonzero(is_judged)),
        foreign=int(np.count_nonzero(outside & is_judged)),
    )


def _choose_dtype(entry: Entry) -> DType:
    return FLOAT64 if entry.dtype == FLOAT64 else FLOAT32


def _find_first(kinds: Sequence[str]) -> str:
    """Return the slot whose zeros show that an element has had no gradient."""
    return next((kind for kind in (MOMENTS[0], "momentum_buffer") if kind in kinds), kinds[0])


def _mark_moved(before: Array, now: Array) -> Array:
    # As bits, a NaN is equal to itself, and 0 differs from -0.
    if before.dtype == now.dtype:
        before, now = (values.view(f"<u{now.itemsize}") for values in (before, now))
    flags: Array = before != now
    return flags


def _measure_distance(a: Array, b: Array) -> float:
    with np.errstate(all="ignore"):
        difference = a.astype(np.float64) - b
        return _sum_squares(difference)


def _count_change(before: Array, now: Array, flags: Sequence[Array]) -> Change:
    change = _count_flags(flags)
    with np.errstate(all="ignore"):
        wide = now.astype(np.float64)
        difference = wide - before
        change.largest = _find_largest(difference)
        change.largest_weight = max(_find_largest(now), _find_largest(before))
        change.squares = _sum_squares(difference)
        change.weight_squares = _sum_squares(wide)
    return change


def _find_largest(values: Array) -> float:
    return max(float(values.max(initial=0)), -float(values.min(initial=0)))


def _sum_squares(values: Array) -> float:
    # `np.dot` would start threads of BLAS, which wait actively for work. Overwrites the values.
    return float(np.square(values, out=values).sum())


def _count_flags(flags: Sequence[Array]) -> Change:
    moved, expected, momenta, momenta_moved = flags
    return Change(
        elements=len(moved),
        moved=int(np.count_nonzero(moved)),
        expected=int(np.count_nonzero(expected)),
        expected_moved=int(np.count_nonzero(expected & moved)),
        momenta=int(np.count_nonzero(momenta)),
        momenta_moved=int(np.count_nonzero(momenta_moved)),
    )
