"""Everything of a DeepSpeed training state that is not a sharded tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.formats.deepspeed.states import (
    MIXED,
    ModelStates,
    OptimizerStates,
    Shapes,
    agree,
    each,
)
from reshard.manifest import ParamGroup, TrainState
from reshard.pickles import objects
from reshard.pickles.values import Call
from reshard.state_dict.plain_values import to_plain

# Keys that DeepSpeed 0.3 to 0.19 itself writes into model states; any other is the client's.
_ENGINE_KEYS = frozenset(
    """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params
    frozen_param_fragments lr_scheduler data_sampler random_ltd sparse_tensor_module_names
    csr_tensor_module_names skipped_steps global_steps global_samples dp_world_size mp_world_size
    num_experts ds_autoep_layers checkpoint_parallel_dimensions ds_config ds_version
    universal_checkpoint_info
    """.split()
)
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


def number(file: TorchFile, value: Any) -> float | None:
    """A step counter, whether it is stored as a number or as a 0-d tensor."""
    if isinstance(value, Tensor):
        return float(file.number(value))
    return float(value) if isinstance(value, (int, float)) else None


def scaler(root: Mapping[str, Any]) -> dict[str, Any] | None:
    """The loss scaler's state: an object in stages 1 to 3, loose keys at stage 0."""
    found = root.get("loss_scaler")
    if isinstance(found, Call):
        state = to_plain(found.state)
        return {"class": found.name.rsplit(".", 1)[-1], **(state or {})}
    loose = {key: to_plain(root[key]) for key in _SCALER_KEYS if key in root}
    return loose or None


def _plain_number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) else None


def hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group without its members."""
    kept = (item for item in group.items() if item[0] not in ("params", "param_names"))
    return {str(key): to_plain(value) for key, value in kept}


def state(
    model: ModelStates,
    *,
    groups: Sequence[ParamGroup],
    steps: Mapping[str, float],
    optimizer_root: Mapping[str, Any],
) -> TrainState:
    """The train state of one checkpoint, from its first model states file."""
    root = model.root
    client = {str(key): to_plain(root[key]) for key in root if key not in _ENGINE_KEYS}
    opaque_keys = ("data_sampler", "random_ltd", "universal_checkpoint_info")
    return TrainState(
        step=root.get("global_steps"),
        skipped_steps=root.get("skipped_steps"),
        samples=root.get("global_samples"),
        optimizer_step=dict(steps),
        param_groups=tuple(groups),
        scheduler=to_plain(root.get("lr_scheduler")),
        scaler=scaler(optimizer_root),
        clip=_plain_number(optimizer_root.get("clip_grad")),  # not of stage 3
        client=client,
        config=to_plain(root.get("ds_config")),
        opaque={key: to_plain(root[key]) for key in opaque_keys if root.get(key) is not None},
        objects=objects.kept(root, [key for key in root if str(key) in client]),
    )


def sharded_groups(
    ranks: Sequence[OptimizerStates], shapes: Shapes, optimizer_key: str
) -> list[ParamGroup]:
    """The user's param groups with the fqns of their (sub-)groups; all ranks must agree.

    ``params`` of a stored group lists its flat tensors by index: one at stages 1 and 2, its
    sub-groups at stage 3. elastic_checkpoint stores no hyper-parameters; its groups are the flat
    ones.
    """
    stored = agree(
        "the list of param groups",
        each(ranks, lambda rank: _stored_groups(rank, optimizer_key)),
        MIXED,
    )
    if not stored:
        return [ParamGroup({}, tuple(members)) for members in shapes]
    result = []
    for hypers, members in stored:
        fqns = [fqn for index in members if index < len(shapes) for fqn in shapes[index]]
        result.append(ParamGroup(hypers, tuple(fqns)))
    return result


def _stored_groups(
    rank: OptimizerStates, optimizer_key: str
) -> list[tuple[dict[str, Any], list[int]]]:
    optimizer = rank.root.get(optimizer_key)
    groups = optimizer.get("param_groups", []) if isinstance(optimizer, dict) else []
    return [(hyper(group), list(group.get("params", []))) for group in groups]


def sharded_steps(
    ranks: Sequence[OptimizerStates],
    shapes: Shapes,
    state_of: Callable[[OptimizerStates, int], dict[str, Any]],
    optimizer_key: str,
) -> dict[str, float]:
    """Optimizer updates applied to each fqn; ranks that differ are of different steps."""

    def counted(rank: OptimizerStates, index: int) -> float | None:
        own = state_of(rank, index)
        alone = rank.root.get("base_optimizer_state_step")  # elastic_checkpoint drops the groups
        return number(rank.file, step_of(own, rank.root.get(optimizer_key), index, alone))

    steps = {}
    for index, members in enumerate(shapes):
        step = agree(
            f"the optimizer step of group {index}",
            each(ranks, lambda rank, i=index: counted(rank, i)),  # type: ignore[misc]
            MIXED,
        )
        if step is not None:
            steps.update(dict.fromkeys(members, step))
    return steps


def step_of(state: Mapping[str, Any], optimizer: Any, index: int, otherwise: Any = None) -> Any:
    """The counter in a parameter's state, else that of its group (apex's FusedAdam)."""
    if not state or "step" in state:
        return state.get("step")
    groups = optimizer.get("param_groups", []) if isinstance(optimizer, dict) else []
    return next((g["step"] for g in groups if index in g["params"] and "step" in g), otherwise)


def made_at_start(version: str, stage: int, *, in_16_bit: bool) -> tuple[int, ...]:
    """How many updates of zero gradients a run may have begun with, to allocate the moments.

    ``initialize_optimizer_states``: of ``unfused_optimizer.py`` to this day; of ZeRO until 0.13.1;
    of BF16_Optimizer, whose files are those of stage 1, until 0.15.0.
    """
    if stage == 0:
        return (int(in_16_bit),)
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(map(int, found.groups())) if found else ()
    older = bool(numbers) and numbers < ((0, 15, 1) if stage == 1 else (0, 13, 2))
    return (0, 1) if older else (0,)
