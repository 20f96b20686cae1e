"""The training state that targets write: weights and the optimizer's groups, in order.

Readers yield entries. For each weight, a target needs to know which entry is its most precise
value, in which dtype it was trained, and which optimizer state belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.core import dtypes
from reshard.core.box import Index
from reshard.core.dtypes import DType
from reshard.core.manifest import (
    BUFFER,
    PARAM,
    WEIGHT_KINDS,
    Entry,
    Key,
    Manifest,
    TrainState,
    index_entries,
)
from reshard.core.stamps import Save, Stamp
from reshard.errors import SAVE_NAMES, IncompleteError, UnsupportedError
from reshard.training import optimizers
from reshard.training.rng import RankRng
from reshard.units import abridge

_SAMPLERS = ("data_sampler", "random_ltd")  # of DeepSpeed


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the module's state dict.

    Args:
        value: the entry that fills it: the fp32 master if there is one, else the trained weight.
        is_buffer: whether it is known to be a buffer.
    """

    fqn: str
    shape: Index
    value: Entry
    dtype: DType
    is_buffer: bool

    @property
    def is_float(self) -> bool:
        """Whether it may be a parameter; weights that are not float are buffers in any model."""
        return not self.is_buffer and self.dtype.family == "float"


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """One parameter of an optimizer's group; ``slots`` is empty if it was never stepped."""

    weight: Weight
    slots: Mapping[str, Entry]
    step: float | None

    @property
    def fqn(self) -> str:
        """The parameter's name."""
        return self.weight.fqn


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """One param group: hyper-parameters, and its parameters in flat order."""

    hyper: Mapping[str, Any]
    members: tuple[TrainedParameter, ...]

    @property
    def fqns(self) -> list[str]:
        """The names of the group's parameters."""
        return [member.fqn for member in self.members]


def collect_slot_names(members: Iterable[TrainedParameter]) -> tuple[str, ...]:
    """Return the slots that any member has, in order of first appearance."""
    return tuple(dict.fromkeys(name for member in members for name in member.slots))


def collect_scalar_names(members: Sequence[TrainedParameter]) -> frozenset[str]:
    """Return the slots that are one 0-d value of each member that has them."""
    slot_shapes: dict[str, set[tuple[Index, Index]]] = {}
    for member in members:
        for name, entry in member.slots.items():
            slot_shapes.setdefault(name, set()).add((entry.shape, member.weight.shape))
    return frozenset(
        name for name, shapes in slot_shapes.items() if optimizers.is_scalar(name, shapes)
    )


@dataclass(frozen=True, slots=True)
class WritableState:
    """The weights, param groups and further state that a target can write."""

    manifest: Manifest
    weights: tuple[Weight, ...]  # in state-dict order, without the aliases of tied weights
    groups: tuple[TrainedGroup, ...]
    rng: tuple[RankRng, ...] = ()  # one for each rank to write, if random states are written
    regrouped: bool = False  # whether the groups are new ones, each in the order of the weights
    is_live: bool = False  # whether each group has the order of the optimizer that loads the output
    save: Save | None = None  # what the stamps of the files to write state

    @property
    def positions(self) -> dict[str, int]:
        """The position of each weight, by name."""
        return {weight.fqn: position for position, weight in enumerate(self.weights)}

    @property
    def members(self) -> list[TrainedParameter]:
        """The parameters of all groups."""
        return [member for group in self.groups for member in group.members]

    @property
    def zero_slots(self) -> frozenset[Key]:
        """The slots that the source does not store: they are zeros, which no chunk fills."""
        return frozenset(
            entry.key
            for member in self.members
            for entry in member.slots.values()
            if not entry.chunks
        )

    @property
    def has_stored_slots(self) -> bool:
        """Whether the source stores a slot of some parameter."""
        return any(entry.chunks for member in self.members for entry in member.slots.values())

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the optimizer's slots, in order of first appearance."""
        return collect_slot_names(self.members)

    @property
    def scalars(self) -> frozenset[str]:
        """The slots that are one 0-d value of each parameter."""
        return collect_scalar_names(self.members)

    def stored(self, weight: Weight, recast: DType | None) -> tuple[Entry, DType]:
        """Return the entry that fills the module's copy of a weight, and its dtype there.

        That is the source's copy in that dtype, if it has one, else its most precise value.

        Args:
            recast: the dtype that parameters get; None keeps the dtype of training.
        """
        dtype = recast if recast and weight.is_float else weight.dtype
        copy = self.manifest.entries.get((PARAM, weight.fqn))
        return (copy if copy and copy.dtype == dtype else weight.value), dtype

    def stamp(self, file: str, rank: int, ranks: int) -> Stamp | None:
        """Return the stamp of a file of one rank; None if files are not stamped."""
        return self.save.stamp(file, rank, ranks) if self.save else None

    @property
    def step(self) -> int:
        """The number of steps: the engine's counter, else the optimizer's count of updates."""
        train = self.manifest.train
        return (
            train.step
            if train.step is not None
            else int(max(train.optimizer_step.values(), default=0))
        )

    @property
    def scheduler_step(self) -> int:
        """The step of a scheduler, which does not count the steps that the scaler skipped."""
        updates = self.manifest.train.updates
        return self.step if updates is None else updates


