"""Reading of every byte of a checkpoint, once if possible, in bounded memory.

Each tensor is streamed block by block. While a block is in the CPU's cache, its elements are
examined, its checksum is computed, its counterparts (replicas, 16-bit copies, tied names) are
compared with it, and it is hashed if digests were requested. The checksums of whole records are
then combined from those of their blocks; only bytes that no tensor covers are read for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from reshard.checks import names
from reshard.checks.compare import TensorDifference, Tolerance, compare_blocks
from reshard.checks.digests import Digest
from reshard.checks.digests import start as start_hash
from reshard.checks.element_facts import ElementFacts, examine
from reshard.core.box import Box, contiguous_cuts, flat_span
from reshard.core.chunks import Chunk, group_by_box
from reshard.core.dtypes import BFLOAT16, FLOAT32, DType
from reshard.core.manifest import Entry, Key, Record, SourceFile
from reshard.engine.move import cast
from reshard.engine.move.ahead import NOTHING, Held, ReadAhead
from reshard.engine.move.fill import fill, list_ranges
from reshard.engine.move.records import compute_record_crc
from reshard.engine.move.spans import Spans
from reshard.engine.planning.copies import CopyPlanner, Window
from reshard.quantised.remainders import round_ties_as_stored
from reshard.system.files import SourceFiles
from reshard.system.ranges import Range
from reshard.system.threads import parallel_for

_EXACT = Tolerance()
_BUFFERS = 4  # of a worker: a block, its counterpart, the cast of the block, and the bytes read


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Another stored value of a tensor, which must be equal to it or to its cast.

    Args:
        check: the name of the check that requires this.
        examine: whether to examine its elements too; a copy of the same bits needs no examination.
    """

    check: str
    entry: Entry
    examine: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """One tensor to read.

    Args:
        counterparts: the stored values to compare with it.
    """

    entry: Entry
    counterparts: tuple[Counterpart, ...] = ()
    digests: tuple[Digest, ...] = ()
    signs: bool = False

    @property
    def nbytes(self) -> int:
        """The number of bytes to read, with all counterparts."""
        return sum(
            entry.nbytes
            for entry in (self.entry, *(counterpart.entry for counterpart in self.counterparts))
        )


@dataclass(slots=True)
class Mismatch:
    """A counterpart that differs from the value that it must have."""

    entry: Entry
    counterpart: Counterpart
    difference: TensorDifference


@dataclass(slots=True)
class ScanResult:
    """The results of a scan."""

    facts: dict[Key, ElementFacts] = field(default_factory=dict)
    unequal: list[Mismatch] = field(default_factory=list)
    digests: dict[Key, dict[Digest, str]] = field(default_factory=dict)  # hexadecimal
    altered: list[tuple[str, Record]] = field(
        default_factory=list
    )  # records that do not match their CRC
    records: int = 0  # number of records with a stored CRC
    bytes_read: int = 0


def split_replicas(entry: Entry) -> Iterator[Entry]:
    """Yield the tensor as each further rank stores it, if blocks are stored more than once."""
    copies = group_by_box(entry.chunks)
    for number in range(1, max(map(len, copies.values()), default=0)):
        chunks = (
            chunks[number] if number < len(chunks) else chunks[0] for chunks in copies.values()
        )
        yield replace(entry, chunks=tuple(chunks))


def find_chunk(entry: Entry, index: Sequence[int]) -> Chunk:
    """Return the first stored block that has an element."""
    inside = (
        chunk
        for chunk in entry.chunks
        if all(
            start <= at < start + extent
            for at, start, extent in zip(index, chunk.box.origin, chunk.box.shape, strict=True)
        )
    )
    return next(inside)  # the coverage proof guarantees one


