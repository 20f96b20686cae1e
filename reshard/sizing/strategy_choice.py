"""Choose a strategy, and find what saves memory if none fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from reshard import units
from reshard.errors import UsageError
from reshard.sizing.model import ModelSizes
from reshard.sizing.rank_share import take_share
from reshard.sizing.setup import Cluster, Training
from reshard.sizing.strategies import (
    STRATEGIES,
    StrategyForecast,
    forecast,
    forecast_one,
)

_SMALL_BUCKET = 20_000_000
_SMALL_LIVE = 100_000_000


@dataclass(frozen=True, slots=True)
class Choice:
    """The recommended row.

    Args:
        checkpointing: whether it needs activation checkpointing.
        word: use, or why not: none fits, or the named one is too small.
        outcome: why it is chosen, and what is too small.
        needs: what it needs of a GPU, of a host if it offloads, and of the disk.
    """

    row: StrategyForecast
    checkpointing: bool
    fits: bool
    word: str
    outcome: str
    needs: tuple[str, ...]

    @property
    def reason(self) -> str:
        """The whole verdict, in one sentence."""
        word = "" if self.fits else f"{self.word}: "
        return f"{word}{self.outcome}; it needs {', '.join(self.needs[:-1])} and {self.needs[-1]}"


@dataclass(frozen=True, slots=True)
class Advice:
    """One way to save memory on a GPU, and the bytes that it saves."""

    what: str
    saved: int


def choose(rows: Sequence[StrategyForecast], cluster: Cluster) -> Choice:
    """Return the first row that fits, in the order of least cost in speed.

    Activation checkpointing repeats a forward pass, a third of the computation; offload moves
    masters and moments to the host and back in every step, which costs more.
    """
    for offloads in (False, True):
        for checkpointing in (False, True):
            for row in rows:
                is_tried = row.strategy.offload_optimizer == offloads
                if is_tried and row.fits(cluster, checkpointing=checkpointing):
                    outcome = f"{row.strategy.name} is the first that fits"
                    if row.host and cluster.host_bytes is None:
                        outcome += f" if a host has {units.show_bytes(row.host)}"
                    return _make_choice(row, cluster, outcome, checkpointing=checkpointing)
    least = min(rows, key=lambda row: _measure_excess(row, cluster))
    outcome = f"{least.strategy.name} comes closest, but {_name_lacks(least, cluster)}"
    return _make_choice(least, cluster, outcome, "none fits", checkpointing=True)


def _make_choice(
    row: StrategyForecast, cluster: Cluster, outcome: str, word: str = "use", *, checkpointing: bool
) -> Choice:
    how = "with" if checkpointing else "without"
    total = units.show_bytes(row.count_total(checkpointing=checkpointing))
    gpu = f"{total} of {units.show_bytes(cluster.gpu_bytes)} on each GPU"
    needs = [f"{gpu} {how} activation checkpointing"]
    if row.host:
        limit = f"{units.show_bytes(cluster.host_bytes)} of " if cluster.host_bytes else ""
        unknown = "" if limit else " (--host-memory compares it)"
        needs.append(f"{units.show_bytes(row.host)} of {limit}host memory on each node{unknown}")
    needs.append(f"{units.show_bytes(row.disk)} of disk for each checkpoint")
    fits = row.fits(cluster, checkpointing=checkpointing)
    return Choice(row, checkpointing, fits, word, outcome, tuple(needs))


def _name_lacks(row: StrategyForecast, cluster: Cluster) -> str:
    return f"lacks {' and '.join(row.list_lacks(cluster, checkpointing=True))} memory"


def _measure_excess(row: StrategyForecast, cluster: Cluster) -> float:
    host = row.host / cluster.host_bytes if cluster.host_bytes else 0.0
    gpu = row.count_total(checkpointing=True) / cluster.gpu_bytes
    return max(gpu - 1, 0.0) + max(host - 1, 0.0)


def find_nodes(model: ModelSizes, cluster: Cluster, training: Training) -> tuple[int, str] | None:
    """Return the number of nodes on which a strategy fits, and the strategy.

    The number is the cluster's times a power of two. The result is None if even 1024 times as many
    nodes do not help, because one sample needs more memory than a GPU has.
    """
    nodes, chosen = cluster.nodes, replace(training, global_batch=0)
    for factor in (1 << n for n in range(11)):
        larger = replace(cluster, nodes=nodes * factor)
        choice = choose(forecast(model, larger, chosen), larger)
        if choice.fits:
            return larger.nodes, choice.row.strategy.name
    return None


def choose_named(rows: Sequence[StrategyForecast], name: str, cluster: Cluster) -> Choice:
    """Return the row that the user names, with activation checkpointing if it needs that.

    Raises:
        UsageError: the strategy is not possible with this cluster and grid.
    """
    row = next((row for row in rows if row.strategy.name == name), None)
    if row is None:
        strategy = next(strategy for strategy in STRATEGIES if strategy.name == name)
        raise UsageError(
            f"--strategy {name}",
            "needs several nodes, each with more than one data-parallel rank"
            if strategy.within_node
            else "cannot be combined with pipeline stages (--pp)",
            f"choose {units.either([row.strategy.name for row in rows])}",
        )
    plain = row.fits(cluster, checkpointing=False)
    if plain or row.fits(cluster, checkpointing=True):
        return _make_choice(row, cluster, f"{name} (--strategy) fits", checkpointing=not plain)
    outcome = f"{name} (--strategy) {_name_lacks(row, cluster)}"
    return _make_choice(row, cluster, outcome, "too small", checkpointing=True)


def advise(model: ModelSizes, cluster: Cluster, training: Training, choice: Choice) -> list[Advice]:
    """Return ways to save memory of a GPU, those that cost the least speed first.

    Each saves by itself. None helps if only the host is too small.
    """
    if choice.row.list_lacks(cluster, checkpointing=choice.checkpointing) == ["host"]:
        return []
    return [advice for advice in _list_advice(model, cluster, training, choice) if advice.saved > 0]


def _list_advice(
    model: ModelSizes, cluster: Cluster, training: Training, choice: Choice
) -> Iterator[Advice]:
    row, strategy = choice.row, choice.row.strategy
    now = row.count_total(checkpointing=choice.checkpointing)

    def count_saved(
        changed: StrategyForecast, *, checkpointing: bool = choice.checkpointing
    ) -> int:
        return now - changed.count_total(checkpointing=checkpointing)

    def forecast_again(chosen: Training) -> StrategyForecast:
        return forecast_one(strategy, model, take_share(model, chosen), cluster, chosen)

    yield Advice(
        "compute the loss in chunks (fused cross entropy)", count_saved(replace(row, logits=0))
    )
    yield from _shrink_buffers(row, training, count_saved)
    if not choice.checkpointing:
        yield Advice("turn on activation checkpointing", count_saved(row, checkpointing=True))
    if training.micro_batch > 1:
        halved = forecast_again(replace(training, micro_batch=training.micro_batch // 2))
        yield Advice("halve the micro batch and double the accumulation", count_saved(halved))
    for other in forecast(model, cluster, training):
        if other.strategy != strategy and other.fits(cluster, checkpointing=choice.checkpointing):
            host = f" and {units.show_bytes(other.host)} of host memory" if other.host else ""
            yield Advice(f"use {other.strategy.name}{host}", count_saved(other))
    if training.seq_len > 1:
        yield Advice(
            "halve the sequence length",
            count_saved(forecast_again(replace(training, seq_len=training.seq_len // 2))),
        )
    if strategy.stage:
        doubled = replace(cluster, nodes=2 * cluster.nodes)
        chosen = replace(training, global_batch=0)
        yield Advice(
            "use twice as many nodes",
            count_saved(
                forecast_one(strategy, model, take_share(model, training), doubled, chosen)
            ),
        )


def _shrink_buffers(
    row: StrategyForecast, training: Training, count_saved: Callable[[StrategyForecast], int]
) -> Iterator[Advice]:
    strategy, size = row.strategy, training.itemsize
    if strategy.framework != "deepspeed":
        return
    factor = size if strategy.stage == 3 else 2 * size
    small = replace(row, buckets=min(row.buckets, factor * _SMALL_BUCKET))
    yield Advice(
        f"lower reduce_bucket_size to {_SMALL_BUCKET:,}",
        count_saved(small),
    )
    if strategy.stage == 3:
        less = replace(row, gathered=min(row.gathered, size * _SMALL_LIVE))
        yield Advice(
            f"lower stage3_max_live_parameters to {_SMALL_LIVE:,}",
            count_saved(less),
        )
