"""Build state dicts as torch has them, with a `StateTensor` for each tensor, before sharding.

Parameters have the precision of their master weights, because PyTorch's sharded training stores no
other copy. Optimizer state is keyed by fqn, like ``get_optimizer_state_dict``, or by index, like
``Optimizer.state_dict``: group by group, each in the model's order.

Sources: torch 2.13 ``optim/optimizer.py`` (``state_dict``), ``optim/adam.py`` (a group's keys),
``distributed/checkpoint/state_dict.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import Any

from reshard.containers.torch_objects import pack_number
from reshard.containers.torch_writer import pack_fp32
from reshard.core import dtypes
from reshard.core.box import Index
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry, Keyed, Manifest, TrainState
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.model import ModelShapes
from reshard.state_dict.optimizers import nested_slots, numbering
from reshard.state_dict.optimizers.hyper_parameters import TensorNumber
from reshard.state_dict.own_values import find_scheduler
from reshard.state_dict.plain_values import restore_sets
from reshard.training import loss_scale, optimizers
from reshard.training.state import (
    TrainedGroup,
    TrainedParameter,
    Weight,
    WritableState,
    refuse_without_optimizer,
)

GroupStates = tuple[Mapping[str, Any], Sequence[tuple[str, Mapping[str, Any]]]]

# Settings that torch's AdamW keeps in a group and another library's Adam does not.
_SWITCHES: dict[str, Any] = {
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
SCALER = "loss scaler"  # its name in reports
_STAND_INS = ("class", "tensor", "bytes")  # keys of descriptions by `plain_values.to_plain`


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A tensor of a state dict.

    Args:
        entry: the entry that fills it; None if its content is ``data`` or zeros.
        divided: whether sharded training cuts it; otherwise every rank has the whole tensor.
        owner: name of the parameter, also for the tensors of its optimizer state.
    """

    dtype: DType
    shape: Index
    entry: Entry | None = None
    data: bytes | None = None
    divided: bool = False
    owner: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def build_counter(step: float, slots: Collection[str]) -> StateTensor | int:
    """Return a step as torch's optimizers count it; other optimizers' Python number stays one.

    bitsandbytes' kernels take a Python number alone.

    Args:
        slots: the parameter's slots; those of an Adam are treated as torch's, whatever wrote them.
    """
    if optimizers.is_of_bitsandbytes(slots):
        return int(step)
    if isinstance(step, int) and not optimizers.has_moments(slots):
        return step
    return StateTensor(dtypes.FLOAT32, (), data=pack_fp32(step))


def build_weights(
    state: WritableState,
    *,
    dtype: DType | None = None,
    divided: Callable[[Weight], bool] | None = None,
) -> dict[str, StateTensor]:
    """Build the model's state dict; all names of one tensor have one `StateTensor`.

    Args:
        dtype: dtype of the parameters; None keeps that of each master.
        divided: whether a weight is sharded; by default every weight that is not a known buffer.
    """
    values: dict[str, StateTensor] = {}
    for weight in state.weights:
        cut = divided(weight) if divided else not weight.is_buffer
        values[weight.fqn] = StateTensor(
            choose_weight_dtype(weight, dtype),
            weight.shape,
            weight.value,
            divided=cut,
            owner=weight.fqn,
        )
    for alias, kept in state.manifest.tied.items():
        if kept in values:
            values.setdefault(alias, values[kept])
    return values


def choose_weight_dtype(weight: Weight, dtype: DType | None) -> DType:
    """Return the requested dtype for a float parameter, else the dtype of its value."""
    own = weight.value.dtype
    return own if dtype is None or weight.is_buffer or own.family != "float" else dtype


def choose_whole_weights(state: WritableState, dtype: DType | None) -> list[tuple[Entry, DType]]:
    """Return each weight's most precise value, and the dtype that it is written in."""
    return [(weight.value, choose_weight_dtype(weight, dtype)) for weight in state.weights]