def build_writable_state(
    manifest: Manifest, *, weights_only: bool = False, may_lack_weights: bool = False
) -> WritableState:
    """Build the training state of a manifest whose names have been edited.

    Args:
        may_lack_weights: whether the writer keeps optimizer state of parameters without weights.
            torchtitan 0.3 trains a projection ``wqkv`` and saves its weight as ``wq``, ``wk`` and
            ``wv`` (``models/common/attention.py``, ``FusedQKVLinear``).
    """
    best = manifest.select_weights()
    stored = {entry.fqn: entry for entry in manifest.of_kind(PARAM, BUFFER)}
    weights = {
        fqn: _build_weight(manifest, best[fqn], stored.get(fqn)) for fqn in manifest.weight_shapes
    }
    if weights_only:
        return WritableState(manifest, tuple(weights.values()), groups=())
    groups = _build_groups(manifest, weights, may_lack_weights=may_lack_weights)
    return WritableState(manifest, tuple(weights.values()), groups)


def _build_weight(manifest: Manifest, value: Entry, stored: Entry | None) -> Weight:
    dtype = manifest.trained_dtypes.get(value.fqn)
    # Best evidence first: what the reader knows, the stored weight, the run's precision.
    if dtype is None and stored is not None:
        dtype = stored.dtype
    if dtype is None and manifest.origin.precision:
        dtype = dtypes.parse(manifest.origin.precision)
    is_buffer = stored is not None and stored.kind == BUFFER
    return Weight(value.fqn, value.shape, value, dtype or value.dtype, is_buffer)


def _build_groups(
    manifest: Manifest, weights: Mapping[str, Weight], *, may_lack_weights: bool
) -> tuple[TrainedGroup, ...]:
    slots: dict[str, dict[str, Entry]] = {}
    for entry in manifest.entries.values():
        if entry.kind not in WEIGHT_KINDS:
            slots.setdefault(entry.fqn, {})[entry.kind] = entry
    train = manifest.train
    groups = tuple(
        TrainedGroup(
            group.hyper,
            tuple(
                TrainedParameter(weights[fqn], slots.get(fqn, {}), train.optimizer_step.get(fqn))
                for fqn in group.fqns
                if fqn in weights
            ),
        )
        for group in train.param_groups
    )
    owned = {member.fqn for group in groups for member in group.members}
    lost = sorted(slots.keys() - owned)
    unknown = [fqn for fqn in lost if fqn not in weights]
    if unknown and not may_lack_weights:
        raise IncompleteError(
            manifest.origin.path,
            f"has optimizer state of {abridge([repr(fqn) for fqn in unknown], 1)}, but no weights"
            f" of these names, only {abridge([repr(fqn) for fqn in weights], 1)}",
            "pass weights that have the names of the optimizer (torchtune's Hugging Face"
            " checkpointer renames the weights alone), write only the weights (--weights-only), or"
            " leave out --to (torchtitan trains wqkv as one parameter)",
        )
    lost = [fqn for fqn in lost if fqn in weights]
    if lost:
        raise IncompleteError(
            manifest.origin.path,
            f"has optimizer state of {abridge([repr(fqn) for fqn in lost], 1)}, which is in no"
            " parameter group",
            "pass --weights-only",
        )
    return groups


