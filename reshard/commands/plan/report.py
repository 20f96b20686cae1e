"""The report of a plan, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from reshard import units
from reshard.commands.forecast import Forecast
from reshard.commands.lines import Report, format_row, format_table, make_printable
from reshard.sizing import sources
from reshard.sizing.model import ModelSizes
from reshard.sizing.setup import Cluster, Training
from reshard.sizing.strategies import MARGIN, StrategyForecast
from reshard.sizing.strategy_choice import Advice, Choice


@dataclass(kw_only=True, repr=False)
class PlanReport(Report):
    """The result of `plan`."""

    model: ModelSizes
    cluster: Cluster
    training: Training
    rows: list[StrategyForecast]
    choice: Choice
    micro_batch: int  # the largest that fits with the chosen strategy
    advice: list[Advice]
    next_steps: list[str] = field(default_factory=list)
    split: Forecast | None = None  # what the split of a source would need
    notes: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # those that differ from the defaults
    written: str = ""

    @property
    def exit_code(self) -> int:
        """0 if the chosen strategy fits, else 1."""
        return 0 if self.choice.fits else 1

    def to_dict(self) -> dict[str, Any]:
        """Return one document with a stable schema; sizes are in bytes."""
        return {
            "schema": 1,
            "command": "plan",
            "options": self.options,
            "model": {
                "source": self.model.source,
                "counted_by": self.model.counted_by,
                "parameters": self.model.numel,
                "largest_layer": self.model.largest_block,
                "layers": len(self.model.blocks),
            },
            "cluster": asdict(self.cluster),
            "training": asdict(self.training),
            "rows": [self._row_to_json(row) for row in self.rows],
            "recommended": {
                "strategy": self.choice.row.strategy.name,
                "activation_checkpointing": self.choice.checkpointing,
                "fits": self.choice.fits,
                "reason": self.choice.reason,
                "needs": {
                    "gpu": self.choice.row.count_total(checkpointing=self.choice.checkpointing),
                    "host": self.choice.row.host,
                    "disk": self.choice.row.disk,
                },
                "largest_micro_batch": self.micro_batch,
            },
            "advice": [asdict(advice) for advice in self.advice],
            "next_steps": self.next_steps,
            "split": None if self.split is None else asdict(self.split),
            "notes": self.notes,
            "written": self.written,
        }

    def _row_to_json(self, row: StrategyForecast) -> dict[str, Any]:
        sizes = asdict(row)
        sizes["strategy"] = row.strategy.name
        return {
            **sizes,
            "states": row.states,
            "total": row.count_total(checkpointing=False),
            "total_with_checkpointing": row.count_total(checkpointing=True),
            "fits": row.fits(self.cluster, checkpointing=False),
            "fits_with_checkpointing": row.fits(self.cluster, checkpointing=True),
            "lacks": row.list_lacks(self.cluster, checkpointing=True),
        }

    def __repr__(self) -> str:
        return f"<PlanReport: {make_printable(self.choice.reason)}>"

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        training, cluster = self.training, self.cluster
        yield format_row("model", f"{self.model.source}: {sources.describe_count(self.model)}")
        gpus = units.counted(cluster.world, "GPU")
        yield format_row("cluster", f"{gpus} of {units.show_bytes(cluster.gpu_bytes)}")
        axes = ", ".join(f"{a} {n}" for a in ("tp", "pp", "ep") if (n := getattr(training, a)) > 1)
        yield format_row(
            "training",
            f"{training.precision}, {training.optimizer}, {training.seq_len} tokens x micro batch"
            f" {training.micro_batch}{', ' if axes else ''}{axes}",
        )
        yield from format_table([_HEADERS, *(_format_cells(row, cluster) for row in self.rows)])
        yield format_row(self.choice.word, self.choice.outcome)
        for label, need in zip_longest(("needs",), self.choice.needs, fillvalue=""):
            yield format_row(label, need)
        yield from _describe_total(self.choice)
        if self.choice.fits and self.micro_batch > training.micro_batch:
            yield format_row("batch", f"a micro batch of {self.micro_batch} still fits")
        for line in self.next_steps:
            yield format_row("next", line)
        if not self.choice.fits:
            for advice in self.advice:
                yield format_row("saves", f"{units.show_bytes(advice.saved):>8}  {advice.what}")
        for note in self.notes:
            yield format_row("note", note)
        if self.written:
            yield format_row("wrote", self.written)


_HEADERS = ("GB per GPU", *"states total total+ckpt host disk sent fits".split())
_STATES = "parameters gradients masters moments"
_BACKWARD = "gathered buckets logits activations"


def _format_cells(row: StrategyForecast, cluster: Cluster) -> list[str]:
    totals = [row.count_total(checkpointing=checkpointing) for checkpointing in (False, True)]
    sizes = [row.states, *totals, row.host, row.disk, row.sent]
    return [row.strategy.name, *map(_format_size, sizes), _describe_fit(row, cluster)]


def _describe_total(choice: Choice) -> Iterator[str]:
    row, checkpointing = choice.row, choice.checkpointing
    backward = row.count_backward(checkpointing=checkpointing)
    sizes = asdict(row) | ({"activations": row.recomputed} if checkpointing else {})

    def join(names: str) -> str:
        return ", ".join(f"{n} {_format_size(sizes[n])}" for n in names.split() if sizes[n])

    if row.states:
        yield format_row("states", f"{_format_size(row.states)} GB: {join(_STATES)}")
    if backward >= row.step:
        yield format_row("backward", f"{_format_size(backward)} GB: {join(_BACKWARD)}")
    else:
        text = "float32 copies of gradients, more than backward needs"
        yield format_row("step", f"{_format_size(row.step)} GB: {text}")
    text = f"{MARGIN:.0%} of the GPU for CUDA, NCCL and fragmentation"
    yield format_row("margin", f"{_format_size(row.margin)} GB: {text}")


def _format_size(nbytes: int) -> str:
    """Return gigabytes with three digits, or two below 1.

    >>> _format_size(112_000_000_000), _format_size(1_940_000_000), _format_size(0)
    ('112', '1.94', '-')
    >>> _format_size(10**13), _format_size(25_000)
    ('10000', '<0.001')
    >>> _format_size(848_000_000)
    '0.85'
    """
    if not nbytes:
        return "-"
    if nbytes < 1e6:
        return "<0.001"
    if nbytes < 1e9:
        return f"{nbytes / 1e9:.2g}"
    return f"{nbytes / 1e9:.0f}" if nbytes >= 1e12 else f"{nbytes / 1e9:.3g}"


def _describe_fit(row: StrategyForecast, cluster: Cluster) -> str:
    if row.fits(cluster, checkpointing=False):
        return "yes"
    if row.fits(cluster, checkpointing=True):
        return "with ckpt"
    lacks = row.list_lacks(cluster, checkpointing=True)
    return f"no: {lacks[0] if len(lacks) == 1 else 'both'}"
