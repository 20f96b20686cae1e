"""Adapt param groups to those of HF Trainer's optimizer: one with weight decay, one without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reshard.core.manifest import Manifest
from reshard.model import ModelShapes, library
from reshard.model.weight_decay import find_decays
from reshard.training import trainer_run
from reshard.training.companion_files import describe_beside
from reshard.training.param_groups import replace_groups
from reshard.training.state import TrainedGroup, WritableState

COUNT = 2  # of param groups


def adapt_groups(
    state: WritableState, model: ModelShapes | None
) -> tuple[WritableState, list[str]]:
    """Return the state with the param groups and keys that the Trainer's optimizer has, and notes.

    DeepSpeed makes one group if its configuration names the optimizer; the Trainer makes two of
    the same parameters, and each keeps the hyper-parameters. The one group of a new optimizer
    becomes the two with which the Trainer starts. Groups of a script's own optimizer stay as they
    are.

    Args:
        model: the model, if the user described it; otherwise a config beside the source is used.
    """
    notes: list[str] = []
    is_deepspeeds, is_new = _has_deepspeeds_optimizer(state.manifest), has_new_optimizer(state)
    if len(state.groups) == 1 and (is_deepspeeds or is_new or _has_trainers_optimizer(state)):
        fqns = state.groups[0].fqns
        decays = find_decays(fqns, model)
        if decays is None and model is None and library.is_installed():
            decays = find_decays(fqns, describe_beside(state.manifest))
        if decays is not None and (is_deepspeeds or is_new):
            state, notes = _divide(state, decays, starts=is_new)
        elif decays is not None and len(set(decays)) == 1:
            state, notes = _restore_empty(state, is_decayed=decays[0])
    # Its scheduler adds this key, and DCP loads no group without it. The value is not used again.
    groups = (
        replace(group, hyper={**group.hyper, "initial_lr": group.hyper["lr"]})
        if "lr" in group.hyper and "initial_lr" not in group.hyper
        else group
        for group in state.groups
    )
    return replace(state, groups=tuple(groups)), notes


def may_differ_in_deepspeed(state: WritableState) -> bool:
    """Return whether a DeepSpeed engine has other groups if it makes the optimizer itself."""
    return len(state.groups) > 1 and not _has_deepspeeds_optimizer(state.manifest)


def has_new_optimizer(state: WritableState) -> bool:
    """Return whether the source has no optimizer: the state has one that was never stepped."""
    return not state.manifest.train.param_groups and not state.has_stored_slots


def _has_deepspeeds_optimizer(manifest: Manifest) -> bool:
    config = manifest.train.config
    return isinstance(config, dict) and "optimizer" in config


def _has_trainers_optimizer(state: WritableState) -> bool:
    train = state.manifest.train
    return (
        state.manifest.origin.format.startswith("deepspeed")
        and isinstance(train.config, dict)
        and "optimizer" not in train.config
        and bool(train.trainer_state)
        and not trainer_run.is_document(train.trainer_state)
    )


def _restore_empty(state: WritableState, *, is_decayed: bool) -> tuple[WritableState, list[str]]:
    # A DeepSpeed engine leaves out a group without parameters. The Trainer makes one where all
    # trained parameters are decayed (LoRA), or none is.
    (group,) = state.groups
    if is_decayed:
        groups = [group, TrainedGroup({**group.hyper, "weight_decay": 0.0}, ())]
    else:
        groups = [TrainedGroup(group.hyper, ()), group]
    restored, notes = replace_groups(state, groups, [[0], [0]])
    text = "the Trainer's param group without parameters, which DeepSpeed leaves out, is restored"
    return restored, [text, *notes]


def _divide(
    state: WritableState, decays: Sequence[bool], *, starts: bool
) -> tuple[WritableState, list[str]]:
    # ``starts``: whether the second group has the weight decay with which the Trainer starts, 0.
    (group,) = state.groups
    hypers = (group.hyper, {**group.hyper, "weight_decay": 0.0} if starts else group.hyper)
    groups = [
        TrainedGroup(
            hyper,
            tuple(m for m, decay in zip(group.members, decays, strict=True) if decay is wanted),
        )
        for hyper, wanted in zip(hypers, (True, False), strict=True)
    ]
    divided, notes = replace_groups(state, groups, [[0], [0]])
    sizes = " and ".join(str(len(group.members)) for group in groups)
    first, second = (group.hyper.get("weight_decay") for group in groups)
    text = (
        f"one param group becomes the Trainer's two, of {sizes} parameters, with weight_decay"
        f" {first} and {second}: --param-groups sets others"
    )
    return divided, [text, *notes]