def scan(
    tasks: Sequence[Task],
    files: Mapping[str, SourceFile],
    *,
    workers: int,
    window_bytes: int,
    ahead_bytes: int,
    progress: Callable[[int], None],
) -> ScanResult:
    """Read every tensor, then the other bytes that stored checksums cover.

    Args:
        window_bytes: half of the memory that a worker may use.
        ahead_bytes: upper limit of the memory for what is read ahead.
        progress: called with the number of bytes read.
    """
    with SourceFiles(files) as pool:
        reader = _ScanReader(pool, files, block_bytes=2 * window_bytes // _BUFFERS)
        ahead = ReadAhead(pool, reader.list_ranges, nbytes=ahead_bytes, workers=workers)
        with ahead:
            parallel_for(
                ahead.iterate(reader.items(tasks)),
                lambda: _ScanWorker(reader),
                workers,
                lambda used: progress(used[0].nbytes),
            )
        result = reader.result
        result.bytes_read = sum(task.nbytes for task in tasks)
        _check_records(result, files, pool, reader.reads, workers)
    result.unequal = _join_blocks(result.unequal)
    return result


@dataclass(frozen=True, slots=True)
class _Item:
    """Blocks of one tensor that one worker reads in order, each with the windows that read it."""

    task: Task
    blocks: Iterable[tuple[Box, Sequence[Window]]]
    nbytes: int


class _ScanReader:
    """The state that the workers share: open files, results, checksums of the ranges read."""

    def __init__(
        self, pool: SourceFiles, files: Mapping[str, SourceFile], *, block_bytes: int
    ) -> None:
        self.result = ScanResult()
        self.reads = Spans()
        self._pool = pool
        self._block_bytes = block_bytes
        self._summed = {path for path, file in files.items() if file.has_checksums}
        self.lock = threading.Lock()

    def list_ranges(self, item: _Item) -> list[Range]:
        """Return the ranges that an item reads; none for a tensor that is hashed as a whole."""
        if item.task.digests:
            return []
        windows = (window for _, planned in item.blocks for window in planned)
        copies = (copy for window in windows for copy in window.copies)
        return list_ranges(copies, self._block_bytes)

    def fill(self, window: Window, buffer: bytearray, held: Held) -> None:
        reads = Spans() if any(c.file in self._summed for c in window.copies) else None
        fill(
            self._pool,
            window.copies,
            memoryview(buffer),
            read_bytes=self._block_bytes,
            reads=reads,
            held=held,
        )
        if reads is not None:
            with self.lock:
                self.reads.update(reads)

    def items(self, tasks: Iterable[Task]) -> Iterator[_Item]:
        """Yield single blocks, to read in any order, or all blocks of a tensor that is hashed."""
        for task in tasks:
            widest = max(
                task.entry.dtype.itemsize, *(r.entry.dtype.itemsize for r in task.counterparts), 1
            )
            cuts = contiguous_cuts(task.entry.shape, max(self._block_bytes // widest, 1))
            blocks = _plan_blocks(task, cuts)
            if task.digests:
                yield _Item(task, blocks, task.nbytes)
                continue
            per_element = task.nbytes // max(task.entry.numel, 1)
            for block in blocks:
                yield _Item(task, (block,), block[0].volume * per_element)


def _plan_blocks(task: Task, cuts: Iterable[Box]) -> Iterator[tuple[Box, list[Window]]]:
    entries = [task.entry, *(counterpart.entry for counterpart in task.counterparts)]
    planners = [(CopyPlanner(entry), entry.dtype) for entry in entries]
    for box in cuts:
        yield box, [planner.plan_block(box, dtype) for planner, dtype in planners]


class _ScanWorker:
    def __init__(self, reader: _ScanReader) -> None:
        self._reader = reader
        self._buffers: dict[str, bytearray] = {}
        self._held: Held = NOTHING

    def __call__(self, used: tuple[_Item, Held]) -> None:
        item, self._held = used
        with self._held:
            self._read(item)

    def _read(self, item: _Item) -> None:
        task, result = item.task, self._reader.result
        hashes = {digest: start_hash(digest.algorithm) for digest in task.digests}
        facts = ElementFacts()
        for box, (own, *others) in item.blocks:
            start = flat_span(box, task.entry.shape)[0]
            block = self._read_block("block", own)
            seen = examine(block, task.entry.dtype, start, signs=task.signs)
            facts.add(seen)
            for counterpart, window in zip(task.counterparts, others, strict=True):
                other = self._read_block("other", window)
                self._compare(task.entry, counterpart, block, other, start, seen)
            for dtype in dict.fromkeys(digest.dtype for digest in hashes):
                content = self._cast(block, task.entry.dtype, dtype)[0]
                for digest, started in hashes.items():
                    if digest.dtype == dtype:
                        started.update(content)
        with self._reader.lock:
            result.facts.setdefault(task.entry.key, ElementFacts()).add(facts)
            if hashes:
                result.digests[task.entry.key] = {
                    digest: started.hexdigest() for digest, started in hashes.items()
                }

    def _get_buffer(self, name: str, nbytes: int) -> bytearray:
        # Whole buffers are compared, hashed and examined, so a longer one does not do.
        if len(self._buffers.get(name, b"")) != nbytes:
            self._buffers[name] = bytearray(nbytes)
        return self._buffers[name]

    def _read_block(self, name: str, window: Window) -> bytearray:
        buffer = self._get_buffer(name, window.nbytes)
        self._reader.fill(window, buffer, self._held)
        return buffer

    def _cast(self, block: bytearray, dtype: DType, target: DType) -> tuple[bytearray, int]:
        """Return the block in another dtype, and how many finite elements became infinite."""
        if dtype == target:
            return block, 0
        buffer = self._get_buffer("cast", len(block) // dtype.itemsize * target.itemsize)
        return buffer, cast_into(buffer, block, dtype, target)

    def _compare(
        self,
        entry: Entry,
        counterpart: Counterpart,
        block: bytearray,
        other: bytearray,
        start: int,
        seen: ElementFacts,
    ) -> None:
        """Compare a counterpart's block; examine it unless its facts follow from the tensor's."""
        result, dtype = self._reader.result, counterpart.entry.dtype
        expected, overflowed = self._cast(block, entry.dtype, dtype)
        equal = expected == other
        is_master = counterpart.check == names.MASTERS
        if is_master and not equal and (entry.dtype, dtype) == (FLOAT32, BFLOAT16):
            round_ties_as_stored(block, expected, other)
            equal = expected == other
        if counterpart.examine:
            known = equal and not overflowed and seen.first_nonfinite is None
            facts = (
                ElementFacts(is_zero=seen.is_zero)
                if known
                else examine(other, dtype, start, signs=False)
            )
            with self._reader.lock:
                result.facts.setdefault(counterpart.entry.key, ElementFacts()).add(facts)
        unequal = None if equal else compare_blocks(expected, other, dtype, _EXACT, start)
        if unequal is not None:
            with self._reader.lock:
                result.unequal.append(Mismatch(entry, counterpart, unequal))


def cast_into(buffer: bytearray, block: bytearray, dtype: DType, target: DType) -> int:
    """Fill a buffer with a block cast to another float dtype, rounded once, to nearest even.

    Returns:
        The number of finite elements that became infinite.
    """
    source: Any = np.frombuffer(block, cast.get_numpy_dtype(dtype, casting=True))
    filled: Any = np.frombuffer(buffer, cast.get_numpy_dtype(target, casting=True))
    return cast.cast(source, filled, dtype, target, clamp=False)[0]


def _join_blocks(mismatches: Iterable[Mismatch]) -> list[Mismatch]:
    joined: dict[int, Mismatch] = {}
    for mismatch in sorted(mismatches, key=lambda unequal: unequal.difference.first):
        if id(mismatch.counterpart) in joined:
            joined[id(mismatch.counterpart)].difference.add(mismatch.difference)
        else:
            joined[id(mismatch.counterpart)] = mismatch
    return list(joined.values())


def _check_records(
    result: ScanResult,
    files: Mapping[str, SourceFile],
    pool: SourceFiles,
    reads: Spans,
    workers: int,
) -> None:
    summed = [
        (path, record)
        for path, file in files.items()
        for record in file.records
        if record.crc32 is not None
    ]
    result.records = len(summed)
    lock = threading.Lock()

    def check(item: tuple[str, Record]) -> None:
        path, record = item
        crc = compute_record_crc(pool, path, record.byte_offset, record.nbytes, reads)
        if crc != record.crc32:
            with lock:
                result.altered.append(item)

    parallel_for(summed, lambda: check, workers)
    result.altered.sort(key=lambda item: (item[0], item[1].byte_offset))
