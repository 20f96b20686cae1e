"""Find names for optimizers that number their parameters.

The numbers count the parameters of the param groups in the order in which the program passed them,
which is nearly always the model's order. Every assignment is checked against the shape or size of
each state. If more than one assignment fits, none is used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard.errors import SAVE_NAMES

if TYPE_CHECKING:
    from reshard.core.manifest import ParamGroup
    from reshard.training.state import TrainedGroup

Signature = Hashable | None  # the shape or size of a parameter; None if it is unknown
SignatureGroups = Sequence[Sequence[Signature]]
NameGroups = list[list[str | None]]
_Placed = tuple[int, ...]
# Hyperparameters that tell groups apart; a scheduler keeps the rate that it has found.
_TELLING = (("weight_decay",), ("betas",), ("momentum",), ("eps",), ("initial_lr", "lr"))
_MOST_STATES = 1000  # of the search for the only way to place several groups


class AmbiguousError(Exception):
    """The known shapes or sizes fit more than one assignment of numbers to parameters, or none.

    Attributes:
        advice: what to do, if no description of the model helps.
    """

    advice = ""

    def __init__(
        self,
        fqns: Sequence[object],
        why: str = "have the same shape and are in several groups, or some of them are frozen,"
        " buffers or never stepped",
    ) -> None:
        shown = ", ".join(map(str, fqns[:3])) + (" ..." if len(fqns) > 3 else "")
        super().__init__(f"these parameters {why}: {shown}")


class UnknownShapeError(AmbiguousError):
    """The optimizer has states of a parameter that is not among the weights.

    LLaMA-Factory saves the head of a reward model in a file of its own, for example.
    """

    def __init__(self, signs: Collection[Signature]) -> None:
        shapes = [s for s in signs if isinstance(s, tuple) and all(isinstance(n, int) for n in s)]
        sizes = [sign for sign in signs if isinstance(sign, int) and sign >= 0]
        shape = max(shapes, key=len, default=())
        what = "whose sizes on the ranks fit no weight that was read"
        if shape or sizes:
            form = f"shape {list(shape)}" if shape else f"{sizes[0]} elements"
            what = f"of {form}, which no weight that was read has"
        Exception.__init__(self, f"it has states of a parameter {what}")
        if len(shape) > 1:  # otherwise they may be of a flat parameter
            self.advice = "save again with all parameters of the optimizer in one state dict"


class MoreParametersError(AmbiguousError):
    """The optimizer may have parameters that are not among the weights that were read.

    Then equal shapes prove nothing: the state may be of a parameter that was not read, while the
    weight of that shape was never stepped.
    """

    advice = f"save all of its parameters in one state dict, or {SAVE_NAMES}"

    def __init__(self, why: str) -> None:
        Exception.__init__(self, why)


def name_groups(
    candidates: Mapping[str, Signature],
    groups: SignatureGroups,
    *,
    ordered: bool = True,
    by_shape: Collection[int] = (),
) -> NameGroups:
    """Return the fqn of each member of each group; None for one without state that has no name.

    Args:
        candidates: every parameter of the model; frozen ones and buffers may be among them.
        groups: the signature of each member, in order.
        ordered: whether both are in the model's order. If not (safetensors sorts its tensors),
            only parameters with a unique signature get a name.
        by_shape: the numbers of the groups that the optimizer has sorted by shape, the largest
            first; parameters of one shape keep the model's order.

    Raises:
        AmbiguousError: more than one assignment of the members with state fits, or none; or there
            are more members than candidates.
    """
    count = sum(map(len, groups))
    if count > len(candidates):
        raise MoreParametersError(
            f"it has {count} parameters, more than the {len(candidates)} of the weights that were"
            " read"
        )
    if not ordered:
        _refuse_alike(candidates, groups)
    elif sum(map(bool, groups)) == 1 and not by_shape:  # groups without members change nothing
        names = _match_in_order(candidates, next(filter(None, groups)))
        if names:
            return [[*names] if group else [] for group in groups]
    return _match_by_signature(candidates, groups, by_shape)


def name_jointly(
    candidates: Mapping[str, Signature], groups: SignatureGroups, *, ordered: bool = True
) -> NameGroups:
    """Return the fqn of each member of several optimizers that divide the parameters among them.

    Each group is in the model's order, and each parameter is in at most one. So a member that fits
    two parameters can be named if the members of another group leave only one of them.

    Raises:
        AmbiguousError: as `name_groups`.
    """
    try:
        return name_groups(candidates, groups, ordered=ordered)
    except AmbiguousError:
        is_open = ordered and sum(map(len, groups)) <= len(candidates)
        found = _match_interleaved(candidates, groups) if is_open else None
        if found is None:
            raise
        return found


def _match_interleaved(
    candidates: Mapping[str, Signature], groups: SignatureGroups
) -> NameGroups | None:
    order = list(candidates.items())
    spare = len(order) - sum(map(len, groups))
    # A state is the number of members that each group has placed. For each parameter, keep the
    # states that are possible after it, each with the (state before, group) pairs that lead there.
    start = (0,) * len(groups)
    levels: list[dict[_Placed, list[tuple[_Placed, int | None]]]] = [{start: []}]
    for number, (_, expected) in enumerate(order):
        reached: dict[_Placed, list[tuple[_Placed, int | None]]] = defaultdict(list)
        for placed in levels[-1]:
            for at, group in enumerate(groups):
                count = placed[at]
                if count < len(group) and group[count] in (None, expected):
                    after = (*placed[:at], count + 1, *placed[at + 1 :])
                    reached[after].append((placed, at))
            if number - sum(placed) < spare:
                reached[placed].append((placed, None))
        if len(reached) > _MOST_STATES:
            return None
        levels.append(reached)
    placed = tuple(map(len, groups))
    named: NameGroups = [[] for _ in groups]
    for level, (fqn, _) in zip(levels[:0:-1], order[::-1], strict=True):
        ways = level.get(placed, ())
        if len(ways) != 1:
            return None
        placed, owner = ways[0]
        if owner is not None:
            named[owner].insert(0, fqn)
    return named


def name_divided(
    candidates: Mapping[str, Signature],
    groups: SignatureGroups,
    divisions: Iterable[Sequence[Sequence[str]]],
) -> NameGroups | None:
    """Return the fqn of each member if exactly one known division of the parameters fits.

    Args:
        divisions: ways in which the training program divides the parameters into groups, each group
            in the model's order. Frozen parameters may be among them.
    """
    fitting: list[NameGroups] = []
    for division in divisions:
        parts = [{fqn: candidates[fqn] for fqn in fqns if fqn in candidates} for fqns in division]
        if len(parts) == len(groups):
            pairs = zip(parts, groups, strict=True)
            found = [[] if not group else _match_in_order(part, group) for part, group in pairs]
            named: NameGroups = [[*names] for names in found if names is not None]
            if len(named) == len(groups) and named not in fitting:
                fitting.append(named)
    return fitting[0] if len(fitting) == 1 else None


def match_live_groups(
    stored: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    live: Sequence[ParamGroup],
    order: Iterable[str],
) -> list[ParamGroup]:
    """Return the groups of a live optimizer in the order of the stored ones; none if it is unclear.

    The run that saved may have listed the same groups in another order. Where their sizes and
    hyperparameters do not tell them apart, both must have the model's order.

    Args:
        sizes: the number of members of each stored group.
        order: the names of the model's parameters.
    """
    hypers = [group.hyper for group in live]
    ranks = [(_rank(stored, keys), _rank(hypers, keys)) for keys in _TELLING]
    telling = [pair for pair in ranks if sorted(pair[0]) == sorted(pair[1])]
    own = list(zip(sizes, *(pair[0] for pair in telling), strict=False))
    marks = list(zip((len(g.fqns) for g in live), *(pair[1] for pair in telling), strict=False))
    position = {fqn: number for number, fqn in enumerate(order)}
    places = [position.get(fqn, 0) for group in live for fqn in group.fqns]
    if sorted(own) != sorted(marks) or len(set(own)) < len(own):
        return list(live) if places == sorted(places) else []
    return [live[marks.index(mark)] for mark in own]


def _rank(groups: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[int]:
    # A schedule scales the rates of all groups, which keeps their ranks. Of the names of the
    # hyperparameter (``keys``), the first one that all groups have counts.
    for key in keys:
        values: list[Any] = [group.get(key) for group in groups]
        values = [tuple(value) if isinstance(value, list) else value for value in values]
        kinds = {float if isinstance(value, (int, float)) else type(value) for value in values}
        if kinds in ({float}, {tuple}):
            ranks = sorted(set(values))
            return [ranks.index(value) for value in values]
    return [0] * len(groups)


def can_name_groups(
    candidates: Mapping[str, Signature],
    groups: Sequence[TrainedGroup],
    by_shape: Collection[int] = (),
) -> bool:
    """Return whether `name_groups` finds the members, so that no names need to be written."""
    shapes = [
        [member.weight.shape if member.slots else None for member in group.members]
        for group in groups
    ]
    try:
        names = name_groups(candidates, shapes, by_shape=by_shape)
    except AmbiguousError:
        return False
    return names == [group.fqns for group in groups]


def _refuse_alike(candidates: Mapping[str, Signature], groups: SignatureGroups) -> None:
    counts = Counter(candidates.values())
    stated = {sign for group in groups for sign in group if sign is not None}
    if unknown := stated - counts.keys():
        raise UnknownShapeError(unknown)
    alike = [fqn for fqn, sign in candidates.items() if sign in stated and counts[sign] > 1]
    if alike:
        raise AmbiguousError(alike, "have the same shape, and no file states the model's order")


def may_be_divided_by_decay(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether there are two groups, the second without weight decay, as HF Trainer's are."""
    decays = [group.get("weight_decay") for group in groups]
    return len(decays) == 2 and isinstance(decays[0], (int, float)) and decays[1] == 0


