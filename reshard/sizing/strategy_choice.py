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
    BUCKET_ELEMENTS,
    LIVE_ELEMENTS,
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
    """

    row: StrategyForecast
    checkpointing: bool
    fits: bool
    reason: str


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
                    reason = _explain(row, rows, cluster, checkpointing=checkpointing)
                    return Choice(row, checkpointing, fits=True, reason=reason)
    least = min(rows, key=lambda row: _measure_excess(row, cluster))
    reason = (
        f"no strategy fits: {least.strategy.name} with activation checkpointing comes closest, it"
        f" needs {_describe_need(least, cluster, checkpointing=True)}"
    )
    return Choice(least, True, fits=False, reason=reason)


def _measure_excess(row: StrategyForecast, cluster: Cluster) -> float:
    """Return the largest ratio of what a row needs to what there is, on a GPU and on a host."""
    host = row.host / cluster.host_bytes if cluster.host_bytes else 0.0
    return max(row.count_total(checkpointing=True) / cluster.gpu_bytes, host)


def _describe_need(row: StrategyForecast, cluster: Cluster, *, checkpointing: bool) -> str:
    total = units.show_bytes(row.count_total(checkpointing=checkpointing))
    text = f"{total} of {units.show_bytes(cluster.gpu_bytes)}"
    if cluster.host_bytes is None or not row.host:
        return text
    host = f"{units.show_bytes(row.host)} of {units.show_bytes(cluster.host_bytes)}"
    return f"{text} on a GPU and {host} on a host"


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
        strategy = next(each for each in STRATEGIES if each.name == name)
        raise UsageError(
            f"--strategy {name}",
            "needs several nodes, each with more than one data-parallel rank"
            if strategy.within_node
            else "cannot be combined with pipeline stages (--pp)",
            f"choose {units.either([row.strategy.name for row in rows])}",
        )
    plain = row.fits(cluster, checkpointing=False)
    fits = plain or row.fits(cluster, checkpointing=True)
    need = _describe_need(row, cluster, checkpointing=not plain)
    reason = f"chosen with --strategy; it needs {need}"
    return Choice(row, not plain, fits=fits, reason=reason)


def _explain(
    row: StrategyForecast,
    rows: Sequence[StrategyForecast],
    cluster: Cluster,
    *,
    checkpointing: bool,
) -> str:
    need = _describe_need(row, cluster, checkpointing=checkpointing)
    how = "with" if checkpointing else "without"
    text = (
        f"{row.strategy.name} is the first that fits, {how} activation checkpointing: it needs"
        f" {need}"
    )
    earlier = rows[: rows.index(row)]
    if earlier and not checkpointing and not row.strategy.offload_optimizer:
        needs = ", ".join(
            f"{each.strategy.name} {units.show_bytes(each.count_total(checkpointing=False))}"
            for each in earlier
        )
        text += f" ({needs})"
    return text


def advise(model: ModelSizes, cluster: Cluster, training: Training, choice: Choice) -> list[Advice]:
    """Return ways to save memory, those that cost the least speed first; each saves by itself."""
    return [each for each in _list_advice(model, cluster, training, choice) if each.saved > 0]


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
    share, tried = take_share(model, training), False
    for each in STRATEGIES:
        tried = tried or each == strategy
        if tried and each != strategy and each.stage >= strategy.stage:
            other = forecast_one(each, model, share, cluster, training)
            yield Advice(f"use {each.name}", count_saved(other))
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
            count_saved(forecast_one(strategy, model, share, doubled, chosen)),
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
        f"shrink reduce_bucket_size from {BUCKET_ELEMENTS:,} to {_SMALL_BUCKET:,}",
        count_saved(small),
    )
    if strategy.stage == 3:
        less = replace(row, gathered=min(row.gathered, size * _SMALL_LIVE))
        yield Advice(
            f"shrink stage3_max_live_parameters from {LIVE_ELEMENTS:,} to {_SMALL_LIVE:,}",
            count_saved(less),
        )
