"""The options of ``split`` and ``convert``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reshard.commands.output_options import NamingOptions, OutputOptions
from reshard.errors import UsageError
from reshard.formats import registry
from reshard.formats.target_options import RngPolicy, TargetOptions
from reshard.options import Options, option

InitOptimizer = Literal["none", "zeros"]

# Sources: torchrun (torch 2.13 ``distributed/elastic/agent/server/local_elastic_agent.py``),
# Slurm's srun, Open MPI's and MPICH's mpirun.
_LAUNCHER_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def _parse_world_size(text: str) -> int:
    if text != "auto":
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"--world-size {text}", "must be a number of at least 1, or auto")
        return int(text)
    for name in _LAUNCHER_VARIABLES:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    raise UsageError(
        "--world-size auto",
        f"needs a launcher, which sets one of {', '.join(_LAUNCHER_VARIABLES)}; none is set here",
        "pass the number of ranks",
    )


@dataclass(frozen=True, kw_only=True)
class NewOptimizerOptions(Options):
    """The optimizer that is written for a source without one."""

    init_optimizer: InitOptimizer | None = option(
        None,
        "Optimizer to write if SOURCE has none: none, or zeros for a new Adam at step 0.",
        group="State",
        is_common=True,
    )
    param_groups: Path | None = option(
        None,
        "JSON file of param groups and hyperparameters.",
        group="State",
        metavar="FILE",
        unset="same as the source",
    )


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(NewOptimizerOptions, TargetOptions, NamingOptions):
    """Options that choose the part of a training state to write, and its layout."""

    dtype: str | None = option(
        None,
        "Dtype of the module's parameters: bf16, fp16 or fp32.",
        group="State",
        unset="as trained",
        is_common=True,
    )
    weights_only: bool = option(False, "Write no optimizer state.", group="State", is_common=True)
    rng: RngPolicy | None = option(
        None,
        "Random states of ranks: keep, create new ones or leave out.",
        group="State",
        unset="keep, if possible",
    )

    def __post_init__(self) -> None:
        """Refuse values that are not allowed, and options that contradict each other.

        Raises:
            UsageError: an option is refused; the message names it.
        """
        super().__post_init__()
        if not self.without_optimizer:
            return
        for name, is_given in (
            ("--init-optimizer zeros", self.init_optimizer == "zeros"),
            ("--param-groups", self.param_groups is not None),
        ):
            if is_given:
                raise UsageError(
                    f"{name} and {self.weights_option}", "exclude each other", "pass one of them"
                )

    @property
    def without_optimizer(self) -> bool:
        """Whether only weights are written."""
        return self.weights_only or self.init_optimizer == "none"

    @property
    def weights_option(self) -> str:
        """The option that leaves out the optimizer, where one is given."""
        return "--weights-only" if self.weights_only else "--init-optimizer none"


@dataclass(frozen=True, kw_only=True)
class SplitOptions(LayoutOptions, OutputOptions):
    """The options of ``split`` and ``convert``."""

    to: str | None = option(
        None,
        "Layout to write; merge writes Hugging Face models.",
        group="Target",
        choices=tuple(registry.list_built_in_writers()),
        find_choices=registry.list_writers,
        advice="for a Hugging Face model: reshard merge",
        unset="same as the source",
        is_common=True,
    )
    world_size: int | None = option(
        None,
        "Number of ranks in the new run; on the command line, auto takes the launcher's.",
        group="Target",
        flags=("--world-size", "--num-shards"),
        metavar="N|auto",
        minimum=1,
        parse=_parse_world_size,
        advice='pass the number of ranks; in a job of torchrun, int(os.environ["WORLD_SIZE"])',
        unset="same as the source",
        is_common=True,
    )