def build_optimizer(
    state: WritableState, keyed: Keyed, model: ModelShapes | None = None, *, named: bool = False
) -> dict[str, Any]:
    """Build the optimizer's state dict.

    Args:
        model: gives the order in which its parameters are numbered.
        named: whether to store names (``param_names``) also where the keys are enough.
    """
    refuse_without_optimizer(state)
    groups = (
        (
            build_hyper(state, group),
            [(member.fqn, _build_member_state(state, group, member)) for member in members],
        )
        for group, members in zip(state.groups, order_members(state, keyed, model), strict=True)
    )
    named = named or (keyed == "index" and needs_param_names(state))
    return assemble_optimizer(groups, keyed, named=named)


def assemble_optimizer(
    groups: Iterable[GroupStates], keyed: Keyed = "index", *, named: bool
) -> dict[str, Any]:
    """Assemble a state dict as ``Optimizer.state_dict`` does: numbers count through all groups.

    Args:
        groups: hyper-parameters, and the name and state of each parameter; the state may be empty.
        named: whether to store names (``param_names``) in the groups.
    """
    states: dict[Any, Mapping[str, Any]] = {}
    param_groups = []
    numbers = count()
    for hyper, members in groups:
        keys: list[Any] = [fqn if keyed == "fqn" else next(numbers) for fqn, _ in members]
        states.update((key, slots) for key, (_, slots) in zip(keys, members, strict=True) if slots)
        names = {"param_names": [fqn for fqn, _ in members]} if named else {}
        param_groups.append({**hyper, "params": keys, **names})
    return {"state": states, "param_groups": param_groups}


def needs_param_names(state: WritableState) -> bool:
    """Return whether numbers alone do not identify the parameters.

    This is so if some parameters are in no group, or ones of equal shape in several groups.
    """
    owned = {member.fqn for member in state.members}
    if any(weight.fqn not in owned and not weight.is_buffer for weight in state.weights):
        return True
    trained = {weight.fqn: weight.shape for weight in state.weights if weight.fqn in owned}
    return len(state.groups) > 1 and not numbering.can_name_groups(trained, state.groups)


def order_members(
    state: WritableState, keyed: Keyed, model: ModelShapes | None
) -> list[tuple[TrainedParameter, ...]]:
    """Return the members of each group in the order in which their optimizer has them.

    FSDP 1 names the parameters of a flat optimizer unit by unit, which is not the model's order. A
    state under another parameter's number would be loaded silently if the shapes agree.

    Raises:
        IncompleteError: the order is unknown, and only a model can give it.
        UsageError: the given model is not that of the checkpoint.
    """
    groups = [group.members for group in state.groups]
    # The order of the live program, or the source's own numbers in the order of its program.
    is_kept = state.is_live or (state.manifest.keyed == "index" and not state.regrouped)
    if keyed == "fqn" or is_kept:
        return groups
    position = _find_positions(state, model) if model is not None else state.positions
    ordered = [
        tuple(sorted(members, key=lambda member: position[member.fqn])) for members in groups
    ]
    is_known = model is not None or state.manifest.ordered_by_model
    if not is_known and (ordered != groups or has_flat_storage(state.manifest)):
        raise IncompleteError(
            state.manifest.origin.path,
            "refers to parameters by number, but no file states the model's order of parameters:"
            " the files have the order of FSDP's units or of names",
            "pass the model: --model config.json|DIR|module:factory",
        )
    return ordered


def _find_positions(state: WritableState, model: ModelShapes) -> dict[str, int]:
    at = {fqn: number for number, fqn in enumerate(model.parameters)}
    at.update((alias, at[first]) for alias, first in model.tied.items() if first in at)
    for alias, kept in state.manifest.tied.items():
        if alias in at:
            at[kept] = min(at[alias], at.get(kept, at[alias]))
    for member in state.members:
        if member.fqn not in at:
            raise UsageError(model.source, f"has no {member.fqn!r}, but the optimizer has it")
    return at


