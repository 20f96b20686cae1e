"""Two runs step by step: what their logs say, and how far one is from the other.

A log has a JSON object a line. A line with ``step`` and ``loss`` is an optimizer step:

==================  ================================================================================
``step``            steps that were done, this one and those before the checkpoint included
``loss``            a number, or null where it is not finite
``loss_hex``        the same as ``float.hex`` writes it: without it nothing is said about its bits
``grad_norm``       the gradient norm; may be left out
``grad_norm_hex``   the same as ``float.hex`` writes it
==================  ================================================================================

A line with ``parameter_hash`` names the parameters at the end; other lines and keys are free. It is
what ``python -m trainer --log`` writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.errors import CorruptError, IncompleteError


@dataclass(frozen=True, slots=True)
class Number:
    """A value of a log; ``exact`` where it was written as hex, which no decimals have rounded."""

    value: float
    exact: bool

    def hex(self) -> str | None:
        """As the log has it; None where it has decimals only."""
        return self.value.hex() if self.exact else None


@dataclass(frozen=True, slots=True)
class Point:
    """One step of a run."""

    step: int
    loss: Number
    grad_norm: Number | None = None  # None: not in the log

    def to_json(self) -> dict[str, Any]:
        """As the log has it; numbers that are not finite are null, as there."""
        norm = self.grad_norm
        return {
            "step": self.step,
            "loss": _finite(self.loss),
            "loss_hex": self.loss.hex(),
            "grad_norm": _finite(norm),
            "grad_norm_hex": norm.hex() if norm else None,
        }


@dataclass(frozen=True, slots=True)
class Series:
    """The steps of a run, in order, and what its parameters were in the end."""

    points: tuple[Point, ...]
    parameter_hash: str | None = None

    def between(self, after: int, until: int) -> Series:
        """The steps in ``(after, until]``; the final parameters only where that was the end."""
        points = tuple(p for p in self.points if after < p.step <= until)
        ended = self.points[-1].step == until
        return Series(points, self.parameter_hash if ended else None)


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two series of numbers are apart.

    Args:
        max_rel: the largest difference, relative to the larger of the two; infinite where one of
            them alone is finite.
        at: the step of that.
        not_finite: steps at which neither is finite, which no number tells apart.
        equal: every pair has the same bits; ``exact``: both were written as hex at every step.
    """

    max_rel: float
    at: int
    not_finite: tuple[int, ...]
    equal: bool
    exact: bool

    def to_json(self) -> dict[str, Any]:
        """A distance that has no number is null."""
        return {
            "max_rel": self.max_rel if math.isfinite(self.max_rel) else None,
            "at": self.at,
            "not_finite": list(self.not_finite),
            "bitwise": self.equal and self.exact,
        }


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What two logs show of each other; a part that one of them lacks is None.

    Args:
        steps: those in both logs.
        alone: those in one of them.
        parameters: whether the final parameters have the same hash.
    """

    steps: tuple[int, ...]
    alone: tuple[int, ...]
    loss: Distance
    grad_norm: Distance | None
    parameters: bool | None

    def within(self, rtol: float) -> bool:
        """Whether both logged the same steps, with finite losses as near as that."""
        return not (self.alone or self.loss.not_finite) and self.loss.max_rel <= rtol

    @property
    def bitwise(self) -> bool:
        """Whether every loss is known to have the same bits, and nothing else that is seen differs.

        Gradient norms and final parameters deny it where both logs have them.
        """
        denied = self.parameters is False or (self.grad_norm and not self.grad_norm.equal)
        return self.within(0.0) and self.loss.exact and self.loss.equal and not denied

    def to_json(self) -> dict[str, Any]:
        """Everything that was compared."""
        return {
            "steps": list(self.steps),
            "alone": list(self.alone),
            "loss": self.loss.to_json(),
            "grad_norm": self.grad_norm.to_json() if self.grad_norm else None,
            "parameters_equal": self.parameters,
        }


def read(path: Path) -> Series:
    """The steps of a log.

    Raises:
        IncompleteError: there is none, or it holds no step.
        CorruptError: a line is no JSON object, a number none, or steps are not in order.
    """
    if not path.is_file():
        raise IncompleteError(path, "the program wrote no log", _FORMAT)
    points: list[Point] = []
    parameter_hash = None
    for where, line in _lines(path):
        if "step" in line and "loss" in line:
            points.append(_point(where, line))
            if len(points) > 1 and points[-1].step <= points[-2].step:
                raise CorruptError(
                    where,
                    f"is of step {points[-1].step}, after one of step {points[-2].step}",
                    "let one rank write the log, into a new file",
                )
        if line.get("parameter_hash") is not None:
            parameter_hash = str(line["parameter_hash"])
    if not points:
        raise IncompleteError(path, "holds no line with step and loss", _FORMAT)
    return Series(tuple(points), parameter_hash)


def compare(unbroken: Series, resumed: Series) -> Trajectory:
    """What two runs have in common.

    Raises:
        IncompleteError: no step is in both.
    """
    one, two = ({p.step: p for p in each.points} for each in (unbroken, resumed))
    steps = sorted(one.keys() & two.keys())
    if not steps:
        raise IncompleteError(
            "the logs",
            f"have no step in common: {_span(one)} of the unbroken run, {_span(two)} of the"
            " resumed one",
            "log the number of steps done, those before the checkpoint included",
        )
    pairs = {step: (one[step].loss, two[step].loss) for step in steps}
    norms = {step: (one[step].grad_norm, two[step].grad_norm) for step in steps}
    seen = {step: (a, b) for step, (a, b) in norms.items() if a is not None and b is not None}
    hashes = (unbroken.parameter_hash, resumed.parameter_hash)
    return Trajectory(
        steps=tuple(steps),
        alone=tuple(sorted(one.keys() ^ two.keys())),
        loss=_distance(pairs),
        grad_norm=_distance(seen) if seen else None,
        parameters=None if None in hashes else hashes[0] == hashes[1],
    )


def relative(a: float, b: float) -> float:
    """How far two numbers are apart, relative to the larger; NaN where neither is finite."""
    finite = math.isfinite(a) + math.isfinite(b)
    if finite < 2:
        return math.nan if not finite else math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


_FORMAT = 'expected a JSON line a step: {"step": 5, "loss": 4.5, "loss_hex": "0x1.2p+2", ...}'


def _distance(pairs: Mapping[int, tuple[Number, Number]]) -> Distance:
    apart = {step: relative(a.value, b.value) for step, (a, b) in pairs.items()}
    known = {step: far for step, far in apart.items() if not math.isnan(far)}
    at = max(known, key=lambda step: known[step]) if known else min(apart)
    return Distance(
        max_rel=known.get(at, 0.0),
        at=at,
        not_finite=tuple(step for step, far in apart.items() if math.isnan(far)),
        equal=all(a.value.hex() == b.value.hex() for a, b in pairs.values()),
        exact=all(a.exact and b.exact for a, b in pairs.values()),
    )


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line stands, and what it says."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CorruptError(path, f"is no text: {error}", _FORMAT) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise CorruptError(where, f"is no JSON: {error}", _FORMAT) from error
        if not isinstance(value, dict):
            raise CorruptError(where, "is no JSON object", _FORMAT)
        yield where, value


def _point(where: str, line: Mapping[str, Any]) -> Point:
    step = line["step"]
    if type(step) is not int:
        raise CorruptError(where, f"step is {step!r}, expected a whole number", _FORMAT)
    loss = _number(where, line, "loss")
    return Point(step, loss, _number(where, line, "grad_norm") if "grad_norm" in line else None)


def _number(where: str, line: Mapping[str, Any], name: str) -> Number:
    """A number of a line, from its hex where it has that.

    Raises:
        CorruptError: it is none.
    """
    value, text = line[name], line.get(f"{name}_hex")
    if text is not None:
        try:
            return Number(float.fromhex(text), exact=True)
        except (TypeError, ValueError) as error:
            raise CorruptError(where, f"{name}_hex is {text!r}, no hex float", _FORMAT) from error
    if value is None:
        return Number(math.nan, exact=False)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CorruptError(where, f"{name} is {value!r}, expected a number", _FORMAT)
    return Number(float(value), exact=False)


def _finite(number: Number | None) -> float | None:
    return number.value if number and math.isfinite(number.value) else None


def _span(points: Mapping[int, Any]) -> str:
    return f"steps {min(points)} to {max(points)}" if points else "none"
