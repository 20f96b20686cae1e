"""Regroup the optimizer's experts as DeepSpeed groups them for other expert-parallel ranks.

DeepSpeed moves the experts of each of the user's groups into separate groups, one for every number
of ranks that share a layer, and splits each of those if a rank's part of it would be too large.
Source: DeepSpeed 0.19.8 ``moe/utils.py``
(``split_params_into_different_moe_groups_for_optimizer``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.experts.layout import (
    has_experts,
    name_expert_group,
    parse_expert_name,
)
from reshard.training.state import TrainedGroup, TrainedParameter, WritableState
from reshard.units import counted

_LARGEST = 178_956_971  # max_group_size: elements that a rank has of one group
Sizes = Mapping[str, int]


def regroup_experts(
    state: WritableState, counts: Sizes, before: Sizes, after: Sizes
) -> tuple[tuple[TrainedGroup, ...], tuple[str, ...]]:
    """Return the groups of a run whose layers are shared by other numbers of ranks, and notes.

    Args:
        counts: the experts of each layer.
        before, after: the ranks that share each layer; in ``after`` all numbers are equal, unless
            it equals ``before``.

    Raises:
        UnsupportedError: members are not in the model's order, so that nothing says which of them
            a rank has when it has more or fewer experts; or the new ranks would have different
            members, as DeepSpeed cannot store them.
    """
    if before == after:
        return state.groups, ()
    position = state.positions
    first, ranks = _FirstRank(counts, after), max(after.values())
    groups: list[TrainedGroup] = []
    for parts in _join_user_groups(state.groups, _FirstRank(counts, before)):
        hyper = parts[0].hyper
        if not has_experts(hyper):
            groups += parts
            continue
        for number, group in enumerate(parts):
            at = [position[fqn] for fqn in group.fqns]
            if at != sorted(at):
                raise UnsupportedError(
                    state.manifest.origin.path,
                    f"has a param group of experts ({number} of {hyper.get('name')}) that is not"
                    " in the model's order, so its order on other expert-parallel ranks is not"
                    " known",
                    "keep the source's --ep",
                )
        members = [member for group in parts for member in group.members]
        members.sort(key=lambda member: position[member.fqn])
        # All ranks' files have the names that the first rank has for its experts.
        holders = Counter(first.get_local_name(member.fqn) for member in members)
        uneven = next((name for name, count in holders.items() if count != ranks), None)
        if uneven is not None:
            raise UnsupportedError(
                state.manifest.origin.path,
                f"trains {uneven!r} on {holders[uneven]} of {ranks} expert-parallel ranks, but"
                " DeepSpeed needs the same parameters on each of them",
                "keep the source's --ep",
            )
        groups += _split_group(hyper, members, first)
    return tuple(groups), _note_group_counts(state.groups, groups)


class _FirstRank:
    """The first expert-parallel rank: the experts that it has of each layer."""

    def __init__(self, counts: Sizes, sizes: Sizes) -> None:
        self._sizes = sizes
        self._local = {layer: count // sizes[layer] for layer, count in counts.items()}

    def get_local_name(self, fqn: str) -> str:
        own = parse_expert_name(fqn)
        return str(own.renumber(own.number % self._local[own.layer])) if own else fqn

    def name_group(self, expert: str) -> str:
        own = parse_expert_name(expert)
        if own is None:  # the caller passes only names of experts
            raise AssertionError(expert)
        return name_expert_group(self._sizes[own.layer])

    def select(self, members: Sequence[TrainedParameter]) -> list[TrainedParameter]:
        return [member for member in members if self.get_local_name(member.fqn) == member.fqn]


def _join_user_groups(
    groups: Sequence[TrainedGroup], rank: _FirstRank
) -> Iterator[list[TrainedGroup]]:
    parts: list[TrainedGroup] = []
    for group in groups:
        if parts and not _is_continuation(parts, group, rank):
            yield parts
            parts = []
        parts.append(group)
    if parts:
        yield parts


def _is_continuation(parts: Sequence[TrainedGroup], group: TrainedGroup, rank: _FirstRank) -> bool:
    # A group was split from the same user's group if only the number of its ranks differs, or if
    # its first member did not fit into the last group.
    last = parts[-1]
    if not has_experts(group.hyper) or _without_name(group) != _without_name(last):
        return False
    if group.hyper["name"] != last.hyper["name"]:
        return all(group.hyper["name"] != part.hyper["name"] for part in parts)
    # DeepSpeed starts a part only when the next parameter does not fit into the one before.
    next_member = rank.select(group.members)[:1]
    return sum(map(_count_elements, (*rank.select(last.members), *next_member))) > _LARGEST


def _without_name(group: TrainedGroup) -> dict[str, Any]:
    return {key: value for key, value in group.hyper.items() if key != "name"}


def _split_group(
    hyper: Mapping[str, Any], members: Sequence[TrainedParameter], rank: _FirstRank
) -> Iterator[TrainedGroup]:
    # Each DeepSpeed rank splits the group that it has, and all ranks' parts have equal sizes: the
    # parts of the first rank decide for all.
    parts: dict[str, int] = {}
    number, numel = 0, 0
    for member in rank.select(members):
        if numel and numel + _count_elements(member) > _LARGEST:
            number, numel = number + 1, 0
        parts[member.fqn] = number
        numel += _count_elements(member)
    for part in range(number + 1):
        own = tuple(m for m in members if parts[rank.get_local_name(m.fqn)] == part)
        yield TrainedGroup({**hyper, "name": rank.name_group(own[0].fqn)}, own)


def _count_elements(member: TrainedParameter) -> int:
    return prod(member.weight.shape)


def _note_group_counts(
    before: Sequence[TrainedGroup], after: Sequence[TrainedGroup]
) -> tuple[str, ...]:
    old, new = (sum(has_experts(group.hyper) for group in groups) for groups in (before, after))
    if old == new:
        return ()
    shown = counted(old, "param group of experts becomes", "param groups of experts become")
    return (f"{shown} {new}, as DeepSpeed splits such groups (max_group_size at its default)",)
