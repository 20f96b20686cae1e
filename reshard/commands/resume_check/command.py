"""``resume-check``: check that training continues identically from what `split` writes.

A program resumes from the checkpoint as it is, on its own number of ranks, and from each requested
layout; the losses are compared. The program is our trainer, whose settings are in the checkpoint,
or any program that takes a checkpoint and writes a log.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard import formats
from reshard.checks import control, trajectory
from reshard.checks.trajectory import Series, Trajectory
from reshard.commands import diff as comparison
from reshard.commands import programs
from reshard.commands.diff import DiffOptions
from reshard.commands.page import check_page, write_page
from reshard.commands.programs import ProgramResult
from reshard.commands.reading import Meter
from reshard.commands.resume_check.options import ResumeCheckOptions
from reshard.commands.resume_check.program import (
    choose_program,
    copy_loadable,
    locate_log,
    make_loadable,
)
from reshard.commands.resume_check.report import (
    ControlRun,
    LayoutResult,
    NoiseRun,
    ProgramRun,
    ResumeReport,
)
from reshard.commands.split.command import split
from reshard.commands.split.options import SplitOptions
from reshard.commands.split.report import SplitReport
from reshard.core import dtypes
from reshard.core.manifest import Manifest, find_most_common_dtype
from reshard.engine.output.destination import check_destination
from reshard.engine.output.temporary import temporary
from reshard.errors import (
    CorruptError,
    DifferentError,
    IncompleteError,
    NotRunError,
    UnsupportedError,
    UsageError,
)
from reshard.formats import registry
from reshard.system.paths import as_path, is_remote
from reshard.units import counted

if TYPE_CHECKING:
    from reshard.html.page import Page

Print = Callable[[str], None]
ShowRun = Callable[[int, float, str], None]
"""Called every second of a run, with the steps done, the seconds and the last printed line."""
RunMeter = Callable[[str, int], AbstractContextManager[ShowRun]]
"""Opens a display for a run: its name, and its number of steps."""


@dataclass(frozen=True, slots=True)
class _PlannedLayout:
    options: SplitOptions
    planned: SplitReport
    flags: Sequence[str]

    @property
    def name(self) -> str:
        return f"{self.planned.target}, {counted(self.planned.ranks, 'rank')}"

    @property
    def folder(self) -> str:
        return self.name.replace(",", "").replace(" ", "-")


def resume_check(
    source: str | Path,
    options: ResumeCheckOptions | None = None,
    meter: Meter | None = None,
    print_line: Print | None = None,
    run_meter: RunMeter | None = None,
) -> ResumeReport:
    """Resume training from ``source`` and from each layout of it, and compare the losses.

    Args:
        print_line: called with a line as each run begins.
        run_meter: opens a display for each run.

    Raises:
        NotRunError: the unbroken run failed. A resumed run that fails is a result.
        ReshardError: the source cannot be read, or not be written in a layout; no step can be
            compared; or the program changed the source.
    """
    options = options or ResumeCheckOptions()
    began = time.perf_counter()
    if is_remote(str(as_path(source))):
        raise UsageError(
            source,
            "is in an object store, and programs read local files",
            "copy it to a local disk",
        )
    check_page(options, [Path(source)], options.keep)
    manifest = comparison.open_checkpoint(source, options)
    sources = (Path(source), Path(manifest.origin.path))
    with open_folder(options.keep, "reshard-resume-check-", *sources) as folder:
        check = _ResumeCheck(
            source, manifest, options, folder, print_line or (lambda _line: None), run_meter
        )
        before = _list_files(manifest)
        report = check.run_all(meter)
        if _list_files(manifest) != before:
            raise DifferentError(
                manifest.origin.path,
                "the program changed the checkpoint that it resumed from",
                "let the program save to {out}",
            )
    report.seconds = time.perf_counter() - began
    write_page(options, lambda: _build_page(report))
    return report


def _build_page(report: ResumeReport) -> Page:
    from reshard.html import check_pages

    return check_pages.build_resume_page(report.to_dict())


class _ResumeCheck:
    def __init__(
        self,
        source: str | Path,
        manifest: Manifest,
        options: ResumeCheckOptions,
        folder: Path,
        print_line: Print,
        run_meter: RunMeter | None,
    ) -> None:
        self._source, self._manifest, self._options = source, manifest, options
        self._root, self._print_line, self._run_meter = folder, print_line, run_meter
        if options.control and not manifest.has_optimizer:
            problem = "has no optimizer state that could be set to zero"
            raise IncompleteError(manifest.origin.path, problem, "omit --control")
        self._program = choose_program(manifest, options.command)
        self._layouts = self._plan_layouts()
        sizes = {self.ranks, *(layout.planned.ranks for layout in self._layouts)}
        if options.command and sizes != {1}:
            programs.split_command(options.command, ["world_size"])

    @property
    def ranks(self) -> int:
        return self._manifest.origin.world

    def run_all(self, meter: Meter | None) -> ResumeReport:
        """Run the program from the source and from every layout; return the report."""
        options, origin = self._options, self._manifest.origin
        unbroken = self._run_unbroken()
        report = ResumeReport(
            source=origin.path,
            format=origin.description,
            ranks=self.ranks,
            step=self._program.step,
            steps=options.steps,
            require=options.require,
            unbroken=unbroken,
            options=options.given(),
        )
        if options.rtol is None:
            report.noise = self._measure_noise(unbroken)
        if self._program.step is None and not options.control:
            advice = "; --control does" if self._manifest.has_optimizer else ""
            report.notes.append(
                "the checkpoint states no step, so these runs do not show that the program loaded"
                f" it at all{advice}"
            )
        for layout in self._layouts:
            report.targets.append(self._check_layout(layout, unbroken, meter))
        if options.control:
            report.control = self._run_control(self._layouts[0], unbroken)
        return report

    def _plan_layouts(self) -> list[_PlannedLayout]:
        options = self._options
        layouts: dict[str, _PlannedLayout] = {}
        for to, size in product(options.to or (None,), options.world_sizes or (None,)):
            chosen = options.split_options(to, size)
            planned = split(
                self._source, self._root / "planned", replace(chosen, dry_run=True, overwrite=True)
            )
            layout = _PlannedLayout(chosen, planned, self._program.layout_flags(planned))
            layouts.setdefault(layout.name, layout)  # two choices can mean the same layout
        return list(layouts.values())

    def _run_unbroken(self) -> ProgramRun:
        given = self._options.unbroken
        if given is not None:
            series = self._select_steps(trajectory.read(given))
            return ProgramRun("unbroken", self.ranks, series=series)
        run = self._continue_source("unbroken")
        if run.failure:
            kind = IncompleteError if run.ended else NotRunError
            raise kind(
                "the unbroken run" if run.ended else "could not run",
                f"{' '.join(run.command)}: {run.failure}",
                "its last lines are above; pass --keep DIR to keep all of its output",
                output=run.last_lines,
            )
        return run

    def _continue_source(self, name: str) -> ProgramRun:
        folder = self._make_folder(name.replace(", ", "-"))
        checkpoint = make_loadable(self._manifest, folder)
        return self._run(name, checkpoint, folder, self.ranks, self._manifest.origin.zero_stage)

    def _select_steps(self, series: Series) -> Series:
        step = self._program.step
        after = step if step is not None else series.points[0].step - 1
        part = series.between(after, after + self._options.steps)
        if not part.points:
            raise IncompleteError(
                self._options.unbroken,
                f"contains none of the {self._options.steps} steps after step {after}",
                "pass the log of the run that saved the checkpoint and continued",
            )
        return part

    def _check_layout(
        self, layout: _PlannedLayout, unbroken: ProgramRun, meter: Meter | None
    ) -> LayoutResult:
        folder = self._make_folder(layout.folder)
        checkpoint = folder / "checkpoint"
        written = split(self._source, checkpoint, layout.options, meter)
        chosen = layout.options
        # The options that are reset describe the source, not the output.
        loaded = comparison.open_checkpoint(
            checkpoint,
            replace(chosen, tag=None, key=None, source_format=None, to=None),
        )
        own = DiffOptions(workers=chosen.workers, max_memory_bytes=chosen.max_memory_bytes)
        state = comparison.compare(self._manifest, loaded, own, meter)
        run = self._resume_layout(layout, checkpoint, folder)
        if self._options.keep is None:
            shutil.rmtree(checkpoint)  # so that the disk needs room for one layout only
        return LayoutResult(run, written, state, _compare_losses(unbroken, run))

    def _measure_noise(self, unbroken: ProgramRun) -> NoiseRun:
        # Another order of sums rounds differently, and training amplifies what it changes. The log
        # of an earlier run does not show what a resume in this program loses, so a continuation is
        # compared with another one.
        if not unbroken.command:
            unbroken = self._continue_source("unbroken, again")
        manifest, folder = self._manifest, self._make_folder("unbroken-weights-rounded")
        weights = (entry.dtype for entry in manifest.select_weights().values())
        names = [manifest.origin.precision or find_most_common_dtype(weights) or "float32"]
        names += [layout.options.dtype for layout in self._layouts if layout.options.dtype]
        precision = min(map(dtypes.parse, names), key=lambda dtype: dtype.itemsize)
        rounded = 0
        try:
            checkpoint, copied = copy_loadable(manifest, folder)
            rounded = control.round_weights(copied)
        except UnsupportedError:
            link = folder / "link"
            link.mkdir()
            checkpoint = make_loadable(manifest, link)
        run = self._run(
            "unbroken, weights rounded",
            checkpoint,
            folder,
            self.ranks,
            manifest.origin.zero_stage,
        )
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)  # it must never be used for training
        return NoiseRun(run, rounded, precision, _compare_losses(unbroken, run))

    def _run_control(self, layout: _PlannedLayout, unbroken: ProgramRun) -> ControlRun:
        folder = self._make_folder("control")
        checkpoint = folder / "checkpoint"
        split(self._source, checkpoint, layout.options)
        model, wrap = layout.options.model, layout.options.wrap
        wiped = control.wipe_moment(formats.read(checkpoint, model=model, wrap=wrap))
        run = self._resume_layout(layout, checkpoint, folder)
        shutil.rmtree(checkpoint)  # it must never be used for training
        name = f"{wiped.kind} of {wiped.fqn}"
        return ControlRun(run, name, _compare_losses(unbroken, run))

    def _resume_layout(self, layout: _PlannedLayout, checkpoint: Path, folder: Path) -> ProgramRun:
        planned = layout.planned
        return self._run(
            layout.name, checkpoint, folder, planned.ranks, planned.zero_stage, layout.flags
        )

    def _run(
        self,
        name: str,
        checkpoint: Path,
        folder: Path,
        ranks: int,
        zero_stage: int | None,
        flags: Sequence[str] = (),
    ) -> ProgramRun:
        words = self._program.build_command(
            checkpoint, folder, ranks=ranks, steps=self._options.steps, zero_stage=zero_stage
        )
        run = ProgramRun(name, ranks, [*words, *flags])
        self._print_line(f"{name}: {' '.join(run.command)}")
        ended = self._run_shown(run, folder)
        run.seconds = ended.seconds
        if ended.failed:
            run.failure, run.last_lines, run.ended = ended.describe(), ended.last_lines, False
            return run
        try:
            run.series = self._read_log(locate_log(folder))
        except (CorruptError, IncompleteError) as error:
            run.failure = " ".join(error.lines)
        return run

    def _run_shown(self, run: ProgramRun, folder: Path) -> ProgramResult:
        timeout_s = self._options.timeout_s
        if self._run_meter is None:
            return programs.run(run.command, folder, timeout_s)
        with self._run_meter(run.name, self._options.steps) as show:

            def watch(seconds: float, line: str) -> None:
                show(trajectory.count_steps(locate_log(folder)), seconds, line)

            return programs.run(run.command, folder, timeout_s, watch)

    def _read_log(self, log: Path) -> Series:
        step, series = self._program.step, trajectory.read(log)
        first = series.points[0].step
        if step is not None and first <= step:
            raise IncompleteError(
                log,
                f"begins with step {first}, but the checkpoint was saved at step {step}: the"
                " program did not resume from it, or counts its steps differently",
                "log the total number of steps, including those before the checkpoint",
            )
        return series

    def _make_folder(self, name: str) -> Path:
        folder = self._root / name
        folder.mkdir()
        return folder


@contextmanager
def open_folder(keep: Path | None, prefix: str, *sources: Path) -> Iterator[Path]:
    """Open the directory for all files of the runs: a new one that is kept, or a temporary one."""
    if keep is None:
        with temporary(prefix) as path:
            yield Path(path)
        return
    check_destination(keep, list(sources), is_directory=True, overwrite=False)
    keep.mkdir(exist_ok=True)
    yield keep.resolve()


def _compare_losses(unbroken: ProgramRun, run: ProgramRun) -> Trajectory | None:
    if unbroken.series is None or run.series is None:
        return None
    return trajectory.compare(unbroken.series, run.series)


def _list_files(manifest: Manifest) -> Mapping[str, Any]:
    folder = Path(manifest.origin.path)
    files = [*folder.rglob("*")] if folder.is_dir() else [folder]
    latest = folder.parent / (registry.describe_source(manifest).pointer or folder.name)
    files += [latest] if latest.is_file() else []
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
