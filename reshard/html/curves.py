"""Losses of runs that should be the same, laid over each other, and how far they are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from reshard.errors import UsageError

Values = Sequence[float | None]
_MEASURES = {"loss": "Loss", "grad_norm": "Gradient norm"}


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its steps in ascending order, and a value a step of each measure."""

    name: str
    steps: Sequence[int]
    measures: Mapping[str, Values]


@dataclass(frozen=True, slots=True)
class Apart:
    """How far a run is from the baseline in one measure, over the steps that both have.

    Args:
        steps: how many they have in common.
        equal: at how many of them both have the same number (or none).
        largest, at: the largest absolute difference, and the step of it.
        relative: the largest difference relative to the baseline's value.
        first: the first step at which they differ.
    """

    run: str
    measure: str
    steps: int
    equal: int
    largest: float = 0.0
    at: int | None = None
    relative: float = 0.0
    first: int | None = None


@dataclass(frozen=True, slots=True)
class Curves:
    """Runs, one of which the others are measured against."""

    runs: tuple[Run, ...]
    baseline: int = 0

    @classmethod
    def of(cls, series: Sequence[Mapping[str, Any]], baseline: int = 0) -> Curves:
        """From plain values: ``[{name, steps: [...], loss: [...], grad_norm: [...]}]``.

        Raises:
            UsageError: a run has not one value a step, or there is no such baseline.
        """
        runs = tuple(
            Run(
                str(each["name"]),
                list(each["steps"]),
                {key: list(each[key]) for key in _MEASURES if each.get(key)},
            )
            for each in series
        )
        for run in runs:
            for key, values in run.measures.items():
                if len(values) != len(run.steps):
                    found = f"{len(values)} values of {key} for {len(run.steps)} steps"
                    raise UsageError(run.name, f"has {found}")
        if not 0 <= baseline < len(runs):
            raise UsageError(f"baseline {baseline}", f"is none of {len(runs)} runs")
        return cls(runs, baseline)

    def apart(self) -> Iterator[Apart]:
        """Every other run against the baseline, in each measure that both have."""
        base = self.runs[self.baseline]
        for run in self.runs:
            for key in _MEASURES:
                if run is not base and key in run.measures and key in base.measures:
                    yield _apart(base, run, key)

    def to_json(self) -> dict[str, Any]:
        """The data of the page; what is not finite is null, which no line is drawn through."""
        return {
            "baseline": self.baseline,
            "measures": [
                [key, label]
                for key, label in _MEASURES.items()
                if any(key in run.measures for run in self.runs)
            ],
            "runs": [
                {
                    "name": run.name,
                    "steps": list(run.steps),
                    **{key: [_finite(v) for v in values] for key, values in run.measures.items()},
                }
                for run in self.runs
            ],
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _apart(base: Run, run: Run, key: str) -> Apart:
    wanted = dict(zip(base.steps, base.measures[key], strict=True))
    both = [
        (step, value, wanted[step])
        for step, value in zip(run.steps, run.measures[key], strict=True)
        if step in wanted
    ]
    unequal = [each for each in both if not _same(each[1], each[2])]
    measured = [
        (abs(a - b), step, abs(b))
        for step, a, b in unequal
        if a is not None and b is not None and isfinite(a) and isfinite(b)
    ]
    largest, at, _ = max(measured, default=(0.0, None, 0.0), key=lambda each: each[0])
    return Apart(
        run.name,
        _MEASURES[key].lower(),
        steps=len(both),
        equal=len(both) - len(unequal),
        largest=largest,
        at=at,
        relative=max((apart / size for apart, _, size in measured if size), default=0.0),
        first=unequal[0][0] if unequal else None,
    )


def _same(a: float | None, b: float | None) -> bool:
    """The same number; NaN is like NaN."""
    return a == b or (a is not None and b is not None and a != a and b != b)  # noqa: PLR0124
