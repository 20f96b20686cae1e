"""What `resume-check` saw: every run's losses, and which levels each target reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from reshard.commands.diff import DiffReport
from reshard.commands.lines import LISTED, format_list, format_row
from reshard.commands.split.report import SplitReport
from reshard.errors import NotRunError
from reshard.proof.trajectory import Distance, Number, Point, Series, Trajectory

SCHEMA = 1
Level = Literal["state", "trajectory", "bitwise"]
LEVELS = get_args(Level)
Verdict = Literal["same", "not the same", "could not run"]


@dataclass(slots=True)
class Run:
    """One program that went on from a checkpoint.

    Args:
        command: empty where the run's log was given.
        failure: how it failed; empty where it ended well.
        ended: whether the program itself ended well: then ``failure`` is of its log.
        said: the last lines that it printed, where it failed.
    """

    name: str
    ranks: int
    command: list[str] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""
    ended: bool = True
    said: Sequence[str] = ()
    series: Series | None = None

    @property
    def points(self) -> tuple[Point, ...]:
        """Its steps."""
        return self.series.points if self.series else ()

    def to_json(self) -> dict[str, Any]:
        """With every step."""
        return {
            "name": self.name,
            "ranks": self.ranks,
            "command": self.command,
            "seconds": self.seconds,
            "failure": self.failure,
            "said": list(self.said),
            "series": [point.to_json() for point in self.points],
            "parameter_hash": self.series.parameter_hash if self.series else None,
        }


@dataclass(slots=True)
class Outcome:
    """One layout: what was written for it, and how the run that loaded it went on."""

    run: Run
    written: SplitReport
    state: DiffReport
    trajectory: Trajectory | None = None  # None: the run failed

    @property
    def tensors_equal(self) -> bool:
        """Whether every tensor arrived bit by bit, the optimizer's included."""
        return not (self.state.unequal or self.state.only_a or self.state.only_b)

    def reaches(self, level: Level, rtol: float) -> bool:
        """Whether this was seen: ``trajectory`` and ``bitwise`` need all tensors equal, too.

        Train state that differs (a sample counter, random states) shows in the losses if it
        matters; ``state`` alone asks for all of it.
        """
        if level == "state":
            return self.state.same
        if self.trajectory is None or not self.tensors_equal:
            return False
        return self.trajectory.bitwise if level == "bitwise" else self.trajectory.within(rtol)

    def to_json(self, rtol: float) -> dict[str, Any]:
        """Everything that was seen."""
        return {
            "name": self.run.name,
            "ranks": self.run.ranks,
            "reached": {level: self.reaches(level, rtol) for level in LEVELS},
            "state": self.state.to_json(),
            "trajectory": self.trajectory.to_json() if self.trajectory else None,
            "run": self.run.to_json(),
            "written": self.written.to_json(),
        }


@dataclass(slots=True)
class Control:
    """A run that went on from a copy whose optimizer was wiped: these steps must show it."""

    run: Run
    tensors: int  # wiped
    trajectory: Trajectory | None = None

    def noticed(self, rtol: float) -> bool:
        """Whether its losses leave the tolerance."""
        return self.trajectory is not None and not self.trajectory.within(rtol)

    def to_json(self, rtol: float) -> dict[str, Any]:
        """Everything that was seen."""
        return {
            "noticed": self.noticed(rtol),
            "tensors": self.tensors,
            "trajectory": self.trajectory.to_json() if self.trajectory else None,
            "run": self.run.to_json(),
        }


