"""Comparison of two runs step by step, from their logs.

Each line of a log is a JSON object. A line with ``step`` and ``loss`` is an optimizer step:

==================  ================================================================================
``step``            number of steps done, this one and those before the checkpoint included
``loss``            a number, or null if it is not finite
``loss_hex``        the loss as written by ``float.hex``; without it bits cannot be compared
``grad_norm``       the gradient norm; optional
``grad_norm_hex``   the gradient norm as written by ``float.hex``; optional
==================  ================================================================================

A line with ``parameter_hash`` identifies the final parameters; other lines and keys are ignored.
``python -m trainer --step-log`` writes this format.
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
    """A number from a log; ``exact`` if it was logged as hex, so that it was not rounded."""

    value: float
    exact: bool

    def hex(self) -> str | None:
        """Return the number as hex; None if the log has only decimals."""
        return self.value.hex() if self.exact else None


@dataclass(frozen=True, slots=True)
class Point:
    """One step of a run."""

    step: int
    loss: Number
    grad_norm: Number | None = None  # None: not in the log

    def to_dict(self) -> dict[str, Any]:
        """Return the step as in the log; numbers that are not finite are null."""
        norm = self.grad_norm
        return {
            "step": self.step,
            "loss": _finite_or_none(self.loss),
            "loss_hex": self.loss.hex(),
            "grad_norm": _finite_or_none(norm),
            "grad_norm_hex": norm.hex() if norm else None,
        }


@dataclass(frozen=True, slots=True)
class Series:
    """The steps of a run, in order, and the hash of its final parameters."""

    points: tuple[Point, ...]
    parameter_hash: str | None = None

    def between(self, after: int, until: int) -> Series:
        """Return the steps in ``(after, until]``; the hash is kept only if the run ended there."""
        points = tuple(p for p in self.points if after < p.step <= until)
        ended = self.points[-1].step == until
        return Series(points, self.parameter_hash if ended else None)


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between two series of numbers.

    Args:
        max_rel: the largest difference, relative to the larger of the two; infinite if only one of
            them is finite.
        at: the step of the largest difference.
        not_finite: steps at which neither number is finite, so that they cannot be compared.
        equal: whether every pair has the same bits.
        exact: whether both series were logged as hex at every step.
    """

    max_rel: float
    at: int
    not_finite: tuple[int, ...]
    equal: bool
    exact: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; an infinite distance is null."""
        return {
            "max_rel": self.max_rel if math.isfinite(self.max_rel) else None,
            "at": self.at,
            "not_finite": list(self.not_finite),
            "bitwise": self.equal and self.exact,
        }


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The comparison of two logs; a part that one of them lacks is None.

    Args:
        steps: steps in both logs.
        alone: steps in only one of them.
        loss, grad_norm: distances of the losses and of the gradient norms.
        parameters: whether the final parameters have the same hash.
    """

    steps: tuple[int, ...]
    alone: tuple[int, ...]
    loss: Distance
    grad_norm: Distance | None
    parameters: bool | None

    def is_within(self, rtol: float) -> bool:
        """Return whether both logged the same steps, with finite losses within ``rtol``."""
        return not (self.alone or self.loss.not_finite) and self.loss.max_rel <= rtol

    @property
    def bitwise(self) -> bool:
        """Whether every loss is known to have the same bits, and nothing else in the logs differs.

        Gradient norms and final parameters count if both logs have them.
        """
        denied = self.parameters is False or (self.grad_norm and not self.grad_norm.equal)
        return self.is_within(0.0) and self.loss.exact and self.loss.equal and not denied

    def to_dict(self) -> dict[str, Any]:
        """Return everything that was compared."""
        return {
            "steps": list(self.steps),
            "alone": list(self.alone),
            "loss": self.loss.to_dict(),
            "grad_norm": self.grad_norm.to_dict() if self.grad_norm else None,
            "parameters_equal": self.parameters,
        }


def read(path: Path) -> Series:
    """Read the steps of a log.

    Raises:
        IncompleteError: the log does not exist, or has no step.
        CorruptError: a line is not a JSON object, a value is not a number, or steps are not in
            order.
    """
    if not path.is_file():
        raise IncompleteError(path, "the program wrote no log", _FORMAT)
    points: list[Point] = []
    parameter_hash = None
    for where, line in _read_lines(path):
        if "step" in line and "loss" in line:
            points.append(_parse_point(where, line))
            if len(points) > 1 and points[-1].step <= points[-2].step:
                raise CorruptError(
                    where,
                    f"has step {points[-1].step} after a line with step {points[-2].step}",
                    "let only one rank write the log, and write it to a new file",
                )
        if line.get("parameter_hash") is not None:
            parameter_hash = str(line["parameter_hash"])
    if not points:
        raise IncompleteError(path, "has no line with step and loss", _FORMAT)
    return Series(tuple(points), parameter_hash)


