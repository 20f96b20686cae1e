"""The options of ``average``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.commands.merge.options import WeightsOptions
from reshard.commands.output_options import NamingOptions, OutputOptions
from reshard.commands.split.options import InitOptimizer, NewOptimizerOptions, SplitOptions
from reshard.errors import UsageError
from reshard.formats.target_options import TargetOptions
from reshard.options import option, options_of, repeat_option
from reshard.tensors.averages.coefficients import EMA, WEIGHTS

_OF_LAYOUTS = (
    "world_size",
    *(e.name for e in options_of(TargetOptions)),
    *(e.name for e in options_of(NewOptimizerOptions)),
)
_OF_MODELS = ("keep_fp32", "max_shard_bytes")


@dataclass(frozen=True, kw_only=True)
class AverageOptions(
    WeightsOptions, NewOptimizerOptions, TargetOptions, NamingOptions, OutputOptions
):
    """The options of ``average``."""

    weights: str | Sequence[float] | None = option(
        None,
        "Factor of each SOURCE, in their order; the sum must be 1. Fractions are allowed: 1/3.",
        group="Average",
        metavar="A,B,...",
        unset="all count the same",
        is_common=True,
    )
    ema: float | None = option(
        None,
        "Exponential moving average in order of steps: average = DECAY * average + (1 - DECAY) *"
        " checkpoint.",
        group="Average",
        metavar="DECAY",
        is_common=True,
    )
    last: int | None = option(
        None,
        "Average the newest N checkpoints of the run directory SOURCE.",
        group="Average",
        metavar="N",
        minimum=2,
        is_common=True,
    )
    to: str | None = repeat_option(
        SplitOptions,
        "to",
        help="Layout to write, as convert writes it.",
        unset="safetensors, as merge writes them",
        advice="for a Hugging Face model: leave out --to",
    )
    world_size: int | None = repeat_option(SplitOptions, "world_size", unset="1")
    init_optimizer: InitOptimizer | None = repeat_option(
        NewOptimizerOptions,
        "init_optimizer",
        help="Optimizer to write with --to: none, or zeros for a new Adam at step 0.",
        unset="none, if the layout loads without one",
    )
    param_groups: Path | None = repeat_option(
        NewOptimizerOptions,
        "param_groups",
        help="JSON file of param groups and hyperparameters, for --init-optimizer zeros.",
        unset="",
    )

    def __post_init__(self) -> None:
        """Refuse values that are not allowed, and options that contradict each other.

        Raises:
            UsageError: an option is refused; the message names it.
        """
        super().__post_init__()
        if self.weights is not None and self.ema is not None:
            raise UsageError(f"{WEIGHTS} and {EMA}", "exclude each other", "pass one of them")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"{EMA} {self.ema:g}", "must be between 0 and 1", "pass e.g. 0.9")
        if self.last is not None and self.tag is not None:
            raise UsageError("--tag and --last", "exclude each other", "pass one of them")
        if self.replicas == "mean":
            raise UsageError(
                "--replicas mean",
                "averages the ranks of one checkpoint, which `average` does not support",
                "merge each checkpoint with --replicas mean first, or pass --replicas first",
            )
        if self.to is None:
            self.refuse_given(
                _OF_LAYOUTS, "has no effect without --to", "name a layout, or leave it out"
            )
        else:
            self.refuse_beside(f"--to {self.to}", *_OF_MODELS)

    def for_split(self) -> SplitOptions:
        """Return the options with which `split` would write the mean as a model of its own."""
        # The weights have the dtype to write already.
        return self.convert_to(SplitOptions, dtype=None if self.dtype == "keep" else self.dtype)