def _match_in_order(
    candidates: Mapping[str, Signature], group: Sequence[Signature]
) -> list[str] | None:
    if len(group) == len(candidates):
        pairs = zip(group, candidates.values(), strict=True)
        if all(sign in (None, expected) for sign, expected in pairs):
            return list(candidates)
    return _match_subsequence(candidates, group)


def _match_subsequence(
    candidates: Mapping[str, Signature], group: Sequence[Signature]
) -> list[str] | None:
    order = list(candidates.items())
    # The match is unique exactly if the leftmost and the rightmost one are the same.
    first = _match_leftmost(order, group)
    last = _match_leftmost(order[::-1], group[::-1])
    return first if first and last and first == last[::-1] else None


def _match_leftmost(
    order: Sequence[tuple[str, Signature]], group: Sequence[Signature]
) -> list[str] | None:
    names: list[str] = []
    position = 0
    for sign in group:
        while position < len(order) and sign not in (None, order[position][1]):
            position += 1
        if position == len(order):
            return None
        names.append(order[position][0])
        position += 1
    return names


def _match_by_signature(
    candidates: Mapping[str, Signature], groups: SignatureGroups, by_shape: Collection[int]
) -> NameGroups:
    alike: dict[Signature, list[str]] = defaultdict(list)
    for fqn, sign in candidates.items():
        alike[sign].append(fqn)
    counts = [Counter(group) for group in groups]
    stated = set().union(*counts) - {None}
    if unknown := stated - alike.keys():
        raise UnknownShapeError(unknown)
    for sign in stated:
        holders = [count[sign] for count in counts if count[sign]]
        # All candidates of this signature must be in one group. If some are in no group, or if two
        # groups share them, nothing shows which of them a member is.
        if holders != [len(alike[sign])]:
            raise AmbiguousError(alike[sign])
    orders = {sign: iter(fqns) for sign, fqns in alike.items()}
    named = [[None if s is None else next(orders[s]) for s in group] for group in groups]
    in_order = [names for number, names in enumerate(named) if number not in by_shape]
    sorted_names = {fqn for number in by_shape for fqn in named[number]}
    _refuse_unsorted(alike, groups, named, by_shape)
    _refuse_other_order(candidates, alike, in_order)
    _name_stateless(in_order, [fqn for fqn in candidates if fqn not in sorted_names])
    return named


