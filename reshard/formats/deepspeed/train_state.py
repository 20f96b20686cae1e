"""Read the part of a DeepSpeed training state that is not a sharded tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from reshard.containers.pickles.script_values import SCHEDULER
from reshard.containers.pickles.values import Call
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.core.manifest import Claim, Entry, ParamGroup, TrainState, UnnamedOptimizer
from reshard.formats.deepspeed.schemas import MODEL_KEYS
from reshard.formats.deepspeed.states import (
    ModelStates,
    OptimizerStates,
    Shapes,
    read_by_file,
    require_equal,
    select_distinct,
)
from reshard.state_dict.optimizers.hyper_parameters import read_hyper
from reshard.state_dict.own_values import keep_own_values
from reshard.state_dict.plain_values import to_plain
from reshard.system.threads import map_files_by_key
from reshard.training.optimizers import SETTINGS, needs_count

# Keys that DeepSpeed 0.3 to 0.19 itself writes into model states: these, and what is checked. All
# others are from the ``client_state`` that the script passed to ``save_checkpoint``.
ENGINE_KEYS = frozenset(
    """
    lr_scheduler data_sampler random_ltd sparse_tensor_module_names csr_tensor_module_names
    dp_world_size mp_world_size ds_autoep_layers
    """.split()
).union(MODEL_KEYS)
_PER_RANK = "one number of each rank"
_DATA_KEYS = ("data_sampler", "random_ltd")  # states of data efficiency, written as they are
_OPAQUE_KEYS = (*_DATA_KEYS, "universal_checkpoint_info")
_StoredGroup = tuple[dict[str, Any], list[int]]  # hyper-parameters, indices of flat tensors
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


@dataclass(slots=True)
class OptimizerContent:
    """What is read of a run's optimizer.

    Args:
        entries: master weights and slots.
        claims: file -> what it states about the partition that it holds.
        unnamed: why its numbered parameters have no names; None if they have.
    """

    stage: int
    entries: list[Entry]
    train: TrainState
    warnings: list[str]
    claims: dict[str, tuple[Claim, ...]] = field(default_factory=dict)
    unnamed: UnnamedOptimizer | None = None


def read_number(file: TorchFile, value: Any) -> float | None:
    """Read a step counter, which is a number or a 0-d tensor; return None for another value."""
    if isinstance(value, Tensor):
        return float(file.read_number(value))
    return float(value) if isinstance(value, (int, float)) else None


def read_scaler(root: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the loss scaler: an object at stages 1 to 3, separate keys at stage 0."""
    scaler = root.get("loss_scaler")
    if isinstance(scaler, Call):
        state = to_plain(scaler.state)
        return {"class": scaler.name.rsplit(".", 1)[-1], **(state or {})}
    return {key: to_plain(root[key]) for key in _SCALER_KEYS if key in root} or None


def read_train_state(
    model: ModelStates,
    *,
    groups: Sequence[ParamGroup],
    steps: Mapping[str, float],
    optimizer_root: Mapping[str, Any],
) -> TrainState:
    """Read the train state of a checkpoint from its first model states file.

    Args:
        steps: fqn -> updates of the optimizer.
        optimizer_root: the dict that holds the loss scaler.
    """
    root = model.root
    own = {key: root[key] for key in root if key not in ENGINE_KEYS}
    client = {str(key): to_plain(value) for key, value in own.items()}
    opaque = {key: root[key] for key in _OPAQUE_KEYS if root.get(key) is not None}
    own |= {key: opaque[key] for key in _DATA_KEYS if key in opaque}
    own[SCHEDULER] = root.get("lr_scheduler")
    config = _read_config(root)
    clip = optimizer_root.get("clip_grad", _find_default_clip(root, config))
    return TrainState(
        step=root.get("global_steps"),
        skipped_steps=root.get("skipped_steps"),
        samples=None if root.get("global_samples") is None else int(root["global_samples"]),
        optimizer_step=dict(steps),
        param_groups=tuple(groups),
        scheduler=to_plain(root.get("lr_scheduler")),
        scaler=read_scaler(optimizer_root),
        clip=clip if isinstance(clip, (int, float)) else None,
        client=client,
        config=config,
        opaque={key: to_plain(value) for key, value in opaque.items()},
        objects=keep_own_values(own, own),
    )


def _find_default_clip(root: Mapping[str, Any], config: Any) -> float | None:
    # Stage 3, and stage 0 in fp32, store none. Until 0.19.2 the default was not to clip
    # (``runtime/constants.py``, GRADIENT_CLIPPING_DEFAULT).
    version = root.get("ds_version")
    if not isinstance(version, str) or is_older(version, (0, 19, 3)):
        return None
    states_none = isinstance(config, Mapping) and "gradient_clipping" not in config
    return 1.0 if states_none else None


