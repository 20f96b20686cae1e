"""The order in which checkpoints are summed, and the factor of each in the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from reshard.errors import UsageError
from reshard.units import abridge

_TOLERANCE = Fraction(1, 10**9)  # of the sum of the factors; a float32 has 24 bits, about 6e-8
WEIGHTS, EMA = "--weights", "--ema"


@dataclass(frozen=True, slots=True)
class SourceStep:
    """A checkpoint of the average, and the step that its files state; None if they state none."""

    path: str
    step: int | None


def find_order(sources: Sequence[SourceStep]) -> list[int]:
    """Return the positions of the checkpoints in the order of the sum.

    Floating-point sums depend on their order. This one does not depend on the order in which the
    user names the checkpoints: the first are those without a step, then the others by step.
    """
    unknown = -1  # before every known step

    def place(number: int) -> tuple[int, str]:
        source = sources[number]
        return unknown if source.step is None else source.step, source.path

    return sorted(range(len(sources)), key=place)


def parse_weights(given: str | Sequence[float], count: int) -> list[Fraction]:
    """Return the user's weights, such as ``0.2,0.3,0.5`` or ``1/3,1/3,1/3``.

    >>> [str(weight) for weight in parse_weights("1/4,0.75", 2)]
    ['1/4', '3/4']

    Args:
        count: the number of checkpoints.

    Raises:
        UsageError: there are not ``count`` numbers, or their sum is not 1.
    """
    texts = given.split(",") if isinstance(given, str) else list(given)
    shown = given if isinstance(given, str) else ",".join(map(str, texts))
    try:
        weights = [Fraction(text) for text in texts]
        float(sum(map(abs, weights), Fraction(0)))  # larger numbers than a float are no factors
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        raise UsageError(
            f"{WEIGHTS} {shown}", "expected numbers separated by commas", "write 0.2,0.3,0.5"
        ) from error
    if len(weights) != count:
        raise UsageError(
            f"{WEIGHTS} {shown}",
            f"has {len(weights)} weights for {count} checkpoints",
            "give one weight for each checkpoint, in the same order",
        )
    _check_sum(weights, shown)
    return weights


def _check_sum(weights: Sequence[Fraction], shown: str) -> None:
    total = sum(weights, Fraction(0))
    if abs(total - 1) <= _TOLERANCE:
        return
    remedy = "give weights with the sum 1"
    if total:
        remedy = (
            f"for the same proportions, pass {','.join(str(weight / total) for weight in weights)}"
        )
    raise UsageError(f"{WEIGHTS} {shown}", f"the sum is {float(total):.10g}, expected 1", remedy)


def compute_ema(decay: float, sources: Sequence[SourceStep]) -> list[Fraction]:
    """Return the weights of an exponential moving average over checkpoints in order of steps.

    The average begins with the first checkpoint. Each later one moves it: ``average = decay *
    average + (1 - decay) * checkpoint``.

    Args:
        decay: between 0 and 1.
        sources: the checkpoints in any order; the weights have the same order.

    Raises:
        UsageError: the step of a checkpoint is not known, or two have the same one.
    """
    unknown = [source.path for source in sources if source.step is None]
    if unknown:
        raise UsageError(
            f"{EMA} {decay:g}",
            f"needs the order of the checkpoints, but no file states the step of"
            f" {abridge(unknown)}",
            f"pass the factors: {WEIGHTS}",
        )
    order = find_order(sources)
    for before, after in pairwise(order):
        if sources[before].step == sources[after].step:
            raise UsageError(
                f"{EMA} {decay:g}",
                f"{sources[before].path} and {sources[after].path} are both of step"
                f" {sources[after].step}, so their order is not known",
                f"leave out one of them, or pass the factors: {WEIGHTS}",
            )
    # By its text, 0.9 is exactly 9/10; `Fraction(0.9)` is the nearest binary number.
    kept = Fraction(str(decay))
    weights = [Fraction(0)] * len(sources)
    for place, number in enumerate(order):
        later = len(order) - 1 - place
        weights[number] = kept**later * (1 - kept if place else 1)
    return weights
