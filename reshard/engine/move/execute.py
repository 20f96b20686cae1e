"""Execution of a plan on a disk: fill every window from its sources, write it, read it back.

Workers take windows from one list. Contiguous runs pass through one block, which stays in a core's
cache from the read to the check. Interleaved copies are first assembled in memory. Memory use is
``workers * (window + buffer)``, whatever the size of the checkpoint, and the bytes written do not
depend on the number of workers. Checksums stored in the source files are compared on the way.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from reshard.core.dtypes import WIDEST
from reshard.core.manifest import (
    Literals,
    OutputFile,
    Skeleton,
    SourceFile,
    StoredChecksum,
    patch_literals,
)
from reshard.engine.move.ahead import Held, ReadAhead
from reshard.engine.move.distribution import Batch, Share, interleave_files, merge_across_ranks
from reshard.engine.move.fill import Filler, list_ranges
from reshard.engine.move.options import MoveOptions
from reshard.engine.move.outcome import Keep, Outcome, keep_in_memory
from reshard.engine.move.records import check_record, compute_record_crc
from reshard.engine.move.spans import Spans
from reshard.engine.output.files import BLOCK_BYTES, FileWriter, OutputFiles
from reshard.engine.planning.copies import Copy, Window
from reshard.engine.planning.planner import Plan
from reshard.system.checksum import crc32
from reshard.system.derived import Derived
from reshard.system.files import SourceFiles
from reshard.system.ranks.team import select_share
from reshard.system.threads import parallel_for

_LARGEST_BLOCK = 4 * BLOCK_BYTES  # for a computed tile, which would otherwise be copied


def execute(
    plan: Plan,
    sources: Mapping[str, SourceFile],
    directory: Path,
    options: MoveOptions,
    *,
    done: Outcome | None = None,
    keep: Keep = keep_in_memory,
) -> Outcome:
    """Create the files of a plan's target in ``directory`` and fill them.

    Args:
        plan: the windows to fill.
        sources: the source files by path.
        directory: where to create the files.
        options: threads, verification, and the team that shares the work.
        done: the outcome of an earlier run, whose windows are in the files already.
        keep: called by each worker after each batch.

    Raises:
        CorruptError: a source record does not match its stored checksum, or a file is too short.
        DifferentError: a file differs from what was written to it.
        ResourceError: the disk is full.
    """
    before, target, team = done or Outcome(), plan.target, options.team
    share = Share(team, target.nbytes - before.nbytes)
    with SourceFiles(sources) as pool, OutputFiles(directory) as files:
        builder = OutputBuilder(pool, files, sources, target, options)
        if team.first:
            builder.create(target.files, is_new=done is None)
        team.barrier()  # no rank may open a file that does not exist yet
        batches = share.select_batches(_skip_done(plan, before, files) if done else plan.batches())
        seen = builder.fill(interleave_files(batches, options.workers), keep)
        # Batches enter the digest as they are drawn, so it is complete only now.
        share.check()
        outcome = merge_across_ranks(team, seen)
        outcome.add(before)  # after the merge: all ranks have the same `before`
        # Several ranks and earlier runs may have read parts of one
        # record, so records are compared last.
        check_records(outcome.reads, sources, pool, options)
        builder.finish(select_share(team, target.files), outcome)
        pool.check_unread(select_share(team, list_lasting(sources)))
    # The first rank must not go on before the others have stored their checksums.
    team.barrier()
    return outcome


def list_lasting(sources: Mapping[str, SourceFile]) -> list[str]:
    """Return the paths of the files that other programs may change."""
    return [path for path, file in sources.items() if file.lasting]


def _skip_done(plan: Plan, done: Outcome, files: OutputFiles) -> Iterator[Batch]:
    filled = _list_written(done, files)
    for batch in plan.batches():
        left = tuple(
            window
            for window in batch
            if not filled.covers(files.path(window.file), window.byte_offset, window.nbytes)
        )
        if left:
            yield left


def _list_written(outcome: Outcome, files: OutputFiles) -> Spans:
    return Spans(
        (files.path(name), offset, nbytes, crc) for name, offset, nbytes, crc in outcome.windows
    )


class OutputBuilder:
    """A builder of output files: creates them, fills their windows, and stores their checksums."""

    def __init__(
        self,
        pool: SourceFiles,
        files: OutputFiles,
        sources: Mapping[str, SourceFile],
        target: Skeleton,
        options: MoveOptions,
    ) -> None:
        self._pool = pool
        self._files = files
        self._summed_sources = {path for path, file in sources.items() if file.has_checksums}
        self._summed = {file.name for file in target.files if any(True for _ in file.checksums)}
        self._options = options
        self._writer = FileWriter(files, verify=options.verify)

    def create(self, files: Iterable[OutputFile], *, is_new: bool = True) -> None:
        """Create files of their full size; see `OutputFiles.create`."""
        for file in files:
            self._files.create(file, is_new=is_new)

    def fill(self, batches: Iterable[Batch], keep: Keep = keep_in_memory) -> Outcome:
        """Fill windows of files that exist already.

        Args:
            batches: the windows.
            keep: as in `execute`.

        Raises:
            CorruptError, DifferentError, ResourceError: as in `execute`.
        """
        options = self._options
        workers: list[_Worker] = []
        taken: list[Outcome] = []

        def keep_copy(seen: Outcome) -> Outcome:
            after = keep(seen)
            if after is not seen:
                # Only windows with checksums are needed again, by `finish`.
                summed = Spans(span for span in seen.windows if span[3] is not None)
                taken.append(replace(seen, windows=summed))
            return after

        def make_worker() -> _Worker:
            filler = Filler(
                self._pool,
                clamp=options.clamp,
                read_bytes=options.read_bytes,
                needs_checksum=self._summed_sources.__contains__,
                pace=ahead.pace,
            )
            writer = FileWriter(self._files, verify=options.verify)
            workers.append(_Worker(filler, writer, self._summed, options.read_bytes, keep_copy))
            return workers[-1]

        def done(item: tuple[Batch, Held]) -> None:
            options.progress(sum(window.nbytes for window in item[0]))

        ahead = ReadAhead[Batch](
            self._pool,
            lambda batch: list_ranges(_list_copies(batch), options.read_bytes),
            nbytes=options.ahead_bytes,
            workers=options.workers,
        )
        with ahead:
            parallel_for(ahead.iterate(batches), make_worker, options.workers, done)
        outcome = Outcome()
        for seen in (*taken, *(worker.seen for worker in workers)):
            outcome.add(seen)
        return outcome

    def finish(self, files: Iterable[OutputFile], seen: Outcome) -> None:
        """Write the literals of filled files, with the CRCs that they store of their records.

        Args:
            files: the files.
            seen: the outcome of their windows.
        """
        written = _list_written(seen, self._files)
        for file in files:
            path, literals, changes = self._files.path(file.name), list(file.literals), []
            records = sorted(file.checksums)
            for offset, part in _cut_to_records(literals, records):
                written.put(path, offset, len(part), crc32(part))
            for start, nbytes, locations in records:
                crc = compute_record_crc(self._files, path, start, nbytes, written)
                changes += [(location, crc.to_bytes(4, "little")) for location in locations]
            for offset, data in patch_literals(literals, sorted(changes)):
                self._writer.write(file.name, offset, memoryview(data))


def _cut_to_records(
    literals: Literals, records: Iterable[StoredChecksum]
) -> Iterator[tuple[int, memoryview]]:
    more = iter(records)
    record = next(more, None)
    for offset, data in literals:
        stop = offset + len(data)
        while record is not None and record.byte_offset < stop:
            end = record.byte_offset + record.nbytes
            low, high = max(offset, record.byte_offset), min(stop, end)
            if low < high:
                yield low, memoryview(data)[low - offset : high - offset]
            if end > stop:  # the next literal may have more of this record
                break
            record = next(more, None)


class _Worker:
    """One thread's worker; ``summed`` are the output files that store checksums."""

    def __init__(
        self,
        filler: Filler,
        writer: FileWriter,
        summed: Container[str],
        read_bytes: int,
        keep: Keep,
    ) -> None:
        self.filler = filler
        self.seen = Outcome()
        self._record_in(self.seen)
        self._keep = keep
        self._crc: int | None = None  # of the window at hand, if its file stores checksums
        self._writer = writer
        self._summed = summed
        # The block must hold one element, or `_stream` would never end.
        self._block = memoryview(bytearray(max(min(BLOCK_BYTES, read_bytes), WIDEST)))
        self._largest_block = min(_LARGEST_BLOCK, read_bytes)
        self._window = bytearray()

    def __call__(self, item: tuple[Batch, Held]) -> None:
        batch, held = item
        with held:
            self.filler.held = held
            self._fill_batch(batch)
        self._record_in(self._keep(self.seen))

    def _fill_batch(self, batch: Batch) -> None:
        # Only the bands of interleaved tensors are batches of several
        # windows, which read the same bytes.
        if len(batch) > 1:
            self.filler.read_shared(_list_copies(batch))
        for window in batch:
            self._fill(window)
        self.filler.flush_checksums()

    def _record_in(self, seen: Outcome) -> None:
        self.seen, filler = seen, self.filler
        filler.reads, filler.overflowed, filler.flushed = seen.reads, seen.overflowed, seen.flushed

    def _fill(self, window: Window) -> None:
        filled = sum(copy.numel * copy.target_dtype.itemsize for copy in window.copies)
        if filled != window.nbytes:  # the check of the coverage makes this impossible
            raise AssertionError(f"only {filled} of {window.nbytes} bytes of a window are filled")
        self._crc = 0 if window.file in self._summed else None
        if all(copy.is_run for copy in window.copies):
            self._stream(window)
        else:
            self._interleave(window)
        self.seen.windows.put(window.file, window.byte_offset, window.nbytes, self._crc)
        self.seen.nbytes += window.nbytes

    def _stream(self, window: Window) -> None:
        tiles = [_count_tile(copy) for copy in window.copies]
        self._enlarge_block(window, tiles)
        block, used, offset = self._block, 0, window.byte_offset
        for copy, tile in zip(window.copies, tiles, strict=True):
            size, numel, done = copy.target_dtype.itemsize, copy.numel, 0
            while done < numel:
                first = copy.byte_offset // copy.dtype.itemsize + done
                count = _fit_tiles(first, (len(block) - used) // size, tile, is_empty=not used)
                count = min(count, numel - done)
                if not count:
                    self._write(window.file, offset, block[:used])
                    used, offset = 0, offset + used
                    continue
                into = block[used : used + count * size]
                # A full block that was read ahead is written from where it lies.
                held = self.filler.find_run(copy, done, count) if len(into) == len(block) else None
                if held is None:
                    self.filler.fill_run(copy, done, into)
                    used, done = used + len(into), done + count
                else:
                    self._write(window.file, offset, held)
                    offset, done = offset + len(held), done + count
        if used:
            self._write(window.file, offset, block[:used])

    def _enlarge_block(self, window: Window, tiles: Sequence[int]) -> None:
        sizes = (
            tile * copy.target_dtype.itemsize
            for copy, tile in zip(window.copies, tiles, strict=True)
        )
        largest = max((size for size in sizes if size <= self._largest_block), default=0)
        if largest > len(self._block):
            self._block = memoryview(bytearray(largest))

    def _interleave(self, window: Window) -> None:
        if len(self._window) < window.nbytes:
            self._window = bytearray(window.nbytes)
        # The buffer need not be cleared: `_fill` has checked that the copies fill every byte.
        data = memoryview(self._window)[: window.nbytes]
        for copy in window.copies:
            self.filler.fill(copy, data)
        self._write(window.file, window.byte_offset, data)

    def _write(self, name: str, offset: int, data: memoryview) -> None:
        self._writer.write(name, offset, data)
        if self._crc is not None:
            self._crc = crc32(data, self._crc)


def _list_copies(batch: Batch) -> Iterator[Copy]:
    return (copy for window in batch for copy in window.copies)


def check_records(
    reads: Spans,
    sources: Mapping[str, SourceFile],
    pool: SourceFiles,
    options: MoveOptions,
) -> None:
    """Compare the stored checksum of every record of which at least one byte was read.

    The rest of such a record (padding, tensors that were left out) is read here.

    Raises:
        CorruptError: a record does not match its stored checksum.
    """
    touched = [
        (file, record)
        for file in sorted(reads.files)
        for record in sources[file].records
        if record.crc32 is not None
        and reads.find_overlapping(file, record.byte_offset, record.nbytes)
    ]
    parallel_for(
        select_share(options.team, touched),
        lambda: lambda item: check_record(pool, *item, reads),
        options.workers,
    )


def _count_tile(copy: Copy) -> int:
    if not isinstance(copy.file, Derived):
        return 1
    return max(copy.file.computation.tile_nbytes // copy.dtype.itemsize, 1)


def _fit_tiles(first: int, room: int, tile: int, *, is_empty: bool) -> int:
    """Return how many elements to read at once, so that no tile is read in parts if it fits.

    >>> [_fit_tiles(8, room, 5, is_empty=False) for room in (1, 2, 6, 7, 12)]
    [0, 2, 2, 7, 12]

    The block has ``room``; in an empty one, part of a tile is better than nothing.
    """
    ahead = -first % tile
    count = room - (room - ahead) % tile if room >= ahead else 0
    return room if is_empty and not count else count
