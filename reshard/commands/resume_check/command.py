"""``resume-check``: does training go on the same from what `split` writes?

A program goes on from the checkpoint as it is, at its own number of ranks, and from each layout
that is asked for; the losses of both are compared. It is our trainer, whose settings lie in the
checkpoint, or any program that takes a checkpoint and writes a log.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard import formats
from reshard.commands import diff as comparison
from reshard.commands import programs
from reshard.commands.diff import DiffOptions
from reshard.commands.page import check_page, write_page
from reshard.commands.reading import Meter
from reshard.commands.resume_check.options import ResumeCheckOptions
from reshard.commands.resume_check.program import KNOWN, LATEST, loadable, log_in, program_of
from reshard.commands.resume_check.report import Control, Outcome, ResumeReport, Run
from reshard.commands.split.command import split
from reshard.commands.split.options import SplitOptions
from reshard.commands.split.report import SplitReport
from reshard.errors import (
    CorruptError,
    DifferentError,
    IncompleteError,
    NotRunError,
    UsageError,
)
from reshard.manifest import Manifest
from reshard.output.destination import check_destination
from reshard.output.temporary import temporary
from reshard.paths import as_path, is_remote
from reshard.proof import control, trajectory
from reshard.proof.trajectory import Series

if TYPE_CHECKING:
    from reshard.html.page import Page

Tell = Callable[[str], None]
Watch = Callable[[str, float, str], None]


@dataclass(frozen=True, slots=True)
class _Layout:
    """One way in which the state is to be written."""

    options: SplitOptions
    planned: SplitReport
    flags: Sequence[str]

    @property
    def name(self) -> str:
        """As the report calls it."""
        count = self.planned.ranks
        return f"{self.planned.target}, {count} rank{'s' * (count != 1)}"

    @property
    def folder(self) -> str:
        """As its directory is called."""
        return self.name.replace(",", "").replace(" ", "-")


def resume_check(
    source: str | Path,
    options: ResumeCheckOptions | None = None,
    meter: Meter | None = None,
    tell: Tell | None = None,
    watch: Watch | None = None,
) -> ResumeReport:
    """Let training go on from ``source`` and from each layout of it, and compare.

    Args:
        tell: called with a line as each run begins.
        watch: called every second of a run, with its name, its seconds and its last line.

    Raises:
        NotRunError: the unbroken run failed. A resumed run that fails is a result.
        ReshardError: the source cannot be read or written so, no step can be compared, or the
            program changed the source.
    """
    options = options or ResumeCheckOptions()
    began = time.perf_counter()
    if is_remote(str(as_path(source))):
        raise UsageError(
            source, "is in an object store, and programs read files of this machine", "copy it here"
        )
    check_page(options, [Path(source)], options.keep)
    manifest = comparison.opened(source, options)
    sources = (Path(source), Path(manifest.origin.path))
    with place_for(options.keep, "reshard-resume-check-", *sources) as place:
        check = _Check(source, manifest, options, place, tell or (lambda _line: None), watch)
        before = _census(manifest)
        report = check.report(meter)
        if _census(manifest) != before:
            raise DifferentError(
                manifest.origin.path,
                "was changed by the program, which was to go on from it",
                "let it save to {out}",
            )
    report.seconds = time.perf_counter() - began
    write_page(options, lambda: _page(report))
    return report


def _page(report: ResumeReport) -> Page:
    from reshard.html import proof_pages

    return proof_pages.resumed(report.to_json())


class _Check:
    """All runs of one source."""

    def __init__(
        self,
        source: str | Path,
        manifest: Manifest,
        options: ResumeCheckOptions,
        place: Path,
        tell: Tell,
        watch: Watch | None,
    ) -> None:
        self._source, self._manifest, self._options = source, manifest, options
        self._place, self._tell, self._watch = place, tell, watch
        self._program = program_of(manifest, options.command)
        self._layouts = self._planned()
        sizes = {self.ranks, *(layout.planned.ranks for layout in self._layouts)}
        if options.command and sizes != {1}:
            programs.words(options.command, KNOWN, ["world_size"])

    @property
    def ranks(self) -> int:
        """Of the source."""
        return self._manifest.origin.world

    def report(self, meter: Meter | None) -> ResumeReport:
        """Run them all."""
        options, origin = self._options, self._manifest.origin
        unbroken = self._unbroken()
        report = ResumeReport(
            source=origin.path,
            format=origin.description,
            ranks=self.ranks,
            step=self._program.step,
            steps=options.steps,
            require=options.require,
            rtol=options.rtol,
            unbroken=unbroken,
            options=options.given(),
        )
        if self._program.step is None and not options.control:
            report.notes.append(
                "the checkpoint tells no step, so nothing here shows that the program loaded it at"
                " all; --control does"
            )
        for layout in self._layouts:
            report.targets.append(self._outcome(layout, unbroken, meter))
        if options.control:
            report.control = self._control(self._layouts[0], unbroken)
        return report

    def _planned(self) -> list[_Layout]:
        """Each layout that is asked for; one that cannot be written is refused before any run."""
        asked = self._options
        found: dict[str, _Layout] = {}
        for to, size in product(asked.to or (None,), asked.world_sizes or (None,)):
            chosen = asked.split_options(to, size)
            planned = split(
                self._source, self._place / "planned", replace(chosen, dry_run=True, overwrite=True)
            )
            layout = _Layout(chosen, planned, self._program.added(planned))
            found.setdefault(layout.name, layout)
        return list(found.values())

    def _unbroken(self) -> Run:
        """The run that goes on from the source as it is.

        Raises:
            NotRunError: it failed.
            IncompleteError: it did not go on from there.
        """
        given = self._options.unbroken
        if given is not None:
            series = self._cut(trajectory.read(given))
            return Run("unbroken", self.ranks, series=series)
        folder = self._folder("unbroken")
        place, of = loadable(self._manifest, folder), self._manifest.origin
        run = self._run("unbroken", place, folder, self.ranks, of.detail)
        if run.failure:
            kind = IncompleteError if run.ended else NotRunError
            raise kind(
                "the unbroken run" if run.ended else "could not run",
                f"{' '.join(run.command)}: {run.failure}",
                "look at what it says, or --keep DIR",
                output=run.said,
            )
        return run

    def _cut(self, series: Series) -> Series:
        """The steps of a longer log that the resumed runs make."""
        step = self._program.step
        after = step if step is not None else series.points[0].step - 1
        part = series.between(after, after + self._options.steps)
        if not part.points:
            raise IncompleteError(
                self._options.unbroken,
                f"has none of the {self._options.steps} steps after step {after}",
                "give the log of the run that saved the checkpoint and went on",
            )
        return part

    def _outcome(self, layout: _Layout, unbroken: Run, meter: Meter | None) -> Outcome:
        """Write a layout, compare it with the source, go on from it."""
        folder = self._folder(layout.folder)
        checkpoint = folder / "checkpoint"
        written = split(self._source, checkpoint, layout.options, meter)
        chosen = layout.options
        held = comparison.opened(
            checkpoint,
            replace(chosen, tag=None, key=None, source_format=None, to=None),
        )
        own = DiffOptions(workers=chosen.workers, max_memory_bytes=chosen.max_memory_bytes)
        state = comparison.compare(self._manifest, held, own, meter)
        run = self._resumed(layout, checkpoint, folder)
        if self._options.keep is None:
            shutil.rmtree(checkpoint)
        outcome = Outcome(run, written, state)
        if run.series and unbroken.series:
            outcome.trajectory = trajectory.compare(unbroken.series, run.series)
        return outcome

    def _control(self, layout: _Layout, unbroken: Run) -> Control:
        """Go on from a copy without its optimizer's memory."""
        folder = self._folder("control")
        checkpoint = folder / "checkpoint"
        split(self._source, checkpoint, layout.options)
        told = layout.options
        wiped = control.forget_optimizer(formats.read(checkpoint, model=told.model, wrap=told.wrap))
        run = self._resumed(layout, checkpoint, folder)
        shutil.rmtree(checkpoint)  # nobody must go on from that
        found = Control(run, wiped)
        if run.series and unbroken.series:
            found.trajectory = trajectory.compare(unbroken.series, run.series)
        return found

    def _resumed(self, layout: _Layout, checkpoint: Path, folder: Path) -> Run:
        planned = layout.planned
        return self._run(
            layout.name, checkpoint, folder, planned.ranks, planned.target, layout.flags
        )

    def _run(
        self,
        name: str,
        checkpoint: Path,
        folder: Path,
        ranks: int,
        form: str,
        flags: Sequence[str] = (),
    ) -> Run:
        """Start the program on a checkpoint and read its log; what goes wrong is in the result.

        Raises:
            UsageError: it cannot be started, or is to be told what the checkpoint has not.
        """
        words = self._program.command(
            checkpoint, folder, ranks=ranks, steps=self._options.steps, form=form
        )
        run = Run(name, ranks, [*words, *flags])
        self._tell(f"{name}: {' '.join(run.command)}")
        watch = partial(self._watch, name) if self._watch else None
        ended = programs.run(run.command, folder, self._options.timeout_s, watch)
        run.seconds = ended.seconds
        if ended.failed:
            run.failure, run.said, run.ended = ended.why(), ended.said, False
            return run
        try:
            run.series = self._read(log_in(folder))
        except (CorruptError, IncompleteError) as error:
            run.failure = " ".join(error.lines)
        return run

    def _read(self, log: Path) -> Series:
        """The steps of a run.

        Raises:
            IncompleteError: there are none, or they do not come after the checkpoint's.
            CorruptError: the log cannot be read.
        """
        step, series = self._program.step, trajectory.read(log)
        first = series.points[0].step
        if step is not None and first <= step:
            raise IncompleteError(
                log,
                f"begins with step {first}, and the checkpoint is of step {step}: the program did"
                " not go on from it, or counts its steps from another place",
                "log the number of steps done, those before the checkpoint included",
            )
        return series

    def _folder(self, name: str) -> Path:
        folder = self._place / name
        folder.mkdir()
        return folder


@contextmanager
def place_for(keep: Path | None, prefix: str, *sources: Path) -> Iterator[Path]:
    """Where everything is put: a new directory that stays, or a temporary one.

    Raises:
        ExistsError: it is not new, or lies inside the source.
    """
    if keep is None:
        with temporary(prefix) as made:
            yield Path(made)
        return
    check_destination(keep, list(sources), is_directory=True, overwrite=False)
    keep.mkdir(exist_ok=True)
    yield keep.resolve()


def _census(manifest: Manifest) -> Mapping[str, Any]:
    """Every file of the source, with its size and when it was written."""
    place = Path(manifest.origin.path)
    files = [*place.rglob("*")] if place.is_dir() else [place]
    latest = place.parent / LATEST.get(manifest.origin.format, place.name)
    files += [latest] if latest.is_file() else []
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
