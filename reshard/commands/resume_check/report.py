"""The report of `resume-check`: the losses of every run, and the levels that layouts reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from reshard.checks.trajectory import (
    MOST,
    Distance,
    Number,
    Point,
    Series,
    Trajectory,
    choose_tolerance,
)
from reshard.commands.diff import DiffReport
from reshard.commands.lines import LISTED, Report, format_list, format_row
from reshard.commands.split.report import SplitReport
from reshard.core.dtypes import DType
from reshard.errors import NotRunError
from reshard.units import abridge, counted

SCHEMA = 1
Level = Literal["state", "trajectory", "bitwise"]
LEVELS = get_args(Level)
Verdict = Literal["same", "not the same", "could not run"]


@dataclass(slots=True)
class ProgramRun:
    """One program that resumed from a checkpoint.

    Args:
        command: empty if the log of the run was given.
        failure: how the run failed; empty if it did not.
        ended: whether the program itself ended with exit code 0: a failure is then in its log.
        last_lines: the last lines that a failed program printed.
    """

    name: str
    ranks: int
    command: list[str] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""
    ended: bool = True
    last_lines: Sequence[str] = ()
    series: Series | None = None

    @property
    def points(self) -> tuple[Point, ...]:
        """The steps in its log."""
        return self.series.points if self.series else ()

    def to_dict(self) -> dict[str, Any]:
        """Return the run with all its steps."""
        return {
            "name": self.name,
            "ranks": self.ranks,
            "command": self.command,
            "seconds": self.seconds,
            "failure": self.failure,
            "said": list(self.last_lines),
            "series": [point.to_dict() for point in self.points],
            "parameter_hash": self.series.parameter_hash if self.series else None,
        }


@dataclass(slots=True)
class LayoutResult:
    """One layout: what was written for it, and the run that resumed from it."""

    run: ProgramRun
    written: SplitReport
    state: DiffReport
    trajectory: Trajectory | None = None  # None if the run failed

    @property
    def tensors_equal(self) -> bool:
        """Whether all tensors, the optimizer's included, are bitwise equal to the source."""
        return not (self.state.unequal or self.state.only_a or self.state.only_b)

    @property
    def other_settings(self) -> list[str]:
        """The settings of the optimizer that differ, from which updates are computed."""
        return [value.name for value in self.state.train if value.steers_updates]

    def reaches(self, level: Level, rtol: float) -> bool:
        """Return whether the runs showed a level.

        All levels need equal tensors, and equal settings of the optimizer, which programs may take
        from the files. Only ``state`` needs equal train state too: another difference (a sample
        counter, random states) shows in the losses if it matters.
        """
        if level == "state":
            return self.state.same
        if self.trajectory is None or not self.tensors_equal or self.other_settings:
            return False
        return self.trajectory.bitwise if level == "bitwise" else self.trajectory.is_within(rtol)

    def to_dict(self, rtol: float) -> dict[str, Any]:
        """Return all results."""
        return {
            "name": self.run.name,
            "ranks": self.run.ranks,
            "reached": {level: self.reaches(level, rtol) for level in LEVELS},
            "state": self.state.to_dict(),
            "trajectory": self.trajectory.to_dict() if self.trajectory else None,
            "run": self.run.to_dict(),
            "written": self.written.to_dict(),
        }


