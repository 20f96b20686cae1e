"""Fill the weights and optimizer states of live torch objects from a checkpoint, by DCP.

Under FSDP 1 and 2, DDP, tensor parallelism and in one process torch's own
``get_model_state_dict`` and ``get_optimizer_state_dict`` name the tensors that a rank has, and
`reshard.dcp.StorageReader` reads their bytes and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from reshard.core.keys import remove_wrappers
from reshard.core.manifest import BUFFER, WEIGHT_KINDS, Manifest
from reshard.errors import DifferentError, UnsupportedError
from reshard.live.dcp.reader import StorageReader
from reshard.training.state import build_unnamed_error
from reshard.units import some

_NAMED = 5  # names in a message
# Hyperparameters by parameter, so that the live optimizer may have other param groups. And DCP
# flattens lists in an older way on an FSDP 1 rank that has no part of some parameter (torch 2.13
# ``default_planner.py``, ``create_local_plan``), where no checkpoint has their keys.
_BY_PARAMETER = StateDictOptions(flatten_optimizer_state_dict=True)
_OF_SCHEDULER = "initial_lr"  # torch's schedulers add it to the param groups


def load_model(model: torch.nn.Module, manifest: Manifest, *, strict: bool) -> None:
    """Fill the parameters and buffers of a model.

    Args:
        strict: refuse a model and a checkpoint that do not have the same parameters.

    Raises:
        DifferentError: the checkpoint has parameters that the model lacks; or a value does not fit.
        IncompleteError: the model has a parameter or buffer that the checkpoint lacks.
    """
    state = get_model_state_dict(model)
    if strict:
        _refuse_unused(manifest, state)
    fill_model_state(state, manifest, strict=strict)
    set_model_state_dict(model, state, options=StateDictOptions(strict=strict))


def fill_model_state(state: dict[str, Any], manifest: Manifest, *, strict: bool = True) -> None:
    """Fill the tensors of a model's state dict.

    Args:
        strict: refuse a checkpoint that lacks a name.

    Raises:
        ReshardError: the checkpoint lacks a name, or a value does not fit.
        UnsupportedError: the state dict has lists, as metrics that keep every batch have.
    """
    lists = [name for name, value in state.items() if isinstance(value, list)]
    if lists and strict:
        raise UnsupportedError(
            "the model",
            f"has lists in its state dict, which reshard does not load:"
            f" {some([repr(name) for name in lists], _NAMED)}",
            "leave them out of the state dict (a metric of torchmetrics: metric.persistent(False)),"
            " or load with strict=False (Lightning: module.strict_loading = False)",
        )
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    load({"model": state}, storage_reader=_open_reader(manifest), planner=planner)


def load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest
) -> None:
    """Fill the state and the param groups of the optimizer of a model.

    Raises:
        ReshardError: the checkpoint lacks a value, or has other param groups.
    """
    state = get_optimizer_state_dict(model, optimizer, options=_BY_PARAMETER)
    fill_optimizer_state(state, manifest)
    set_optimizer_state_dict(model, optimizer, state, options=_BY_PARAMETER)


def fill_optimizer_state(state: dict[str, Any], manifest: Manifest) -> None:
    """Fill a flat state dict of an optimizer: ``state.FQN.SLOT``, ``param_groups.FQN.NAME``.

    Raises:
        ReshardError: the checkpoint lacks a value, or does not state which parameter it belongs to.
    """
    if manifest.unnamed is not None:
        raise build_unnamed_error(manifest)
    own = {}
    if not any(_OF_SCHEDULER in group.hyper for group in manifest.train.param_groups):
        own = {key: state.pop(key) for key in list(state) if key.endswith(f".{_OF_SCHEDULER}")}
    load({"optim": state}, storage_reader=_open_reader(manifest))
    state.update(own)


def _open_reader(manifest: Manifest) -> StorageReader:
    """Return a reader of a manifest that rank 0 has checked."""
    return StorageReader(manifest, model="model", optimizer="optim", trust="none")


def _refuse_unused(manifest: Manifest, state: Mapping[str, Any]) -> None:
    wanted = {remove_wrappers(name) for name in state}
    stored = {entry.fqn: entry.kind for entry in manifest.of_kind(*WEIGHT_KINDS)}
    aliases = {kept for alias, kept in manifest.tied.items() if remove_wrappers(alias) in wanted}
    unused = [
        fqn
        for fqn, kind in stored.items()
        if kind != BUFFER and remove_wrappers(fqn) not in wanted and fqn not in aliases
    ]
    if unused:
        raise DifferentError(
            manifest.origin.path,
            f"has {some([repr(fqn) for fqn in unused], _NAMED)}, which the model does not have",
            "load into the model that was saved, or pass strict=False",
        )
