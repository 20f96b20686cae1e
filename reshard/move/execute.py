"""Every window of a plan filled from its sources, written, read back at once.

Workers take windows from one list. What lies side by side goes through one block that stays in a
core's cache from the read to the check; what is woven together is put together in memory first. So
memory is ``workers * (window + buffer)`` whatever the checkpoint's size, and the bytes written do
not depend on how many workers there are. Checksums that the source files carry are compared on the
way through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from reshard.checksum import crc32
from reshard.dtypes import WIDEST
from reshard.files import SourceFiles
from reshard.manifest import OutputFile, Skeleton, SourceFile, StoredChecksum
from reshard.move.fill import Filler
from reshard.move.options import MoveOptions
from reshard.move.outcome import Keep, Outcome, unkept
from reshard.move.outputs import BLOCK_BYTES, OutputFiles, Writer
from reshard.move.records import check_record, record_crc
from reshard.move.share import Batch, Share, in_turns, pooled
from reshard.move.spans import Spans
from reshard.plan.copies import Window
from reshard.plan.planner import Plan
from reshard.ranks.team import select_share
from reshard.threads import parallel_for


def execute(
    plan: Plan,
    sources: Mapping[str, SourceFile],
    directory: Path,
    options: MoveOptions,
    *,
    done: Outcome | None = None,
    keep: Keep = unkept,
) -> Outcome:
    """Create the files of a plan's target in ``directory`` and fill them.

    Args:
        done: what an earlier run saw of windows that are in the files already.
        keep: called by each worker after each batch.

    Raises:
        CorruptError: a source record does not match its stored checksum, or a file is short.
        DifferentError: a file does not hold what was written to it.
        ResourceError: the disk is full.
    """
    before, target, team = done or Outcome(), plan.target, options.team
    share = Share(team, target.nbytes - before.nbytes)
    with SourceFiles() as pool, OutputFiles(directory) as files:
        run = Run(pool, files, sources, target, options)
        if team.first:
            run.create(target.files, anew=done is None)
        team.barrier()
        batches = share.of(_undone(plan, before, files) if done else plan.batches())
        seen = run.fill(in_turns(batches, options.workers), keep)
        share.check()
        outcome = pooled(team, seen)
        outcome.add(before)
        check_records(outcome.reads, sources, pool, options)
        run.store_checksums(select_share(team, target.checksums), outcome)
    team.barrier()
    return outcome


def _undone(plan: Plan, done: Outcome, files: OutputFiles) -> Iterator[Batch]:
    """The plan's batches, without windows that an earlier run has filled."""
    filled = _spans(done, files)
    for batch in plan.batches():
        left = tuple(
            window
            for window in batch
            if not filled.cover(files.path(window.file), window.byte_offset, window.nbytes)
        )
        if left:
            yield left


def _spans(outcome: Outcome, files: OutputFiles) -> Spans:
    return Spans(
        (files.path(name), offset, nbytes, crc) for name, offset, nbytes, crc in outcome.windows
    )


class Run:
    """Output files while they are filled."""

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
        self._sums = _Sums(sources, target)
        self._options = options
        self._writer = Writer(files, verify=options.verify)

    def create(self, files: Iterable[OutputFile], *, anew: bool = True) -> None:
        """Make files of their full size, with their literals; see `OutputFiles.create`."""
        for file in files:
            self._files.create(file, anew=anew)
            for offset, data in file.literals:
                self._writer.write(file.name, offset, memoryview(data))

    def fill(self, batches: Iterable[Batch], keep: Keep = unkept) -> Outcome:
        """Fill windows of files that are there.

        Args:
            keep: as in `execute`.

        Raises:
            CorruptError, DifferentError, ResourceError: as `execute`.
        """
        options = self._options
        threads: list[_Worker] = []
        taken: list[Outcome] = []

        def shown(seen: Outcome) -> Outcome:
            after = keep(seen)
            if after is not seen:
                summed = Spans(span for span in seen.windows if span[3] is not None)
                taken.append(replace(seen, windows=summed))  # the others nobody asks for again
            return after

        def make_worker() -> _Worker:
            filler = Filler(
                self._pool,
                clamp=options.clamp,
                read_bytes=options.read_bytes,
                summed=self._sums.of_source,
            )
            writer = Writer(self._files, verify=options.verify)
            threads.append(_Worker(filler, writer, self._sums, options.read_bytes, shown))
            return threads[-1]

        def done(batch: Batch) -> None:
            options.progress(sum(window.nbytes for window in batch))

        parallel_for(batches, make_worker, options.workers, done)
        outcome = Outcome()
        for seen in (*taken, *(worker.seen for worker in threads)):
            outcome.add(seen)
        return outcome

    def store_checksums(self, checksums: Iterable[StoredChecksum], seen: Outcome) -> None:
        """Write the CRCs that the output format keeps of its own records."""
        files = self._files
        written = _spans(seen, files)
        for stored in checksums:
            path = files.path(stored.file)
            crc = record_crc(files, path, stored.byte_offset, stored.nbytes, written)
            for location in stored.locations:
                self._writer.write(stored.file, location, memoryview(crc.to_bytes(4, "little")))


