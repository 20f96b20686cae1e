"""The optimizer state of the members of one flat tensor: one step, one list of slots."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.dtypes import FLOAT32, DType
from reshard.errors import IncompleteError, UnsupportedError
from reshard.formats.deepspeed.target.pieces import Value
from reshard.formats.training import Trained
from reshard.manifest import Entry

_COUNTED = ("exp_avg", "exp_avg_sq")  # slots whose optimizer needs the number of updates


def master_of(member: Trained) -> Entry:
    """A parameter's most precise value."""
    return member.weight.value


def slot_named(name: str) -> Value:
    """Picks that slot of a member; None where it was never stepped."""
    return lambda member: member.slots.get(name)


def names_of(members: Sequence[Trained]) -> tuple[str, ...]:
    """The slots that any member has, in order of first appearance."""
    return tuple(dict.fromkeys(name for member in members for name in member.slots))


def dtype_of(name: str, members: Sequence[Trained]) -> DType:
    """A slot's dtype: the one that all members have it in, else float32."""
    found = {member.slots[name].dtype for member in members if name in member.slots}
    return found.pop() if len(found) == 1 else FLOAT32


def step_of(members: Sequence[Trained], path: str) -> float | None:
    """The updates that all members with state have seen; None where nothing counts them.

    Raises:
        IncompleteError: a member lacks a slot that others have, or the number of its updates.
        UnsupportedError: members have seen different numbers of updates.
    """
    names = names_of(members)
    stepped = [member for member in members if member.slots]
    for member in stepped:
        missing = [name for name in names if name not in member.slots]
        if missing:
            raise IncompleteError(path, f"holds no {missing[0]} of {member.fqn!r}")
        if member.step is None and set(_COUNTED) & set(names):
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