def has_flat_storage(manifest: Manifest) -> bool:
    """Return whether one stored buffer has several parameters end to end, as FSDP 1's units do."""
    if manifest.origin.facts.describes_model:
        return False  # the reader gives the model's order, whatever the storage is
    starts = {
        path: [record.byte_offset for record in file.records]
        for path, file in manifest.files.items()
    }
    owners: dict[tuple[str, int], tuple[str, int]] = {}
    for entry in manifest.entries.values():
        for chunk in entry.chunks:
            if chunk.box.volume and starts.get(chunk.file):
                record = bisect_right(starts[chunk.file], chunk.byte_offset)
                tensor = entry.fqn, chunk.byte_offset
                owner, at = owners.setdefault((chunk.file, record), tensor)
                # Names of a tied weight begin at the same byte; that is no flat buffer.
                if owner != entry.fqn and at != chunk.byte_offset:
                    return True
    return False


def _build_member_state(
    state: WritableState, group: TrainedGroup, member: TrainedParameter
) -> dict[str, Any]:
    return nested_slots.unflatten(
        {**_build_slots(state, group, member), **get_non_tensor_state(state, member)}
    )


def get_non_tensor_state(state: WritableState, member: TrainedParameter) -> Mapping[str, Any]:
    """Return what an optimizer keeps of a parameter that is neither a tensor nor the step.

    Raises:
        UnsupportedError: a part of it is an object that cannot be written.
    """
    other: Mapping[str, Any] = state.manifest.train.non_tensor_state.get(member.fqn, {})
    lost = [name for name, value in other.items() if not is_restorable(value)]
    if lost:
        raise UnsupportedError(
            state.manifest.origin.path,
            f"stores {lost[0]!r} of {member.fqn!r} as an object or in an unknown layout,"
            " which cannot be written",
            "write only the weights with --weights-only, or start a new Adam with --init-optimizer"
            " zeros",
        )
    return {name: restore_sets(value) for name, value in other.items()}


def refuse_lost_state(state: WritableState) -> None:
    """Refuse to drop optimizer state that only its own class can compute, such as torchao's.

    Targets that store nothing but tensors and steps call this.
    """
    for member in state.members:
        get_non_tensor_state(state, member)


def _build_slots(
    state: WritableState, group: TrainedGroup, member: TrainedParameter
) -> dict[str, StateTensor | int]:
    slots: dict[str, StateTensor | int] = {
        n: build_slot(member, entry) for n, entry in member.slots.items()
    }
    step = member.step
    if member.slots:
        check_adam_slots(state, group, member)
    # A flat partition has no slots of a parameter without elements; torch keeps empty ones for it.
    elif not member.weight.value.numel and (names := _find_expected_slots(group)):
        empty = StateTensor(dtypes.FLOAT32, member.weight.shape, divided=True, owner=member.fqn)
        slots = {name: replace(empty) for name in names}
        step = next((m.step for m in group.members if m.slots), None)
    return slots if step is None else {"step": build_counter(step, slots), **slots}


def build_slot(member: TrainedParameter, entry: Entry) -> StateTensor:
    """Build a slot of a parameter, cut like the parameter if it has its shape."""
    cut = entry.shape == member.weight.shape and not member.weight.is_buffer
    cut = cut and bool(entry.shape)
    return StateTensor(entry.dtype, entry.shape, entry, divided=cut, owner=member.fqn)


def _find_expected_slots(group: TrainedGroup) -> tuple[str, ...]:
    names = (
        name
        for member in group.members
        for name, entry in member.slots.items()
        if entry.shape == member.weight.shape
    )
    return tuple(dict.fromkeys(names))


def check_adam_slots(state: WritableState, group: TrainedGroup, member: TrainedParameter) -> None:
    """Refuse an Adam state that lacks a part.

    Raises:
        IncompleteError: a slot or the step is missing.
    """
    missing = optimizers.find_missing_of_adam(member.slots, group.hyper, member.step)
    if missing is not None:
        raise IncompleteError(
            state.manifest.origin.path,
            f"has optimizer state of {member.fqn!r}, but no {missing} of it",
            "pass --weights-only",
        )