class _Sums:
    """Of which files anyone wants checksums."""

    def __init__(self, sources: Mapping[str, SourceFile], target: Skeleton) -> None:
        self._sources = {path for path, file in sources.items() if file.has_checksums}
        self._targets = {stored.file for stored in target.checksums}

    def of_source(self, path: str) -> bool:
        """Whether the file has stored checksums to compare."""
        return path in self._sources

    def of_target(self, name: str) -> bool:
        """Whether the file is to store checksums of what it holds."""
        return name in self._targets


class _Worker:
    """One thread: fills a window and writes it."""

    def __init__(
        self, filler: Filler, writer: Writer, sums: _Sums, read_bytes: int, keep: Keep
    ) -> None:
        self.filler = filler
        self.seen = Outcome()
        self._see(self.seen)
        self._keep = keep
        self._crc: int | None = None  # of the window at hand, if its file stores checksums
        self._writer = writer
        self._sums = sums
        self._block = memoryview(bytearray(max(min(BLOCK_BYTES, read_bytes), WIDEST)))
        self._window = bytearray()

    def __call__(self, batch: Batch) -> None:
        self.filler.expect(batch)
        if len(batch) > 1:
            self.filler.hold(copy for window in batch for copy in window.copies)
        for window in batch:
            self._fill(window)
        self.filler.rest()
        self._see(self._keep(self.seen))

    def _see(self, seen: Outcome) -> None:
        """What is seen from now on goes there."""
        self.seen, filler = seen, self.filler
        filler.reads, filler.overflowed, filler.flushed = seen.reads, seen.overflowed, seen.flushed

    def _fill(self, window: Window) -> None:
        filled = sum(copy.numel * copy.target_dtype.itemsize for copy in window.copies)
        if filled != window.nbytes:  # the coverage proof makes this impossible
            raise AssertionError(f"{filled} of {window.nbytes} bytes of a window are filled")
        self._crc = 0 if self._sums.of_target(window.file) else None
        if all(copy.is_run for copy in window.copies):
            self._stream(window)
        else:
            self._weave(window)
        self.seen.windows.put(window.file, window.byte_offset, window.nbytes, self._crc)
        self.seen.nbytes += window.nbytes

    def _stream(self, window: Window) -> None:
        """Runs that lie one after the other, block by block."""
        block, used, offset = self._block, 0, window.byte_offset
        for copy in window.copies:
            size, numel, done = copy.target_dtype.itemsize, copy.numel, 0
            while done < numel:
                count = min((len(block) - used) // size, numel - done)
                if not count:
                    self._write(window.file, offset, block[:used])
                    used, offset = 0, offset + used
                    continue
                self.filler.fill_run(copy, done, block[used : used + count * size])
                used, done = used + count * size, done + count
        if used:
            self._write(window.file, offset, block[:used])

    def _weave(self, window: Window) -> None:
        """Copies whose bytes lie between one another's."""
        if len(self._window) < window.nbytes:
            self._window = bytearray(window.nbytes)
        held = memoryview(self._window)[: window.nbytes]
        for copy in window.copies:
            self.filler.fill(copy, held)
        self._write(window.file, window.byte_offset, held)

    def _write(self, name: str, offset: int, data: memoryview) -> None:
        self._writer.write(name, offset, data)
        if self._crc is not None:
            self._crc = crc32(data, self._crc)


def check_records(
    reads: Spans,
    sources: Mapping[str, SourceFile],
    pool: SourceFiles,
    options: MoveOptions,
) -> None:
    """Compare the stored checksum of every record of which a byte was used.

    What the copies did not read of such a record (padding, tensors left out) is read here.
    """
    touched = [
        (file, record)
        for file in sorted(reads.files)
        for record in sources[file].records
        if record.crc32 is not None and reads.touching(file, record.byte_offset, record.nbytes)
    ]
    parallel_for(
        select_share(options.team, touched),
        lambda: lambda item: check_record(pool, *item, reads),
        options.workers,
    )
