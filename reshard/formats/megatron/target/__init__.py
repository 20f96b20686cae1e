"""Lay out a Megatron checkpoint for a grid of tensor, pipeline and expert parallel ranks.

choice   what is to be written, decided once
ranks    what each rank holds of every weight
groups   param groups as Megatron makes them
args     the Namespace in every file
legacy   a file a rank (``--ckpt-format torch``)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.formats import skeletons
from reshard.formats.megatron.target import legacy
from reshard.formats.megatron.target.choice import Choice, Wanted, choose
from reshard.formats.training import Training
from reshard.manifest import Skeleton
from reshard.model_parallel.architecture import Architecture
from reshard.model_parallel.rules import Table

__all__ = ["Wanted", "lay_out", "notes"]


def lay_out(
    state: Training,
    wanted: Wanted,
    *,
    table: Table,
    architecture: Architecture,
    args: Mapping[str, Any],
) -> Skeleton:
    """The run directory; errors as `choice.choose`."""
    choice = choose(state, wanted, table=table, architecture=architecture, args=args)
    inside = legacy.directory(choice)
    return skeletons.joined([legacy.tracker(choice), *legacy.files(choice, inside)])


def notes(
    state: Training,
    wanted: Wanted,
    *,
    table: Table,
    architecture: Architecture,
    args: Mapping[str, Any],
) -> tuple[str, ...]:
    """What a user must be told of what `lay_out` makes: derived and dropped."""
    choice = choose(state, wanted, table=table, architecture=architecture, args=args)
    return tuple(_notes(choice))


def _notes(choice: Choice) -> list[str]:
    train = choice.state.manifest.train
    said = list(choice.notes)
    said.append("no random states: load it with --no-load-rng")
    if train.scheduler is None and not choice.wanted.weights_only:
        said.append("no opt_param_scheduler: Megatron asks for one when it loads the optimizer")
    return said
