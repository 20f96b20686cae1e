"""The optimizer state of the members of one flat tensor: one step, one list of slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.box import whole
from reshard.chunks import Chunk
from reshard.containers.torch_objects import read_number
from reshard.containers.torch_writer import Part, Slot, Storage
from reshard.dtypes import FLOAT32, DType
from reshard.errors import IncompleteError, UnsupportedError
from reshard.files import SourceFiles
from reshard.formats.deepspeed.write.pieces import Value
from reshard.manifest import MASTER, Entry
from reshard.training import optimizers
from reshard.training.state import TrainedParameter, collect_scalar_names, collect_slot_names


def master_of(member: TrainedParameter) -> Entry:
    """A parameter's most precise value."""
    return member.weight.value


def master_dtype(members: Sequence[TrainedParameter]) -> DType:
    """Return the dtype of the masters: the source's, where it has masters of one dtype.

    They are 16-bit with ``bf16_master_weights_and_grads``; what the source has no master of becomes
    float32.
    """
    found = {m.weight.value.dtype if m.weight.value.kind == MASTER else FLOAT32 for m in members}
    return found.pop() if len(found) == 1 else FLOAT32


def slot_named(name: str) -> Value:
    """Picks that slot of a member; None where it was never stepped."""
    return lambda member: member.slots.get(name)


def names_of(members: Sequence[TrainedParameter]) -> tuple[str, ...]:
    """Return the slots of the members' own shapes, in order of first appearance."""
    scalars = collect_scalar_names(members)
    return tuple(name for name in collect_slot_names(members) if name not in scalars)


def scalars_of(members: Sequence[TrainedParameter]) -> dict[str, Slot]:
    """Return the 0-d values of a flat tensor's state, which all its members share.

    Raises:
        UnsupportedError: two members have other values.
    """
    found: dict[str, Slot] = {}
    for name in sorted(collect_scalar_names(members)):
        held = {m.fqn: entry for m in members if (entry := m.slots.get(name)) is not None}
        _refuse_unequal(name, held)
        parts = tuple(Part(name, fqn, (), whole(())) for fqn in held)  # one place, the same bytes
        found[name] = Slot(Storage(next(iter(held.values())).dtype, 1, parts), ())
    return found


def _refuse_unequal(name: str, held: Mapping[str, Entry]) -> None:
    """Refuse members with other values of a 0-d slot: ZeRO has one for all of a group."""
    values: dict[Chunk, float] = {}
    first: tuple[str, float] | None = None
    with SourceFiles() as files:
        for fqn, entry in held.items():
            chunk = entry.chunks[0]
            if chunk not in values:
                values[chunk] = read_number(files, chunk)
            first = first or (fqn, values[chunk])
            if values[chunk] != first[1]:
                raise UnsupportedError(
                    chunk.file,
                    f"{name} is {first[1]} for {first[0]!r} and {values[chunk]} for {fqn!r}: ZeRO"
                    " keeps one value for all parameters of a group",
                    "stage 0 keeps one a parameter",
                )


def dtype_of(name: str, members: Sequence[TrainedParameter]) -> DType:
    """A slot's dtype: the one that all members have it in, else float32."""
    found = {member.slots[name].dtype for member in members if name in member.slots}
    return found.pop() if len(found) == 1 else FLOAT32


def step_of(members: Sequence[TrainedParameter], path: str) -> float | None:
    """The updates that all members with state have seen; None where nothing counts them.

    Raises:
        IncompleteError: a member lacks a slot that others have, or the number of its updates.
        UnsupportedError: members have seen different numbers of updates.
    """
    names = collect_slot_names(members)
    stepped = [member for member in members if member.slots]
    for member in stepped:
        missing = [name for name in names if name not in member.slots]
        if missing:
            raise IncompleteError(path, f"holds no {missing[0]} of {member.fqn!r}")
        if member.step is None and optimizers.needs_count(names):
            raise IncompleteError(path, f"does not say how often {member.fqn!r} was updated")
    steps = {member.step: member.fqn for member in stepped}
    if len(steps) > 1:
        (one, first), (other, second) = list(steps.items())[:2]
        raise UnsupportedError(
            path,
            f"{first!r} was updated {one} times and {second!r} {other} times: ZeRO keeps one count"
            " for all parameters of a group",
            "stage 0 keeps one a parameter",
        )
    return next(iter(steps), None)