def _refuse_other_order(
    candidates: Mapping[str, Signature],
    alike: Mapping[Signature, Sequence[str]],
    groups: NameGroups,
) -> None:
    position = {fqn: index for index, fqn in enumerate(candidates)}
    for group in groups:
        names = [fqn for fqn in group if fqn is not None]
        twins = [fqn for fqn in names if len(alike[candidates[fqn]]) > 1]
        if twins and names != sorted(names, key=position.__getitem__):
            raise AmbiguousError(
                twins, "have the same shape, and their group is not in the model's order"
            )


def _refuse_unsorted(
    alike: Mapping[Signature, Sequence[str]],
    groups: SignatureGroups,
    named: NameGroups,
    by_shape: Collection[int],
) -> None:
    for number in by_shape:
        signs: list[Any] = [sign for sign in groups[number] if sign is not None]
        pairs = zip(groups[number], named[number], strict=True)
        twins = [fqn for sign, fqn in pairs if fqn is not None and len(alike[sign]) > 1]
        if twins and signs != sorted(signs, reverse=True):
            raise AmbiguousError(
                twins, "have the same shape, and their group is not sorted by shape"
            )


def _name_stateless(groups: NameGroups, order: list[str]) -> None:
    position = {fqn: index for index, fqn in enumerate(order)}
    free = set(order) - {fqn for group in groups for fqn in group}
    for group in groups:
        known = [-1 if fqn is None else position[fqn] for fqn in group]
        for index, fqn in enumerate(group):
            if fqn is not None:
                continue
            low = max(known[:index], default=-1)
            high = next((p for p in known[index:] if p >= 0), len(order))
            between = [name for name in order[low + 1 : high] if name in free]
            if len(between) == 1:
                group[index] = between[0]
                free.discard(between[0])
