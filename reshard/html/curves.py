"""Series of numbers drawn over each other: losses of runs, or changes of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from reshard.errors import UsageError

Values = Sequence[float | None]
_MEASURES = {"loss": "Loss", "grad_norm": "Gradient norm"}


@dataclass(frozen=True, slots=True)
class LossRun:
    """One run: its steps in ascending order, and one value per step of each measure."""

    name: str
    steps: Sequence[int]
    measures: Mapping[str, Values]


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between a run and the baseline in one measure, over the steps of both.

    Args:
        steps: number of steps that both runs have.
        equal: number of those steps at which both have the same value, or both have none.
        largest, at: the largest absolute difference, and the step at which it occurs.
        relative: the largest difference relative to the baseline's value.
        first: the first step at which the values differ.
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
    """Several runs, one of which can be the baseline for the others.

    Args:
        baseline: the number of the run that the others should equal; None if there is none.
        labels: measure -> its title.
    """

    runs: tuple[LossRun, ...]
    baseline: int | None = 0
    labels: Mapping[str, str] = field(default_factory=lambda: _MEASURES)

    @classmethod
    def of(cls, series: Sequence[Mapping[str, Any]]) -> Curves:
        """Build curves from a list: ``[{name, steps: [...], loss: [...], grad_norm: [...]}]``.

        The first run is the baseline.

        Raises:
            UsageError: a run does not have one value per step.
        """
        runs = tuple(
            LossRun(
                str(run["name"]),
                list(run["steps"]),
                {key: list(run[key]) for key in _MEASURES if run.get(key)},
            )
            for run in series
        )
        for run in runs:
            for key, values in run.measures.items():
                if len(values) != len(run.steps):
                    mismatch = f"{len(values)} values of {key} for {len(run.steps)} steps"
                    raise UsageError(run.name, f"has {mismatch}")
        return cls(runs)

    def differences(self) -> Iterator[Difference]:
        """Yield the differences of every other run from the baseline, in each shared measure."""
        if self.baseline is None:
            return
        base = self.runs[self.baseline]
        for run in self.runs:
            for key in _MEASURES:
                if run is not base and key in run.measures and key in base.measures:
                    yield _measure_difference(base, run, key)

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page; values that are not finite become null."""
        return {
            "baseline": self.baseline,
            "measures": [
                [key, label]
                for key, label in self.labels.items()
                if any(key in run.measures for run in self.runs)
            ],
            "runs": [
                {
                    "name": run.name,
                    "steps": list(run.steps),
                    **{
                        key: [_drop_not_finite(v) for v in values]
                        for key, values in run.measures.items()
                    },
                }
                for run in self.runs
            ],
        }


def _drop_not_finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _measure_difference(base: LossRun, run: LossRun, key: str) -> Difference:
    expected = dict(zip(base.steps, base.measures[key], strict=True))
    both = [
        (step, value, expected[step])
        for step, value in zip(run.steps, run.measures[key], strict=True)
        if step in expected
    ]
    unequal = [point for point in both if not _is_same(point[1], point[2])]
    measured = [
        (abs(a - b), step, abs(b))
        for step, a, b in unequal
        if a is not None and b is not None and isfinite(a) and isfinite(b)
    ]
    largest, at, _ = max(measured, default=(0.0, None, 0.0), key=lambda item: item[0])
    return Difference(
        run.name,
        _MEASURES[key].lower(),
        steps=len(both),
        equal=len(both) - len(unequal),
        largest=largest,
        at=at,
        relative=max((distance / size for distance, _, size in measured if size), default=0.0),
        first=unequal[0][0] if unequal else None,
    )


def _is_same(a: float | None, b: float | None) -> bool:
    """Return whether two values are the same number; NaN equals NaN."""
    return a == b or (a is not None and b is not None and a != a and b != b)  # noqa: PLR0124