def count_steps(path: Path) -> int:
    """Return the number of steps in the log of a run that may still be writing it.

    Lines that `read` would reject are not counted, among them the last one if it is incomplete.
    """
    return sum(map(_has_step, path.read_bytes().splitlines())) if path.is_file() else 0


def _has_step(line: bytes) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # incomplete, not JSON, or not UTF-8
        return False
    return isinstance(value, dict) and "step" in value and "loss" in value


_NOISE = {4: 1e-6, 2: 1e-4}  # bytes of an element -> what other orders of sums are known to do
_FACTOR = 8.0  # between the noise of a rounded copy and that of other ranks
MOST = 1e-2


def choose_tolerance(noise: Distance | None, itemsize: int) -> float:
    """Return the tolerance of losses at other ranks, from the noise that was measured.

    Args:
        noise: the distance of two undamaged continuations, one with its weights rounded; None if it
            was not measured.
        itemsize: of the dtype in which the model was trained. Autocast is not known, and measured.
    """
    floor = _NOISE.get(min(itemsize, 4), max(_NOISE.values()))
    return min(max(floor, _FACTOR * noise.max_rel if noise else floor), MOST)


def compare(unbroken: Series, resumed: Series) -> Trajectory:
    """Compare two runs at the steps that both logged.

    Raises:
        IncompleteError: the logs have no step in common.
    """
    one, two = ({p.step: p for p in series.points} for series in (unbroken, resumed))
    steps = sorted(one.keys() & two.keys())
    if not steps:
        raise IncompleteError(
            "the logs",
            f"no step is in both logs: the unbroken run logged {_describe_steps(one)}, the resumed"
            f" run {_describe_steps(two)}",
            "log the total number of steps, including those before the checkpoint",
        )
    pairs = {step: (one[step].loss, two[step].loss) for step in steps}
    norms = {step: (one[step].grad_norm, two[step].grad_norm) for step in steps}
    seen = {step: (a, b) for step, (a, b) in norms.items() if a is not None and b is not None}
    hashes = (unbroken.parameter_hash, resumed.parameter_hash)
    return Trajectory(
        steps=tuple(steps),
        alone=tuple(sorted(one.keys() ^ two.keys())),
        loss=_measure_distance(pairs),
        grad_norm=_measure_distance(seen) if seen else None,
        parameters=None if None in hashes else hashes[0] == hashes[1],
    )


def _compute_relative_difference(a: float, b: float) -> float:
    """Return ``|a - b|`` relative to the larger of the two; NaN if neither is finite."""
    finite = math.isfinite(a) + math.isfinite(b)
    if finite < 2:
        return math.nan if not finite else math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


_FORMAT = 'expected one JSON line per step: {"step": 5, "loss": 4.5, "loss_hex": "0x1.2p+2", ...}'


def _measure_distance(pairs: Mapping[int, tuple[Number, Number]]) -> Distance:
    apart = {step: _compute_relative_difference(a.value, b.value) for step, (a, b) in pairs.items()}
    known = {step: far for step, far in apart.items() if not math.isnan(far)}
    at = max(known, key=lambda step: known[step]) if known else min(apart)
    return Distance(
        max_rel=known.get(at, 0.0),
        at=at,
        not_finite=tuple(step for step, far in apart.items() if math.isnan(far)),
        equal=all(a.value.hex() == b.value.hex() for a, b in pairs.values()),
        exact=all(a.exact and b.exact for a, b in pairs.values()),
    )


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CorruptError(path, f"is not UTF-8 text: {error}", _FORMAT) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorruptError(where, f"is not JSON: {error}", _FORMAT) from error
        if not isinstance(value, dict):
            raise CorruptError(where, "is not a JSON object", _FORMAT)
        yield where, value


def _parse_point(where: str, line: Mapping[str, Any]) -> Point:
    step = line["step"]
    if type(step) is not int:  # isinstance would accept a bool
        raise CorruptError(where, f"step is {step!r}, expected a whole number", _FORMAT)
    loss = _parse_number(where, line, "loss")
    return Point(
        step, loss, _parse_number(where, line, "grad_norm") if "grad_norm" in line else None
    )


def _parse_number(where: str, line: Mapping[str, Any], name: str) -> Number:
    value, text = line[name], line.get(f"{name}_hex")
    if text is not None:
        try:
            return Number(float.fromhex(text), exact=True)
        except (TypeError, ValueError, OverflowError) as error:
            raise CorruptError(
                where, f"{name}_hex is {text!r}, not a hex float", _FORMAT
            ) from error
    if value is None:
        return Number(math.nan, exact=False)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CorruptError(where, f"{name} is {value!r}, expected a number", _FORMAT)
    try:
        return Number(float(value), exact=False)
    except OverflowError as error:
        raise CorruptError(where, f"{name} is too large for a float", _FORMAT) from error


def _finite_or_none(number: Number | None) -> float | None:
    return number.value if number and math.isfinite(number.value) else None


def _describe_steps(points: Mapping[int, Any]) -> str:
    return f"steps {min(points)} to {max(points)}" if points else "none"