def change_entries(state: WritableState, change: Callable[[Entry], Entry | None]) -> WritableState:
    """Return the state with another name or shape for every tensor; `change` drops it by None."""
    weights: dict[str, Weight] = {}
    for weight in state.weights:
        value = change(weight.value)
        if value is not None:
            weights[weight.fqn] = replace(weight, fqn=value.fqn, value=value, shape=value.shape)

    def member(of: TrainedParameter) -> TrainedParameter:
        slots = {slot: change(entry) for slot, entry in of.slots.items()}
        kept = {slot: entry for slot, entry in slots.items() if entry is not None}
        return replace(of, weight=weights[of.fqn], slots=kept)

    groups = tuple(
        replace(group, members=tuple(member(m) for m in group.members if m.fqn in weights))
        for group in state.groups
    )
    manifest = state.manifest
    entries = (change(entry) for entry in manifest.entries.values() if entry.fqn in weights)
    manifest = replace(
        manifest,
        entries=index_entries(entry for entry in entries if entry is not None),
        frozen=frozenset(weights[fqn].fqn for fqn in manifest.frozen if fqn in weights),
        tied={a: weights[kept].fqn for a, kept in manifest.tied.items() if kept in weights},
    )
    return replace(state, manifest=manifest, weights=tuple(weights.values()), groups=groups)


_NAME_MODEL = "pass the model with --model config.json|DIR|module:factory"
_TRY_ANOTHER = (
    "if the run froze some parameters, pass a function that returns the model with these frozen:"
    f" --model module:factory. Otherwise {SAVE_NAMES}"
)


def refuse_without_optimizer(
    state: WritableState, *, can_start: bool = True, others: Sequence[str] = ()
) -> None:
    """Refuse to drop an optimizer silently.

    Args:
        can_start: whether a new Adam can be written instead.
        others: names of other checkpoints of the run, which may have an optimizer.

    Raises:
        IncompleteError: the source has none.
    """
    is_left_out = state.manifest.unnamed_optimizers or state.manifest.unnamed
    if not is_left_out and state.members:
        return
    if is_left_out or state.groups:
        raise build_unnamed_error(
            state.manifest, ", or leave out the optimizer: --init-optimizer none"
        )
    below = state.manifest.checkpoint_below
    raise IncompleteError(
        state.manifest.origin.path,
        "has no optimizer state of known parameters",
        (f"pass {below}, which is a checkpoint of the run; else " if below else "")
        + "pass --init-optimizer none to write only the weights"
        + (", or start a new Adam: --init-optimizer zeros --param-groups FILE" if can_start else "")
        + (
            f"; or pass another checkpoint of the run, if that has it: {abridge(others)}"
            if others
            else ""
        ),
    )


def build_unnamed_error(manifest: Manifest, otherwise: str = "") -> IncompleteError:
    """Return the error for an optimizer whose states cannot be assigned to parameters.

    Args:
        otherwise: what else the user can do.
    """
    which = abridge(manifest.unnamed_optimizers, 1)
    which, unnamed = f"an optimizer ({which})" if which else "an optimizer", manifest.unnamed
    reason, advice = "no file states to which ones they belong", _NAME_MODEL
    if unnamed is not None:
        reason = unnamed.reason
        advice = unnamed.advice or (_TRY_ANOTHER if unnamed.model else _NAME_MODEL)
    elif not manifest.unnamed_optimizers and not manifest.has_optimizer:
        reason = "it has none, like SGD without momentum, so that only numbers remain"
        advice = f"if one param group has all parameters of the model, {_NAME_MODEL}"
    return IncompleteError(
        manifest.origin.path,
        f"contains {which} whose states cannot be assigned to parameters: {reason}",
        advice + otherwise,
    )