@dataclass(slots=True)
class NoiseRun:
    """A second undamaged continuation, whose distance is the noise of the program.

    Args:
        rounded: number of tensors of the copy that were rounded; 0 if it resumed from the source.
        precision: the narrowest dtype of the runs that are compared.
    """

    run: ProgramRun
    rounded: int
    precision: DType
    trajectory: Trajectory | None = None

    @property
    def tolerance(self) -> float:
        """The tolerance of losses that follows from the noise."""
        loss = self.trajectory.loss if self.trajectory else None
        return choose_tolerance(loss, self.precision.itemsize)

    def describe(self) -> Iterator[str]:
        """Yield how the tolerance was chosen."""
        if self.trajectory is None:
            yield f"of {self.precision}: the continuation that measures it failed"
            return
        what = f"with {counted(self.rounded, 'tensor')} rounded" if self.rounded else "not rounded"
        noise = self.trajectory.loss.max_rel
        yield f"measured: a second undamaged continuation, {what}, differs by {noise:.2g}"
        if self.tolerance == MOST:
            yield (
                f"it is limited to {MOST:g}: the program itself is not reproducible in these steps"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return all results."""
        return {
            "rounded": self.rounded,
            "precision": str(self.precision),
            "trajectory": self.trajectory.to_dict() if self.trajectory else None,
            "run": self.run.to_dict(),
        }


@dataclass(slots=True)
class ControlRun:
    """A run that resumed from a copy that lacks one moment: its losses must differ.

    Args:
        wiped: the moment, ``exp_avg of head.weight``.
    """

    run: ProgramRun
    wiped: str
    trajectory: Trajectory | None = None

    def noticed(self, rtol: float) -> bool:
        """Return whether the losses differ by more than the tolerance."""
        return self.trajectory is not None and not self.trajectory.is_within(rtol)

    def to_dict(self, rtol: float) -> dict[str, Any]:
        """Return all results."""
        return {
            "noticed": self.noticed(rtol),
            "wiped": self.wiped,
            "trajectory": self.trajectory.to_dict() if self.trajectory else None,
            "run": self.run.to_dict(),
        }


@dataclass(slots=True, repr=False)
class ResumeReport(Report):
    """The result of `resume_check`."""

    source: str
    format: str
    ranks: int
    step: int | None  # step of the checkpoint; None if it states none
    steps: int  # number of steps of each run
    require: Level
    unbroken: ProgramRun
    noise: NoiseRun | None = None  # None if the user chose the tolerance
    options: dict[str, Any] = field(default_factory=dict)  # those that differ from the defaults
    targets: list[LayoutResult] = field(default_factory=list)
    control: ControlRun | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rtol(self) -> float:
        """The relative tolerance of losses: the user's, or the measured one."""
        given: float = self.options.get("rtol", 0.0)
        return self.noise.tolerance if self.noise else given

    @property
    def blind(self) -> bool:
        """Whether the control run shows that these steps cannot reveal a lost optimizer."""
        return self.control is not None and not self.control.noticed(self.rtol)

    def reaches(self, result: LayoutResult, level: Level | None = None) -> bool:
        """Return whether a layout reached a level, by default the required one."""
        level = level or self.require
        return result.reaches(level, self.rtol) and not (self.blind and level != "state")

    @property
    def reached(self) -> bool:
        """Whether every layout reached the required level."""
        return all(map(self.reaches, self.targets))

    @property
    def could_not_run(self) -> bool:
        """Whether programs that did not run are the only failures, so that nothing is known."""
        if self.reached:
            return False
        lacking = [result for result in self.targets if not result.reaches(self.require, self.rtol)]
        unknown = all(not result.run.ended and result.tensors_equal for result in lacking)
        return unknown and (self.control is None or not self.blind or not self.control.run.ended)

    @property
    def verdict(self) -> Verdict:
        """The verdict: the same, not the same, or could not run."""
        if self.reached:
            return "same"
        return "could not run" if self.could_not_run else "not the same"

    @property
    def exit_code(self) -> int:
        """0 if all layouts reached the level, 6 if programs could not run, else 1."""
        return {"same": 0, "not the same": 1, "could not run": NotRunError.exit_code}[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return one document with a stable schema, with the steps of all runs."""
        return {
            "schema": SCHEMA,
            "command": "resume-check",
            "reached": self.reached,
            "verdict": self.verdict,
            "require": self.require,
            "rtol": self.rtol,
            "noise": self.noise.to_dict() if self.noise else None,
            "options": self.options,
            "source": self.source,
            "format": self.format,
            "ranks": self.ranks,
            "step": self.step,
            "steps": self.steps,
            "unbroken": self.unbroken.to_dict(),
            "targets": [result.to_dict(self.rtol) for result in self.targets],
            "control": self.control.to_dict(self.rtol) if self.control else None,
            "notes": self.notes,
            "seconds": self.seconds,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        good = sum(map(self.reaches, self.targets))
        verdict = "" if self.reached else f"{self.verdict.upper()}: "
        count = f"{good} of {len(self.targets)} layouts"
        yield f"{self.source}: {verdict}{self.require} reached by {count}"
        at = "" if self.step is None else f", step {self.step}"
        yield format_row("from", f"{self.format}, {counted(self.ranks, 'rank')}{at}")
        ran = counted(self.unbroken.ranks, "rank")
        how = ran if self.unbroken.command else "its log was given"
        yield format_row("unbroken", f"{how}; {_describe_steps(self.unbroken.points)}")
        how = "; ".join(self.noise.describe()) if self.noise else "--rtol"
        yield format_row("tolerance", f"{self.rtol:.2g}, {how}")
        yield from _format_losses([self.unbroken, *(result.run for result in self.targets)])
        for result in self.targets:
            yield from self._describe_result(result)
        if self.control:
            yield from self._describe_control(self.control)
        yield from format_list("note", self.notes)
        yield format_row("time", f"{self.seconds:.1f} s")

    def _describe_result(self, result: LayoutResult) -> Iterator[str]:
        best = [level for level in LEVELS if self.reaches(result, level)]
        verdict = best[-1] if best else "NOT the same"
        if not result.run.ended:
            verdict = f"{best[-1]}; could not run" if best else "could not run"
        yield f"{result.run.name}: {verdict}"
        yield format_row("  state", _describe_state(result))
        for item in result.written.notes[:LISTED]:
            yield format_row("  note", item)
        for item in result.written.warnings[:LISTED]:
            yield format_row("  warning", item)
        if result.trajectory is None:
            yield from _describe_failure(result.run)
            return
        yield from _describe_trajectory(result.trajectory, self.rtol, self.steps)
        if result.other_settings:
            text = "DIFFER in the files, for programs that take them from there"
            yield format_row("  settings", f"{abridge(result.other_settings)} {text}")

    def _describe_control(self, control: ControlRun) -> Iterator[str]:
        yield f"control: {control.wiped} set to zero in {control.run.name}"
        if control.trajectory is None:
            yield from _describe_failure(control.run)
        else:
            distance = _describe_distance(control.trajectory.loss)
            seen = "noticed" if control.noticed(self.rtol) else "NOT noticed"
            yield format_row("  losses", f"{seen}: {distance} (tolerance {self.rtol:.2g})")
        if self.blind:
            yield format_row(
                "  verdict",
                "these steps do not show whether every moment was restored: pass more --steps or a"
                " smaller --rtol",
            )


def _describe_state(result: LayoutResult) -> str:
    state = result.state
    if state.same:
        return f"{state.equal} tensors and the train state are equal bit by bit"
    if result.tensors_equal:
        names = ", ".join(value.name for value in state.train[:LISTED])
        return f"{state.equal} tensors are equal bit by bit; the train state differs in {names}"
    first = [difference.describe() for difference in state.unequal]
    first += [f"{kind} {fqn} is only in the source" for kind, fqn in state.only_a]
    first += [f"{kind} {fqn} is only in the output" for kind, fqn in state.only_b]
    return f"{len(first)} tensors DIFFER, {state.equal} are equal; the first: {first[0]}"


def _describe_trajectory(compared: Trajectory, rtol: float, steps: int) -> Iterator[str]:
    at = (
        f"at {len(compared.steps)} of {steps} steps"
        if len(compared.steps) != steps
        else f"{steps} steps"
    )
    outside = "" if compared.is_within(rtol) else "OUTSIDE the "
    tolerance = "" if compared.loss.equal else f" ({outside}tolerance {rtol:.2g})"
    yield format_row("  losses", f"{_describe_distance(compared.loss)}{tolerance}; {at}")
    if compared.loss.not_finite:
        steps_text = ", ".join(map(str, compared.loss.not_finite))
        yield format_row("  losses", f"NOT finite in either run: step {steps_text}")
    if compared.alone:
        yield format_row(
            "  losses",
            f"only one of the two runs logged step {', '.join(map(str, compared.alone))}",
        )
    norms = (
        _describe_distance(compared.grad_norm)
        if compared.grad_norm
        else "not compared, because they are not in both logs"
    )
    yield format_row("  norms", norms)
    yield format_row("  weights", _PARAMETERS[compared.parameters])


_PARAMETERS = {
    True: "equal at the end (parameter_hash)",
    False: "differ at the end (parameter_hash)",
    None: "not compared, because parameter_hash is not in both logs",
}


def _describe_distance(distance: Distance) -> str:
    if distance.equal:
        return "equal bit by bit" if distance.exact else "equal as logged, in decimals without hex"
    return f"largest relative difference {distance.max_rel:.2g}, at step {distance.at}"


def _describe_failure(run: ProgramRun) -> Iterator[str]:
    yield format_row("  failed", run.failure)
    yield from (f"    {line}" for line in run.last_lines)


def _describe_steps(points: Sequence[Point]) -> str:
    return f"steps {points[0].step} to {points[-1].step}" if points else "no steps"


def _format_losses(runs: Sequence[ProgramRun]) -> Iterator[str]:
    """Yield a table of losses; ``=`` marks those that are bitwise equal to the unbroken run's."""
    columns = [{point.step: point.loss for point in run.points} for run in runs]
    widths = [max(len(run.name), 20) for run in runs]
    names = [f"{run.name:>{width}}" for run, width in zip(runs, widths, strict=True)]
    yield "  ".join(["step", *names])
    for step in sorted({step for column in columns for step in column}):
        first = columns[0].get(step)
        cells = [
            f"{_format_loss(column.get(step), first if number else None):>{width}}"
            for number, (column, width) in enumerate(zip(columns, widths, strict=True))
        ]
        yield "  ".join([f"{step:>4}", *cells])


def _format_loss(number: Number | None, other: Number | None) -> str:
    if number is None:
        return "-"
    same = other is not None and number.exact and number.hex() == other.hex()
    return f"{'= ' if same else ''}{number.value:.15g}"