@dataclass(slots=True)
class ResumeReport:
    """The result of `resume_check`."""

    source: str
    format: str
    ranks: int
    step: int | None  # of the checkpoint; None where it tells none
    steps: int  # that each run was asked to go on
    require: Level
    rtol: float
    unbroken: Run
    options: dict[str, Any] = field(default_factory=dict)  # those that were given
    targets: list[Outcome] = field(default_factory=list)
    control: Control | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def blind(self) -> bool:
        """Whether the control shows that these steps tell nothing."""
        return self.control is not None and not self.control.noticed(self.rtol)

    def reaches(self, outcome: Outcome, level: Level | None = None) -> bool:
        """Whether a target reached a level, by default the one that was asked for."""
        level = level or self.require
        return outcome.reaches(level, self.rtol) and not (self.blind and level != "state")

    @property
    def reached(self) -> bool:
        """Whether every target reached what was asked for."""
        return all(map(self.reaches, self.targets))

    @property
    def could_not_run(self) -> bool:
        """Return whether programs that did not run are the only failure: that is no verdict."""
        if self.reached:
            return False
        lacking = [each for each in self.targets if not each.reaches(self.require, self.rtol)]
        unknown = all(not each.run.ended and each.tensors_equal for each in lacking)
        return unknown and (self.control is None or not self.blind or not self.control.run.ended)

    @property
    def verdict(self) -> Verdict:
        """Return the verdict: the same, not the same, or could not run."""
        if self.reached:
            return "same"
        return "could not run" if self.could_not_run else "not the same"

    @property
    def exit_code(self) -> int:
        """0 if it was reached by all, 6 if that is not known since programs failed, else 1."""
        return {"same": 0, "not the same": 1, "could not run": NotRunError.exit_code}[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """One document with a stable schema, every series in it."""
        return {
            "schema": SCHEMA,
            "command": "resume-check",
            "reached": self.reached,
            "verdict": self.verdict,
            "require": self.require,
            "rtol": self.rtol,
            "options": self.options,
            "source": self.source,
            "format": self.format,
            "ranks": self.ranks,
            "step": self.step,
            "steps": self.steps,
            "unbroken": self.unbroken.to_json(),
            "targets": [outcome.to_json(self.rtol) for outcome in self.targets],
            "control": self.control.to_json(self.rtol) if self.control else None,
            "notes": self.notes,
            "seconds": self.seconds,
        }

    def lines(self) -> Iterator[str]:
        """The report for a person."""
        good = sum(map(self.reaches, self.targets))
        verdict = "" if self.reached else f"{self.verdict.upper()}: "
        count = f"{good} of {len(self.targets)} layouts"
        yield f"{self.source}: {verdict}{self.require} reached by {count}"
        at = "" if self.step is None else f", step {self.step}"
        yield format_row("from", f"{self.format}, {self.ranks} ranks{at}")
        how = "its log was given" if not self.unbroken.command else f"{self.unbroken.ranks} ranks"
        yield format_row("unbroken", f"{how}; {_span(self.unbroken.points)}")
        yield from _table([self.unbroken, *(outcome.run for outcome in self.targets)])
        for outcome in self.targets:
            yield from self._outcome(outcome)
        if self.control:
            yield from self._control(self.control)
        yield from format_list("note", self.notes)
        yield format_row("time", f"{self.seconds:.1f} s")

    def _outcome(self, outcome: Outcome) -> Iterator[str]:
        best = [level for level in LEVELS if self.reaches(outcome, level)]
        verdict = best[-1] if best else "NOT the same"
        if not outcome.run.ended:
            verdict = f"{best[-1]}; could not run" if best else "could not run"
        yield f"{outcome.run.name}: {verdict}"
        yield format_row("  state", _state(outcome))
        for item in outcome.written.notes[:LISTED]:
            yield format_row("  note", item)
        for item in outcome.written.warnings[:LISTED]:
            yield format_row("  warning", item)
        if outcome.trajectory is None:
            yield from _failure(outcome.run)
            return
        yield from _trajectory(outcome.trajectory, self.rtol, self.steps)

    def _control(self, control: Control) -> Iterator[str]:
        yield f"control: {control.tensors} optimizer tensors wiped in {control.run.name}"
        if control.trajectory is None:
            yield from _failure(control.run)
        else:
            far = _far(control.trajectory.loss)
            seen = "noticed" if control.noticed(self.rtol) else "NOT noticed"
            yield format_row("  losses", f"{seen}: {far} (tolerance {self.rtol:g})")
        if self.blind:
            yield format_row(
                "  verdict", "these steps cannot tell: give more --steps or a smaller --rtol"
            )


def _state(outcome: Outcome) -> str:
    state = outcome.state
    if state.same:
        return f"{state.equal} tensors and the train state are equal bit by bit"
    if outcome.tensors_equal:
        names = ", ".join(value.name for value in state.train[:LISTED])
        return f"{state.equal} tensors are equal bit by bit; of the train state differ: {names}"
    first = [each.text() for each in state.unequal]
    first += [f"{kind} {fqn} is only in the source" for kind, fqn in state.only_a]
    first += [f"{kind} {fqn} is only in what was written" for kind, fqn in state.only_b]
    return f"{len(first)} tensors DIFFER, {state.equal} are equal; the first: {first[0]}"


def _trajectory(seen: Trajectory, rtol: float, steps: int) -> Iterator[str]:
    at = f"at {len(seen.steps)} of {steps} steps" if len(seen.steps) != steps else f"{steps} steps"
    outside = "" if seen.within(rtol) else "OUTSIDE the "
    tolerance = "" if seen.loss.equal else f" ({outside}tolerance {rtol:g})"
    yield format_row("  losses", f"{_far(seen.loss)}{tolerance}; {at}")
    if seen.loss.not_finite:
        steps_text = ", ".join(map(str, seen.loss.not_finite))
        yield format_row("  losses", f"NOT finite in either run: step {steps_text}")
    if seen.alone:
        yield format_row("  losses", f"one run alone logged step {', '.join(map(str, seen.alone))}")
    norms = _far(seen.grad_norm) if seen.grad_norm else "not in both logs: not compared"
    yield format_row("  norms", norms)
    yield format_row("  weights", _PARAMETERS[seen.parameters])


_PARAMETERS = {
    True: "equal at the end (parameter_hash)",
    False: "differ at the end (parameter_hash)",
    None: "no parameter_hash in both logs: not compared",
}


def _far(distance: Distance) -> str:
    if distance.equal:
        return "equal bit by bit" if distance.exact else "equal as logged, in decimals without hex"
    return f"largest relative difference {distance.max_rel:.2g}, at step {distance.at}"


def _failure(run: Run) -> Iterator[str]:
    yield format_row("  failed", run.failure)
    yield from (f"    {line}" for line in run.said)


def _span(points: Sequence[Point]) -> str:
    return f"steps {points[0].step} to {points[-1].step}" if points else "no steps"


def _table(runs: Sequence[Run]) -> Iterator[str]:
    """Losses side by side; ``=`` where the bits are known to be those of the unbroken run."""
    columns = [{point.step: point.loss for point in run.points} for run in runs]
    widths = [max(len(run.name), 20) for run in runs]
    names = [f"{run.name:>{width}}" for run, width in zip(runs, widths, strict=True)]
    yield "  ".join(["step", *names])
    for step in sorted({step for column in columns for step in column}):
        first = columns[0].get(step)
        cells = [
            f"{_cell(column.get(step), first if number else None):>{width}}"
            for number, (column, width) in enumerate(zip(columns, widths, strict=True))
        ]
        yield "  ".join([f"{step:>4}", *cells])


def _cell(number: Number | None, other: Number | None) -> str:
    if number is None:
        return "-"
    same = other is not None and number.exact and number.hex() == other.hex()
    return f"{'= ' if same else ''}{number.value:.15g}"