def describe_lost_state(state: WritableState) -> list[str]:
    """Return notes on state beside tensors and steps, for a target that has no place for it."""
    kept_state = state.manifest.train.non_tensor_state.values()
    names = dict.fromkeys(name for values in kept_state for name in values)
    return [f"not copied: {name!r}, which the optimizer keeps for each parameter" for name in names]


def describe_lost_setup(state: WritableState) -> list[str]:
    """Return notes on the run's configuration, for a target whose layout has no place for it.

    DeepSpeed and Megatron store their configuration in the checkpoint. A user may expect a
    conversion to keep it, but a run under another framework would not clip gradients, for example.
    """
    train, form = state.manifest.train, state.manifest.origin.format
    if not state.groups:
        return []
    samplers = [name for name in _SAMPLERS if train.opaque.get(name)]
    notes = [
        f"not copied: {name}, which stores the run's position in its data" for name in samplers
    ]
    if not isinstance(train.config, Mapping) or not train.config:
        return notes
    clip = find_clip(train)
    advice = f"; set gradient clipping to {clip:g} in the new run" if clip else ""
    return [*notes, f"not copied: the configuration of the {form} run{advice}"]


def find_clip(train: TrainState) -> float | None:
    """Return the norm to which the run clips gradients; None if it does not, or nothing says so."""
    config = train.config if isinstance(train.config, Mapping) else {}
    named = config.get("gradient_clipping", config.get("clip_grad"))
    clip = named if train.clip is None else train.clip
    return clip if isinstance(clip, (int, float)) and clip > 0 else None


def refuse_slots_of_flat_tensors(state: WritableState, remedy: str) -> None:
    """Refuse the state that Adafactor keeps for flat tensors, if the target has whole parameters.

    Raises:
        UnsupportedError: a matrix has such a state; the message names it.
    """
    problem = describe_slots_of_flat_tensors(state)
    if problem is not None:
        raise UnsupportedError(state.manifest.origin.path, problem, remedy)


def describe_slots_of_flat_tensors(state: WritableState) -> str | None:
    """Describe the state that Adafactor keeps for flat tensors; None if a matrix has none.

    For a matrix it needs the means of rows and columns, and fails at its first update without them.
    """
    row = optimizers.find(collect_slot_names(state.members))
    if row is None:
        return None
    for member in state.members:
        held = [slot for slot in row.vectors if slot in member.slots]
        if held and len(member.weight.shape) > 1:
            return (
                f"the {held[0]} of {member.fqn!r} has a value for each element, as {row.name} keeps"
                f" it for a flat tensor; with whole parameters, {row.name} fails at the next update"
                " because it needs the means of the rows and columns"
            )
    return None


def drop_recomputed_slots(state: WritableState) -> WritableState:
    """Return the state without the slots that the next update computes again."""

    def keep(entry: Entry) -> Entry | None:
        return None if entry.kind in optimizers.RECOMPUTED and not entry.shape else entry

    return change_entries(state, keep)


def refuse_non_elementwise_slots(
    state: WritableState, why: str, remedy: str = "", *, placed: Collection[str] = ()
) -> None:
    """Refuse optimizer state that is not per element, such as a factored one.

    Args:
        why: what the layout cannot store or cannot know, for the message.
        placed: slots that the layout can store nevertheless.

    Raises:
        UnsupportedError: a slot has another shape than its parameter; the message names it.
    """
    for member in state.members:
        for slot, entry in member.slots.items():
            if entry.shape != member.weight.shape and slot not in placed:
                raise UnsupportedError(
                    state.manifest.origin.path,
                    f"the {slot} of {member.fqn!r} has shape {entry.shape}, but the parameter"
                    f" {member.weight.shape}: {why}",
                    remedy,
                )