def build_hyper(state: WritableState, group: TrainedGroup) -> dict[str, Any]:
    """Return a group's hyper-parameters under torch's names, with an Adam's defaults added.

    Raises:
        IncompleteError: there is no learning rate.
        UnsupportedError: an Adam without bias correction, which torch lacks.
    """
    where, hyper = state.manifest.origin.path, dict(group.hyper)
    if "lr" not in hyper:
        raise IncompleteError(
            where,
            "does not keep the optimizer's hyper-parameters (lr, betas ...)",
            "pass all of them with --param-groups FILE, or leave out the optimizer: --weights-only",
        )
    slots = {name for member in group.members for name in member.slots}
    if optimizers.has_moments(slots):
        if hyper.pop("bias_correction", True) is False:
            raise UnsupportedError(
                where, "was trained by an Adam without bias correction, which torch does not have"
            )
        # Every Adam of torch has ``foreach``; NAdam and RAdam lack some of the other settings.
        if "foreach" not in hyper:
            hyper.setdefault("amsgrad", optimizers.AMSGRAD in slots)
            for name, value in _SWITCHES.items():
                hyper.setdefault(name, value)
    return {name: _build_tensor(value) for name, value in hyper.items()}


def _build_tensor(value: Any) -> Any:
    if not isinstance(value, TensorNumber):
        return restore_sets(value)
    return StateTensor(value.dtype, value.shape, data=pack_number(value, value.dtype))


def refuse_unwritable_hyper(state: WritableState) -> None:
    """Refuse hyper-parameters that are known only by a description.

    Raises:
        UnsupportedError: a param group has an object, or a tensor of several elements.
    """
    for number, group in enumerate(state.groups):
        for name, value in group.hyper.items():
            if not is_restorable(value):
                raise UnsupportedError(
                    state.manifest.origin.path,
                    f"stores {name!r} in param group {number} of the optimizer as an object, or"
                    " differently on each rank, which cannot be written",
                    "pass --weights-only",
                )


def collect_extra_state(train: TrainState) -> dict[str, Any]:
    """Return scheduler, scaler, step and the application's values that can be written."""
    extra = {
        name: train.objects.get(name, value)
        for name, value in train.client.items()
        if name in train.objects or is_restorable(value)
    }
    counted = {
        "step": train.step,
        "global_samples": train.samples,
        "skipped_steps": train.skipped_steps,
    }
    extra.update((name, count) for name, count in counted.items() if count is not None)
    scheduler = find_scheduler(train)
    if scheduler is not None:
        extra["scheduler"] = scheduler
    scaler = loss_scale.convert_to_torch(train.scaler)
    if scaler is not None:
        extra["scaler"] = scaler
    return extra


def describe_derived(train: TrainState) -> list[str]:
    """Return notes about values that are written in another form than the source's."""
    scaler = loss_scale.convert_to_torch(train.scaler)
    if scaler is None or "cur_scale" not in train.scaler:
        return []
    hysteresis = train.scaler.get("delayed_shift", 1)
    without = f", without its hysteresis of {hysteresis}" if hysteresis > 1 else ""
    return [f"DeepSpeed's loss scaler becomes a GradScaler{without}"]


def list_dropped(train: TrainState, storable: Collection[str] | None = None) -> list[str]:
    """Return the parts of the training state that a target of PyTorch's cannot hold.

    Args:
        storable: names from `collect_extra_state` that the target can store; None for all.
    """
    lost = [
        name
        for name, value in train.client.items()
        if name not in train.objects and not is_restorable(value)
    ]
    lost += [
        name for name in collect_extra_state(train) if storable is not None and name not in storable
    ]
    if train.scheduler is not None and find_scheduler(train) is None:
        lost.append("scheduler")
    if not loss_scale.is_idle(train.scaler) and loss_scale.convert_to_torch(train.scaler) is None:
        lost.append("loss scaler, because it is not dynamic")
    return lost


def list_values(train: TrainState) -> list[str]:
    """Return the names of all values beside weights, optimizer and random states."""
    names = [*train.client, *(name for name in collect_extra_state(train) if name != "scaler")]
    if train.scheduler is not None:
        names.append("scheduler")
    if not loss_scale.is_idle(train.scaler):
        names.append(SCALER)
    return list(dict.fromkeys(names))


def is_restorable(value: Any) -> bool:
    """Return whether a value is as it was saved: without descriptions of objects."""
    if isinstance(value, Mapping):
        return all(key not in _STAND_INS and is_restorable(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_restorable, value))
    return value is None or isinstance(value, (bool, int, float, str))
