"""Every byte of a checkpoint, read once where that is possible, in bounded memory.

Each tensor is streamed block by block. While a block is in the cache its elements are looked at,
its checksum is taken, other stored values of the same tensor (replicas, 16-bit copies, tied names)
are compared with it, and it is hashed where that is asked for. Stored checksums of whole records
are joined from those of the blocks afterwards; only what no tensor covers is read for them.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.box import Box, contiguous_cuts, flat_span
from reshard.checks.compare import Difference, Tolerance, difference
from reshard.checks.values import Facts, look
from reshard.chunks import Chunk
from reshard.dtypes import DType
from reshard.files import SourceFiles
from reshard.manifest import Entry, Key, Record, SourceFile
from reshard.move.fill import fill
from reshard.move.records import compute_record_crc
from reshard.move.spans import Spans
from reshard.plan.copies import CopyPlanner, Window
from reshard.threads import parallel_for

_EXACT = Tolerance()
_BUFFERS = 4  # a worker holds a block, one to compare with, a cast of the first, and what is read


@dataclass(frozen=True, slots=True)
class Rival:
    """Another stored value of a tensor, equal to it or to its cast.

    Args:
        check: the name of the check that holds this.
        looked_at: whether its elements are looked at too; those of a copy of the same bits are not.
    """

    check: str
    entry: Entry
    looked_at: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """One tensor to be read.

    Args:
        digests: in which dtypes its content is hashed.
        signs: whether negative elements are counted.
    """

    entry: Entry
    rivals: tuple[Rival, ...] = ()
    digests: tuple[DType, ...] = ()
    signs: bool = False

    @property
    def nbytes(self) -> int:
        """What is read for it."""
        return sum(entry.nbytes for entry in (self.entry, *(each.entry for each in self.rivals)))


@dataclass(slots=True)
class Unequal:
    """A rival that is not what it must be."""

    entry: Entry
    rival: Rival
    difference: Difference


@dataclass(slots=True)
class Scan:
    """What was seen."""

    facts: dict[Key, Facts] = field(default_factory=dict)
    unequal: list[Unequal] = field(default_factory=list)
    digests: dict[Key, dict[str, str]] = field(default_factory=dict)  # -> dtype -> SHA-256
    altered: list[tuple[str, Record]] = field(default_factory=list)  # not what their CRC says
    records: int = 0  # with a stored CRC
    bytes_read: int = 0


def replicas(entry: Entry) -> Iterator[Entry]:
    """The tensor as every further rank has it, where blocks are stored more than once."""
    held: dict[Box, list[Chunk]] = defaultdict(list)
    for chunk in entry.chunks:
        if chunk.box.volume:
            held[chunk.box].append(chunk)
    for number in range(1, max(map(len, held.values()), default=0)):
        chunks = (chunks[number] if number < len(chunks) else chunks[0] for chunks in held.values())
        yield replace(entry, chunks=tuple(chunks))


def chunk_at(entry: Entry, index: Sequence[int]) -> Chunk:
    """The first stored block that holds an element."""
    inside = (
        chunk
        for chunk in entry.chunks
        if all(
            start <= at < start + extent
            for at, start, extent in zip(index, chunk.box.origin, chunk.box.shape, strict=True)
        )
    )
    return next(inside)  # coverage has been proved


def scan(
    tasks: Sequence[Task],
    files: Mapping[str, SourceFile],
    *,
    workers: int,
    window_bytes: int,
    progress: Callable[[int], None],
) -> Scan:
    """Read every tensor, then what stored checksums cover beside them.

    Args:
        window_bytes: half of what a worker may hold.
        progress: called with the bytes that were read.
    """
    with SourceFiles() as pool:
        reader = _Reader(pool, files, block_bytes=2 * window_bytes // _BUFFERS)
        parallel_for(
            reader.items(tasks),
            lambda: _Worker(reader),
            workers,
            lambda item: progress(item.nbytes),
        )
        found = reader.found
        found.bytes_read = sum(task.nbytes for task in tasks)
        _check_records(found, files, pool, reader.reads, workers)
    found.unequal = _by_tensor(found.unequal)
    return found


@dataclass(frozen=True, slots=True)
class _Item:
    """CopyPlanner of one tensor that one worker reads, in order."""

    task: Task
    blocks: CopyPlanner
    rivals: tuple[CopyPlanner, ...]
    boxes: Iterable[Box]
    nbytes: int


class _Reader:
    """What the workers share."""

    def __init__(
        self, pool: SourceFiles, files: Mapping[str, SourceFile], *, block_bytes: int
    ) -> None:
        self.found = Scan()
        self.reads = Spans()
        self._pool = pool
        self._block_bytes = block_bytes
        self._summed = {path for path, file in files.items() if file.has_checksums}
        self.lock = threading.Lock()

    def fill(self, window: Window, buffer: bytearray) -> None:
        """Read a window, with checksums where its files store any."""
        reads = Spans() if any(c.file in self._summed for c in window.copies) else None
        fill(
            self._pool,
            window.copies,
            memoryview(buffer),
            read_bytes=self._block_bytes,
            reads=reads,
        )
        if reads is not None:
            with self.lock:
                self.reads.update(reads)

    def items(self, tasks: Iterable[Task]) -> Iterator[_Item]:
        """Single blocks in any order; a tensor that is hashed is one item."""
        for task in tasks:
            widest = max(
                task.entry.dtype.itemsize, *(r.entry.dtype.itemsize for r in task.rivals), 1
            )
            cuts = contiguous_cuts(task.entry.shape, max(self._block_bytes // widest, 1))
            blocks = CopyPlanner(task.entry)
            rivals = tuple(CopyPlanner(rival.entry) for rival in task.rivals)
            if task.digests:
                yield _Item(task, blocks, rivals, cuts, task.nbytes)
                continue
            per_element = task.nbytes // max(task.entry.numel, 1)
            for box in cuts:
                yield _Item(task, blocks, rivals, (box,), box.volume * per_element)


class _Worker:
    """One thread, with buffers that it fills again and again."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._buffers: dict[str, bytearray] = {}

    def __call__(self, item: _Item) -> None:
        """Read all blocks of an item."""
        task, found = item.task, self._reader.found
        hashes = {dtype: hashlib.sha256() for dtype in task.digests}
        facts = Facts()
        for box in item.boxes:
            start = flat_span(box, task.entry.shape)[0]
            block = self._block("block", item.blocks, task.entry, box)
            seen = look(block, task.entry.dtype, start, signs=task.signs)
            facts.add(seen)
            for rival, places in zip(task.rivals, item.rivals, strict=True):
                other = self._block("other", places, rival.entry, box)
                self._compare(task.entry, rival, block, other, start, seen)
            for dtype, made in hashes.items():
                made.update(self._cast(block, task.entry.dtype, dtype)[0])
        with self._reader.lock:
            found.facts.setdefault(task.entry.key, Facts()).add(facts)
            if hashes:
                found.digests[task.entry.key] = {
                    dtype.name: made.hexdigest() for dtype, made in hashes.items()
                }

    def _buffer(self, name: str, nbytes: int) -> bytearray:
        """Of exactly that size; nearly all blocks have one size."""
        if len(self._buffers.get(name, b"")) != nbytes:
            self._buffers[name] = bytearray(nbytes)
        return self._buffers[name]

    def _block(self, name: str, blocks: CopyPlanner, entry: Entry, box: Box) -> bytearray:
        window = blocks.plan_block(box, entry.dtype)
        buffer = self._buffer(name, window.nbytes)
        self._reader.fill(window, buffer)
        return buffer

    def _cast(self, block: bytearray, dtype: DType, target: DType) -> tuple[bytearray, int]:
        """The block in another dtype, and how many finite elements became infinite."""
        if dtype == target:
            return block, 0
        made = self._buffer("cast", len(block) // dtype.itemsize * target.itemsize)
        return made, cast_into(made, block, dtype, target)

    def _compare(
        self,
        entry: Entry,
        rival: Rival,
        block: bytearray,
        other: bytearray,
        start: int,
        seen: Facts,
    ) -> None:
        """Compare a rival's block, and look at it where it is not known from the first."""
        found, dtype = self._reader.found, rival.entry.dtype
        wanted, overflowed = self._cast(block, entry.dtype, dtype)
        equal = wanted == other
        if rival.looked_at:
            known = equal and not overflowed and seen.first_strange is None
            facts = Facts(is_zero=seen.is_zero) if known else look(other, dtype, start, signs=False)
            with self._reader.lock:
                found.facts.setdefault(rival.entry.key, Facts()).add(facts)
        unequal = None if equal else difference(wanted, other, dtype, _EXACT, start)
        if unequal is not None:
            with self._reader.lock:
                found.unequal.append(Unequal(entry, rival, unequal))


def cast_into(made: bytearray, block: bytearray, dtype: DType, target: DType) -> int:
    """Fill a buffer with a block in another float dtype, rounded once, to nearest even.

    Returns:
        How many finite elements became infinite.
    """
    import numpy as np

    from reshard.move import cast

    source: Any = np.frombuffer(block, cast.numpy_dtype(dtype, casting=True))
    filled: Any = np.frombuffer(made, cast.numpy_dtype(target, casting=True))
    return cast.cast(source, filled, dtype, target, clamp=False)[0]


def _by_tensor(found: Iterable[Unequal]) -> list[Unequal]:
    """One difference a rival, of those of its blocks; in the order of places."""
    joined: dict[int, Unequal] = {}
    for each in sorted(found, key=lambda unequal: unequal.difference.first):
        if id(each.rival) in joined:
            joined[id(each.rival)].difference.add(each.difference)
        else:
            joined[id(each.rival)] = each
    return list(joined.values())


def _check_records(
    found: Scan, files: Mapping[str, SourceFile], pool: SourceFiles, reads: Spans, workers: int
) -> None:
    """Compare every stored checksum with the bytes."""
    summed = [
        (path, record)
        for path, file in files.items()
        for record in file.records
        if record.crc32 is not None
    ]
    found.records = len(summed)
    lock = threading.Lock()

    def check(item: tuple[str, Record]) -> None:
        path, record = item
        crc = compute_record_crc(pool, path, record.byte_offset, record.nbytes, reads)
        if crc != record.crc32:
            with lock:
                found.altered.append(item)

    parallel_for(summed, lambda: check, workers)
    found.altered.sort(key=lambda item: (item[0], item[1].byte_offset))