def _read_config(root: Mapping[str, Any]) -> Any:
    # If the program's ``mpu`` has only sequence-parallel ranks, DeepSpeed divides the number of
    # ranks by theirs, so its counter of samples is a float, and no key of the configuration may
    # state their number (0.19.8, runtime/config.py and runtime/engine.py). The counter then gives
    # the batch.
    config, samples, steps = (
        root.get(key) for key in ("ds_config", "global_samples", "global_steps")
    )
    config = to_plain(config)
    if isinstance(config, dict) and isinstance(samples, float) and steps and not samples % steps:
        return {"train_batch_size": int(samples // steps)} | config
    return config


def read_param_groups(ranks: Sequence[OptimizerStates], shapes: Shapes) -> list[ParamGroup]:
    """Read the user's param groups, which must be equal on all ranks.

    ``params`` of a stored group lists its flat tensors by index: one at stages 1 and 2, its
    sub-groups at stage 3. elastic_checkpoint stores no hyper-parameters; there each flat tensor
    becomes a group. A number that each rank's optimizer computes from its own partition becomes a
    description with the numbers of all ranks.
    """

    def read(states: Iterable[OptimizerStates]) -> dict[str, list[_StoredGroup]]:
        return read_by_file(states, lambda rank: _read_groups(rank.optimizer, len(shapes)))

    first, *others = read(select_distinct(ranks)).values()
    stored = first if all(groups == first for groups in others) else join_groups(read(ranks))
    return _name_members(stored, shapes) or [ParamGroup({}, tuple(members)) for members in shapes]


def join_groups(found: Mapping[str, Sequence[_StoredGroup]]) -> list[_StoredGroup]:
    """Join the groups of ranks that differ in numbers which each optimizer computed itself.

    Args:
        found: the groups in each file.
    """
    kinds = {
        path: [(list(hyper), members) for hyper, members in groups]
        for path, groups in found.items()
    }
    require_equal("the list of param groups", kinds)
    joined = []
    for number, (first, members) in enumerate(next(iter(found.values()))):
        hyper: dict[str, Any] = {}
        for name, value in first.items():
            values = {path: groups[number][0][name] for path, groups in found.items()}
            own = name not in SETTINGS and all(isinstance(v, float) for v in values.values())
            if own and len(set(values.values())) > 1:
                hyper[name] = {"class": _PER_RANK, "elements": list(values.values())}
            else:
                hyper[name] = value
                require_equal(f"{name} of param group {number}", values)
        joined.append((hyper, members))
    return joined


def warn_per_rank(groups: Iterable[ParamGroup]) -> list[str]:
    """Return a warning if ranks have other values of a param group, which reshard cannot join."""
    names = dict.fromkeys(
        name
        for group in groups
        for name, value in group.hyper.items()
        if isinstance(value, dict) and value.get("class") == _PER_RANK
    )
    text = (
        f"each rank's optimizer computed {', '.join(names)} from its own part of the parameters, so"
        " split cannot convert them"
    )
    return [text] if names else []


def name_members(optimizer: Mapping[str, Any], shapes: Shapes) -> list[ParamGroup]:
    """Return an optimizer's param groups, whose members are stored as indices of flat tensors."""
    return _name_members(_read_groups(optimizer, len(shapes)), shapes)


def _read_groups(optimizer: Mapping[str, Any], count: int) -> list[_StoredGroup]:
    return [
        (read_hyper(group), [index for index in group.get("params", []) if index < count])
        for group in optimizer.get("param_groups", [])
    ]


def _name_members(stored: Iterable[_StoredGroup], shapes: Shapes) -> list[ParamGroup]:
    return [
        ParamGroup(hyper, tuple(fqn for index in members for fqn in shapes[index]))
        for hyper, members in stored
    ]


def read_steps(ranks: Sequence[OptimizerStates], shapes: Shapes) -> dict[str, float]:
    """Read how many updates the optimizer has applied to each fqn."""
    steps = {}
    for index, members in enumerate(shapes):
        step = require_equal(
            f"the optimizer step of group {index}",
            map_files_by_key(
                {rank.file.path: rank for rank in ranks},
                partial(_read_step, index=index),
            ),
        )
        if step is not None:
            steps.update(dict.fromkeys(members, step))
    return steps


def _read_step(rank: OptimizerStates, index: int) -> float | None:
    return read_number(rank.file, find_step(rank.get_group_state(index), rank.optimizer, index))


def find_step(state: Mapping[str, Any], optimizer: Mapping[str, Any], index: int) -> Any:
    """Return the counter of a parameter's state, or of its group (apex's FusedAdam).

    Of an optimizer that always counts in its group, no state has a place for it.
    """
    if "step" in state or not needs_count(state):
        return state.get("step")
    groups = optimizer.get("param_groups", [])
    return next((g["step"] for g in groups if index in g["params"] and "step" in g), None)


def list_possible_initial_updates(version: str, stage: int, *, in_16_bit: bool) -> tuple[int, ...]:
    """Return how many updates with zero gradients a run may have started with.

    DeepSpeed makes them to allocate the moments (``initialize_optimizer_states``):
    ``unfused_optimizer.py`` in all versions, ZeRO until 0.13.1, and BF16_Optimizer, whose files are
    those of stage 1, until 0.15.0.
    """
    if stage == 0:
        return (int(in_16_bit),)
    older = is_older(version, (0, 15, 1) if stage == 1 else (0, 13, 2))
    return (0, 1) if older else (0,)


def is_older(version: str, than: tuple[int, int, int]) -> bool:
    """Return whether a version of DeepSpeed is older than another; False if it has no numbers.

    >>> is_older("0.18.9+abc", (0, 19, 0)), is_older("unknown", (0, 19, 0))
    (True, False)
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return match is not None and tuple(map(int, match.groups())) < than
