"""The optimizer's param groups of experts, as DeepSpeed makes them for other expert-parallel ranks.

Of each of the user's groups the experts go into groups of their own, one for every number of ranks
that share a layer, and each of those is cut where a rank's part of it would be too large. Source:
DeepSpeed 0.19.8 ``moe/utils.py`` (``split_params_into_different_moe_groups_for_optimizer``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed import expert_layout
from reshard.training.state import TrainedGroup, TrainedParameter, Training

_LARGEST = 178_956_971  # max_group_size: elements that a rank has of one group
Sizes = Mapping[str, int]


def over(
    state: Training, counts: Sizes, before: Sizes, after: Sizes
) -> tuple[tuple[TrainedGroup, ...], tuple[str, ...]]:
    """The groups of a run whose layers are shared by other numbers of ranks, and what to say.

    Args:
        counts: the experts of each layer.
        before, after: the ranks that share each layer; ``after`` they all are alike, or as before.

    Raises:
        UnsupportedError: members that are not in the model's order: nothing says which is theirs
            where a rank has more experts, or fewer.
    """
    if before == after:
        return state.groups, ()
    place = {weight.fqn: number for number, weight in enumerate(state.weights)}
    groups: list[TrainedGroup] = []
    for held in _of_users(state.groups, _Local(counts, before)):
        if not expert_layout.has_experts(held[0].hyper):
            groups += held
            continue
        for number, group in enumerate(held):
            at = [place[fqn] for fqn in group.fqns]
            if at != sorted(at):
                raise UnsupportedError(
                    state.manifest.origin.path,
                    f"has a param group of experts ({number} of {held[0].hyper.get('name')}) in an"
                    " order that is not the model's: nothing says which it is on other"
                    " expert-parallel ranks",
                    "leave --ep as it is",
                )
        members = sorted((m for group in held for m in group.members), key=lambda m: place[m.fqn])
        groups += _cut(held[0].hyper, members, _Local(counts, after))
    return tuple(groups), _told(state.groups, groups)


class _Local:
    """What one of the expert-parallel ranks has of a parameter."""

    def __init__(self, counts: Sizes, sizes: Sizes) -> None:
        self._sizes = sizes
        self._experts = {layer: count // sizes[layer] for layer, count in counts.items()}

    def name(self, fqn: str) -> str:
        """The rank's name of it."""
        own = expert_layout.parse_expert_name(fqn)
        return str(own.renumber(own.number % self._experts[own.layer])) if own else fqn

    def group_of(self, expert: str) -> str:
        """The name of the groups that hold it."""
        own = expert_layout.parse_expert_name(expert)
        if own is None:  # the caller asks of experts
            raise AssertionError(expert)
        return expert_layout.expert_group_name(self._sizes[own.layer])

    def first(self, members: Sequence[TrainedParameter]) -> list[TrainedParameter]:
        """What the first rank has."""
        return [member for member in members if self.name(member.fqn) == member.fqn]


def _of_users(groups: Sequence[TrainedGroup], local: _Local) -> Iterator[list[TrainedGroup]]:
    """The groups that were made of one of the user's, together."""
    held: list[TrainedGroup] = []
    for group in groups:
        if held and not _continues(held, group, local):
            yield held
            held = []
        held.append(group)
    if held:
        yield held


def _continues(held: Sequence[TrainedGroup], group: TrainedGroup, local: _Local) -> bool:
    """Whether a group is of the same as those before it.

    It is where it differs in no more than its ranks, or where it would not have fitted in.
    """
    last = held[-1]
    if not expert_layout.has_experts(group.hyper) or _others(group) != _others(last):
        return False
    if group.hyper["name"] != last.hyper["name"]:
        return all(group.hyper["name"] != each.hyper["name"] for each in held)
    first = local.first(group.members)
    return sum(map(_numel, (*local.first(last.members), *first[:1]))) > _LARGEST


def _others(group: TrainedGroup) -> dict[str, Any]:
    return {key: value for key, value in group.hyper.items() if key != "name"}


def _cut(
    hyper: Mapping[str, Any], members: Sequence[TrainedParameter], local: _Local
) -> Iterator[TrainedGroup]:
    """One group, or several where a rank's part would be larger than one may be."""
    parts: dict[str, int] = {}
    number, held = 0, 0
    for member in local.first(members):
        if held and held + _numel(member) > _LARGEST:
            number, held = number + 1, 0
        parts[member.fqn] = number
        held += _numel(member)
    for part in range(number + 1):
        own = tuple(member for member in members if parts[local.name(member.fqn)] == part)
        yield TrainedGroup({**hyper, "name": local.group_of(own[0].fqn)}, own)


def _numel(member: TrainedParameter) -> int:
    return prod(member.weight.shape)


def _told(before: Sequence[TrainedGroup], after: Sequence[TrainedGroup]) -> tuple[str, ...]:
    counts = [
        sum(expert_layout.has_experts(group.hyper) for group in each) for each in (before, after)
    ]
    if counts[0] == counts[1]:
        return ()
    text = f"{counts[0]} param groups of experts become {counts[1]}, as DeepSpeed makes them of the"
    return (f"{text} user's (max_group_size at its default)",)
