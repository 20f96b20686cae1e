"""Fill the weights and optimizer states of live torch objects from a checkpoint, by DCP.

Under FSDP 1 and 2, DDP, tensor parallelism and in one process torch's own
``get_model_state_dict`` and ``get_optimizer_state_dict`` name the tensors that a rank has, and
`reshard.dcp.StorageReader` reads their bytes and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from reshard.checks.identity import Trust
from reshard.core.keys import remove_wrappers
from reshard.core.manifest import BUFFER, PARAM, WEIGHT_KINDS, Entry, Key, Manifest, ParamGroup
from reshard.errors import DifferentError, UnsupportedError
from reshard.live.comparison import compare_read
from reshard.live.dcp.reader import StorageReader
from reshard.live.dcp.target import GROUPS, STATE, State, split_optimizer_key
from reshard.live.memory import iterate_model, iterate_optimizer
from reshard.training.state import build_unnamed_error
from reshard.units import abridge

_MODEL, _OPTIMIZER = "model", "optim"  # prefixes of keys
_NAMED = 5  # names in a message
# Hyperparameters by parameter, so that the live optimizer may have other param groups. And DCP
# flattens lists in an older way on an FSDP 1 rank that has no part of some parameter (torch 2.13
# ``default_planner.py``, ``create_local_plan``), where no checkpoint has their keys.
_BY_PARAMETER = StateDictOptions(flatten_optimizer_state_dict=True)


def load_model(
    model: torch.nn.Module, manifest: Manifest, *, strict: bool, trust: Trust = "sampled"
) -> None:
    """Fill the parameters and buffers of a model, and compare them with the checkpoint.

    Args:
        strict: refuse a model and a checkpoint that do not have the same parameters.
        trust: how much is compared.

    Raises:
        DifferentError: the checkpoint has parameters that the model lacks; or a value does not fit.
        IncompleteError: the model has a parameter or buffer that the checkpoint lacks.
    """
    state = get_model_state_dict(model)
    if strict:
        _refuse_unused(manifest, state)
    read = fill_model_state(state, manifest, strict=strict)
    set_model_state_dict(model, state, options=StateDictOptions(strict=strict))
    compare_read(iterate_model(model), read, manifest.files, trust)


def fill_model_state(
    state: dict[str, Any], manifest: Manifest, *, strict: bool = True
) -> dict[Key, Entry]:
    """Fill the tensors of a model's state dict.

    Args:
        strict: refuse a checkpoint that lacks a name.

    Returns:
        The entry of the source for each weight, under the names of the state dict.

    Raises:
        ReshardError: the checkpoint lacks a name, or a value does not fit.
        UnsupportedError: the state dict has lists, as metrics that keep every batch have.
    """
    lists = [name for name, value in state.items() if isinstance(value, list)]
    if lists and strict:
        raise UnsupportedError(
            "the model",
            f"has lists in its state dict, which reshard does not load:"
            f" {abridge([repr(name) for name in lists], _NAMED)}",
            "leave them out of the state dict (a metric of torchmetrics: metric.persistent(False)),"
            " or load with strict=False (Lightning: module.strict_loading = False)",
        )
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    reader = _open_reader(manifest)
    load({_MODEL: state}, storage_reader=reader, planner=planner)
    return {
        (PARAM, key.removeprefix(f"{_MODEL}.")): entry for key, entry in reader.list_read().items()
    }


def load_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    manifest: Manifest,
    trust: Trust = "sampled",
) -> list[str]:
    """Fill the state and the param groups of the optimizer of a model, and compare the state.

    Returns:
        Warnings about hyperparameters that the optimizer cannot take.

    Raises:
        ReshardError: the checkpoint lacks a value, or has other param groups.
    """
    names = {parameter: remove_wrappers(name) for name, parameter in model.named_parameters()}
    with _hide_empty_groups(optimizer, manifest.train.param_groups):
        state = get_optimizer_state_dict(model, optimizer, options=_BY_PARAMETER)
        fresh = _list_fresh(state, State(manifest))
        own = {key: state.pop(key) for keys in fresh.values() for key in keys}
        live = dict(state)
        read = fill_optimizer_state(state, manifest)
        groups = [
            [names.get(parameter, "") for parameter in g["params"]] for g in optimizer.param_groups
        ]
        warnings = _keep_mixed_hyper(state, live, groups)
        set_optimizer_state_dict(model, optimizer, state | own, options=_BY_PARAMETER)
    for parameter, name in names.items():
        if name in fresh:
            optimizer.state.pop(parameter, None)
    compare_read(iterate_optimizer(model, optimizer), read, manifest.files, trust)
    return warnings


def _list_fresh(state: Mapping[str, Any], stored: State) -> dict[str, list[str]]:
    # torch gives every parameter a state before it returns a state dict of the optimizer.
    keys: dict[str, list[str]] = {}
    for key in state:
        part, owner, _ = split_optimizer_key(key)
        if part == STATE and stored.resolve_fqn(owner) in stored.group_of:
            keys.setdefault(owner, []).append(key)
    return {
        remove_wrappers(owner): slots
        for owner, slots in keys.items()
        if stored.slots and not any(map(stored.find_optimizer_value, slots))
    }


def _keep_mixed_hyper(
    state: dict[str, Any], live: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> list[str]:
    # torch would give all parameters of the group the value of the first one.
    keys: dict[str, dict[str, str]] = {}
    for key in state:
        part, owner, name = split_optimizer_key(key)
        if part == GROUPS:
            keys.setdefault(remove_wrappers(owner), {})[name] = key
    warnings = []
    for fqns in groups:
        members = [keys[fqn] for fqn in fqns if fqn in keys]
        for name in members[0] if members else ():
            same = [own[name] for own in members]
            if any(state[key] != state[same[0]] for key in same):
                state.update((key, live[key]) for key in same)
                warnings.append(
                    f"the parameters in the param group of {fqns[0]!r} have several values of"
                    f" {name} in the source: the group keeps its own, {live[same[0]]}"
                )
    return warnings


@contextmanager
def _hide_empty_groups(
    optimizer: torch.optim.Optimizer, stored: Sequence[ParamGroup]
) -> Iterator[None]:
    # torch's flat state dicts name a group by its first parameter (torch 2.13
    # ``distributed/checkpoint/state_dict.py``, ``_unflatten_optim_state_dict``). An empty group
    # takes the hyperparameters of the source's group if that is empty, too.
    groups = optimizer.param_groups
    if len(stored) == len(groups):
        for group, source in zip(groups, stored, strict=True):
            if not group["params"] and not source.fqns:
                group.update({k: v for k, v in source.hyper.items() if k in group})
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        loaded = iter(optimizer.param_groups)  # torch has replaced the list
        optimizer.param_groups = [next(loaded) if group["params"] else group for group in groups]


def fill_optimizer_state(state: dict[str, Any], manifest: Manifest) -> dict[Key, Entry]:
    """Fill a flat state dict of an optimizer: ``state.FQN.SLOT``, ``param_groups.FQN.NAME``.

    Returns:
        The entry of the source for each slot, under the names of the state dict.

    Raises:
        ReshardError: the checkpoint lacks a value, or does not state which parameter it belongs to.
    """
    if manifest.unnamed is not None:
        raise build_unnamed_error(manifest)
    reader = _open_reader(manifest)
    load({_OPTIMIZER: state}, storage_reader=reader)
    read: dict[Key, Entry] = {}
    for key, entry in reader.list_read().items():
        _, fqn, slot = split_optimizer_key(key.removeprefix(f"{_OPTIMIZER}."))
        read[slot, fqn] = entry
    return read


def _open_reader(manifest: Manifest) -> StorageReader:
    return StorageReader(manifest, model=_MODEL, optimizer=_OPTIMIZER, trust="none")


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
            f"has {abridge([repr(fqn) for fqn in unused], _NAMED)}, which the model does not have",
            "load into the model that was saved, or set module.strict_loading = False (Lightning)",
        )
