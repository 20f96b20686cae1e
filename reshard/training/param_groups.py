"""Read the user's param groups and match them with the parameters.

A file of groups is a list of JSON objects, one a group, in the optimizer's order::

    [{"match": "norm|bias", "weight_decay": 0.0}, {"weight_decay": 0.1, "lr": 3e-4}]

``match`` is one regular expression or a list, searched in names; ``fqns`` are names. A group with
neither takes the remaining parameters. ``"frozen": true`` marks parameters that belong to no group.
With ``"frozen": false``, a group also takes matching parameters that the source did not train. All
other keys are the group's hyper-parameters.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.containers.pickles import script_values
from reshard.core.keys import compile_patterns
from reshard.core.manifest import MEMBER_LISTS, ParamGroup
from reshard.errors import UsageError
from reshard.training.optimizers import has_moments
from reshard.training.state import TrainedGroup, TrainedParameter, WritableState
from reshard.units import abridge, counted

PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")  # lists in torch's schedulers
_OWN_KEYS = ("match", "fqns", "frozen")
_SHOWN = 4
_FREEZE = '{"match": ..., "frozen": true}'
THAW = '{"match": ..., "frozen": false}'
_LIKE_RUN = "create the live model like the run's, with its tie_word_embeddings"
_FOLLOW_SOURCE = (
    "give the live optimizer the param groups of the source (DeepSpeed makes one group if its"
    " configuration names the optimizer: leave optimizer and scheduler out of it)"
)


@dataclass(frozen=True, slots=True)
class GroupRule:
    """One group as the user describes it.

    Args:
        match: expressions that are searched in names.
        frozen: whether its parameters are in no group. False: it also takes parameters that the
            source did not train, which have no optimizer state; None: it does not.
    """

    match: tuple[re.Pattern[str], ...]
    fqns: tuple[str, ...]
    frozen: bool | None
    hyper: Mapping[str, Any]

    @property
    def is_rest(self) -> bool:
        """Whether it takes the parameters that no other rule takes."""
        return not self.match and not self.fqns

    def count_places(self, tied: Mapping[str, str]) -> Counter[str]:
        """Return how often the rule lists each parameter, by any of its names."""
        return Counter(tied.get(name, name) for name in self.fqns)

    def matches(self, fqn: str) -> bool:
        """Return whether one of the expressions matches a parameter."""
        return any(pattern.search(fqn) for pattern in self.match)


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The groups of a file."""

    path: Path
    rules: tuple[GroupRule, ...]
    live: tuple[ParamGroup, ...] = ()  # the groups of a live optimizer, which the rules repeat

    @property
    def where(self) -> str:
        """The origin of the groups, for messages."""
        return "the live optimizer" if self.live else _format_option(self.path)


StateAndNotes = tuple[WritableState, list[str]]  # a derived state, and notes about it for the user
_ALL = GroupRule((), (), frozen=None, hyper={})
ONE = GroupRules(Path(), (_ALL,))  # one group of all parameters


# The file


def read(path: Path) -> GroupRules:
    """Read the groups of a JSON file.

    Raises:
        UsageError: the file cannot be read, or is not a list of groups.
    """
    try:
        listed = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(_format_option(path), f"is not a JSON file: {error}") from error
    if not isinstance(listed, list) or not listed:
        raise UsageError(_format_option(path), "must be a list of groups, each a JSON object")
    rules = tuple(_parse_rule(path, number, group) for number, group in enumerate(listed))
    if sum(rule.is_rest for rule in rules) > 1:
        raise UsageError(
            _format_option(path),
            "has several groups without match or fqns",
            "only one group can take the remaining parameters",
        )
    return GroupRules(path, rules)


def _parse_rule(path: Path, number: int, group: Any) -> GroupRule:
    where = f"{_format_option(path)}: group {number}"
    if not isinstance(group, dict):
        raise UsageError(where, "is not a JSON object")
    for key in MEMBER_LISTS:
        if key in group:
            raise UsageError(where, f"has {key!r}", "list its parameters with match or fqns")
    frozen = group.get("frozen")
    hyper = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in group.items()
        if key not in _OWN_KEYS
    }
    if frozen is False and not (group.get("match") or group.get("fqns")):
        raise UsageError(where, 'has "frozen": false', "name its parameters with match or fqns")
    if not isinstance(frozen, bool | None) or (frozen and hyper):
        raise UsageError(
            where,
            "is frozen and has hyper-parameters"
            if frozen is True
            else "has a value of 'frozen' that is neither true nor false",
        )
    return GroupRule(
        tuple(compile_patterns(_parse_texts(where, "match", group.get("match", [])), where)),
        _parse_texts(where, "fqns", group.get("fqns", [])),
        frozen,
        hyper,
    )


def _parse_texts(where: str, key: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(where, f"has a {key} that is neither a string nor a list of strings")
    return tuple(texts)


def _format_option(path: Path) -> str:
    return f"--param-groups {path}"


def follow_live(state: WritableState, live: tuple[ParamGroup, ...]) -> StateAndNotes:
    """Return the state with the groups of a live optimizer, each in its order.

    DeepSpeed's flat partitions and torch's numbers refer to parameters by their position in the
    live optimizer, whatever the order was that the source saved.
    """
    tied, notes = state.manifest.tied, list[str]()
    wanted = [tuple(tied.get(fqn, fqn) for fqn in group.fqns) for group in live]
    if wanted != [tuple(member.fqn for member in group.members) for group in state.groups]:
        rules = (GroupRule((), fqns, frozen=None, hyper={}) for fqns in wanted)
        state, notes = regroup(state, GroupRules(Path(), tuple(rules), live))
    return replace(state, is_live=True), notes


# New groups


@dataclass(frozen=True, slots=True)
class _GroupMember:
    """A parameter, and the number of its group in the source; None if it is in no group."""

    member: TrainedParameter
    source: int | None


def regroup(state: WritableState, given: GroupRules) -> StateAndNotes:
    """Return the state with the groups of a file, each in the order of the weights.

    A hyper-parameter that a group does not give is taken from its members' groups in the source.
    """
    new = _collect_new_members(state, given)
    trained = _collect_members(state) | new
    if given.live:
        trained = _follow_empty(state, trained, given)
    taken = _assign(given, trained, new.keys(), state.manifest.tied)
    position = state.positions
    groups, origins, mixed = [], [], list[str]()
    for number, rule in enumerate(given.rules):
        members = sorted(taken[number], key=lambda fqn: position[fqn])
        if given.live:
            members = list(rule.fqns)
        if rule.frozen:
            continue
        sources = sorted({n for fqn in members if (n := trained[fqn].source) is not None})
        sources = sources or list(range(len(state.groups)))
        decided = _fill_from_live(given, number, state, sources)
        if given.live and decided.hyper and len(sources) > 1:
            own = ", ".join(sorted(decided.hyper))
            mixed.append(f"group {number} keeps its own {own}: the source has several values")
        hyper = _merge_hyper(given, number, decided, state, sources)
        if not any(group.hyper for group in state.groups):
            _refuse_incomplete_adam(given, number, hyper, [trained[fqn].member for fqn in members])
        groups.append(TrainedGroup(hyper, tuple(trained[fqn].member for fqn in members)))
        origins.append(sources)
    notes = [f"param groups of {' + '.join(str(len(g.members)) for g in groups)} parameters"]
    notes = notes + mixed if given is not ONE else []
    frozen = {f for number, r in enumerate(given.rules) if r.frozen for f in taken[number]}
    if new:
        notes.append(f"trained from now on, without optimizer state yet: {_list_some(sorted(new))}")
    if frozen:
        notes.append(f"in no param group, as {given.path} states: {_list_some(sorted(frozen))}")
    left = sum(len(trained[fqn].member.slots) for fqn in frozen)
    if left:
        notes.append(f"{counted(left, 'optimizer tensor')} of these parameters left out")
    manifest = replace(state.manifest, frozen=state.manifest.frozen - new.keys() | frozen)
    regrouped, scheduler_notes = replace_groups(replace(state, manifest=manifest), groups, origins)
    return regrouped, [*notes, *scheduler_notes]


def drop_empty_groups(state: WritableState) -> StateAndNotes:
    """Return the state without param groups that have no parameters, as a DeepSpeed engine has it.

    The engine removes them from the optimizer (DeepSpeed 0.19.8 ``runtime/engine.py``,
    ``_configure_optimizer``). HF Trainer makes one where no bias or norm is trained (LoRA).
    """
    kept = [number for number, group in enumerate(state.groups) if group.members]
    if len(kept) == len(state.groups):
        return state, []
    groups = [state.groups[number] for number in kept]
    dropped, notes = replace_groups(state, groups, [[number] for number in kept])
    count = counted(len(state.groups) - len(kept), "param group")
    return dropped, [f"{count} without parameters left out, as DeepSpeed does", *notes]


def replace_groups(
    state: WritableState, groups: Sequence[TrainedGroup], origins: Sequence[Sequence[int]]
) -> StateAndNotes:
    """Return the state with new groups, and the scheduler's lists with one value for each.

    Args:
        origins: for each new group, the numbers of its members' groups in the state.
    """
    scheduler, notes = _regroup_scheduler(state, origins, groups)
    train = state.manifest.train
    kept = {key: value for key, value in train.objects.items() if key != script_values.SCHEDULER}
    same = scheduler == train.scheduler
    # The object as it was saved has the lists of the old groups: a target would prefer it.
    train = replace(train, scheduler=scheduler, objects=train.objects if same else kept)
    manifest = replace(state.manifest, train=train)
    return replace(state, manifest=manifest, groups=tuple(groups), regrouped=True), notes


def _collect_members(state: WritableState) -> dict[str, _GroupMember]:
    if state.groups:
        return {
            member.fqn: _GroupMember(member, number)
            for number, group in enumerate(state.groups)
            for member in group.members
        }
    return {
        weight.fqn: _GroupMember(TrainedParameter(weight, {}, None), None)
        for weight in state.weights
        if weight.is_float and weight.fqn not in state.manifest.frozen
    }


def _collect_new_members(state: WritableState, given: GroupRules) -> dict[str, _GroupMember]:
    trained = {member.fqn for member in state.members}
    rules = [rule for rule in given.rules if rule.frozen is False]
    listed = {fqn for rule in rules for fqn in rule.count_places(state.manifest.tied)}
    return {
        weight.fqn: _GroupMember(TrainedParameter(weight, {}, 0.0), None)
        for weight in state.weights
        if weight.is_float
        and weight.fqn not in trained
        and (weight.fqn in listed or any(rule.matches(weight.fqn) for rule in rules))
    }


def _follow_empty(
    state: WritableState, trained: Mapping[str, _GroupMember], given: GroupRules
) -> dict[str, _GroupMember]:
    # The optimizer decides whether a group contains them: ZeRO leaves them out (DeepSpeed 0.19.8
    # ``runtime/utils.py``, ``is_optimized_parameter``); torch's optimizers keep them without a
    # state, so that a checkpoint of stage 0 does not name them.
    tied = state.manifest.tied
    named = {tied.get(fqn, fqn) for rule in given.rules for fqn in rule.fqns}
    empty = [weight for weight in state.weights if weight.is_float and 0 in weight.shape]
    found = {
        fqn: _GroupMember(TrainedParameter(weight, {}, None), None)
        for weight in empty
        if (fqn := weight.fqn) in named
    }
    dropped = {weight.fqn for weight in empty} - named
    return found | {fqn: member for fqn, member in trained.items() if fqn not in dropped}


def _assign(
    given: GroupRules,
    trained: Mapping[str, _GroupMember],
    new: Collection[str],
    tied: Mapping[str, str],
) -> list[list[str]]:
    """Return the names that each rule takes; those of ``new`` only with ``"frozen": false``."""
    owners: dict[str, list[int]] = {fqn: [] for fqn in trained}
    for number, rule in enumerate(given.rules):
        places = rule.count_places(tied)
        unknown = [fqn for fqn in rule.fqns if tied.get(fqn, fqn) not in trained]
        if unknown:
            raise UsageError(
                f"{given.where}: group {number}",
                f"names {_list_some(unknown)}, which the source does not train",
                f"if the new run trains them, pass {THAW} to reshard split --param-groups FILE",
            )
        for fqn, numbers in owners.items():
            takes = places[fqn] or rule.matches(fqn)
            if takes and (rule.frozen is False or fqn not in new):
                # A live model may have untied two names of one weight.
                numbers.extend([number] * (places[fqn] if given.live else 1))
    rest = next((number for number, rule in enumerate(given.rules) if rule.is_rest), None)
    for numbers in owners.values():
        if not numbers and rest is not None:
            numbers.append(rest)
    _refuse_unassigned(given, owners, tied)
    taken: list[list[str]] = [[] for _ in given.rules]
    for fqn, (number,) in owners.items():
        taken[number].append(fqn)
    for number, fqns in enumerate(taken):
        if not fqns:
            rule = given.rules[number]
            aliases = (alias for alias in tied if any(p.search(alias) for p in rule.match))
            alias = next(aliases, None)
            raise UsageError(
                f"{given.where}: group {number}",
                "matches no parameter",
                f"names look like {_list_some(list(trained))}"
                if alias is None
                else f"{alias!r} is tied to {tied[alias]!r}: match this name",
            )
    return taken


def _refuse_unassigned(
    given: GroupRules, owners: Mapping[str, Sequence[int]], tied: Mapping[str, str]
) -> None:
    none = [fqn for fqn, numbers in owners.items() if not numbers]
    if none:
        raise UsageError(
            given.where,
            f"has no group for {_list_some(none)}",
            f"{_LIKE_RUN}; if the new run freezes them, pass {_FREEZE} to reshard split"
            " --param-groups FILE"
            if given.live
            else f"add a group without match for the rest, or {_FREEZE} if they are frozen now",
        )
    twice = {fqn: numbers for fqn, numbers in owners.items() if len(numbers) > 1}
    if twice:
        numbers = " and ".join(map(str, next(iter(twice.values()))))
        aliases = [alias for alias, kept in tied.items() if kept in twice]
        also = f", the weight that {_list_some(aliases)} is tied to" if aliases else ""
        raise UsageError(
            given.where,
            f"has several places (in groups {numbers}) for {_list_some(list(twice))}{also}",
            _LIKE_RUN if given.live else "",
        )


def _merge_hyper(
    given: GroupRules, number: int, rule: GroupRule, state: WritableState, sources: Sequence[int]
) -> dict[str, Any]:
    before = [state.groups[number].hyper for number in sources]
    keys = dict.fromkeys(key for hyper in before for key in hyper if key not in rule.hyper)
    agreed = {}
    for key in keys:
        # Tuples count as lists: a source may store betas as either of them.
        values = {repr(_convert_tuple(hyper.get(key))): hyper.get(key) for hyper in before}
        if len(values) > 1:
            raise UsageError(
                f"{given.where}: group {number}",
                f"does not state {key}, which is {' or '.join(values)} in the source's groups",
                _FOLLOW_SOURCE if given.live else f"add {key!r} to the group",
            )
        (agreed[key],) = values.values()
    return {**agreed, **rule.hyper}


def _refuse_incomplete_adam(
    given: GroupRules, number: int, hyper: Mapping[str, Any], members: Sequence[TrainedParameter]
) -> None:
    # A source may keep none (DeepSpeed's ``elastic_checkpoint``).
    lacking = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in hyper]
    if lacking and has_moments({name for member in members for name in member.slots}):
        raise UsageError(
            f"{given.where}: group {number}",
            f"does not state {', '.join(lacking)}, and neither does the source",
            "add them to the group",
        )


def _fill_from_live(
    given: GroupRules, number: int, state: WritableState, sources: Sequence[int]
) -> GroupRule:
    rule = given.rules[number]
    if not given.live:
        return rule
    before = [state.groups[number].hyper for number in sources]
    differing = {
        key: value
        for key, value in given.live[number].hyper.items()
        if len({repr(_convert_tuple(hyper.get(key))) for hyper in before}) != 1
    }
    return replace(rule, hyper=differing)


def _convert_tuple(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _regroup_scheduler(
    state: WritableState, origins: Sequence[Sequence[int]], groups: Sequence[TrainedGroup]
) -> tuple[Any, list[str]]:
    scheduler = state.manifest.train.scheduler
    schedulers = scheduler if isinstance(scheduler, list) else [scheduler]
    if not any(isinstance(one, dict) and one.keys() & set(PER_GROUP) for one in schedulers):
        return scheduler, []
    adapted = [_regroup_lists(state, one, origins) for one in schedulers]
    notes = ["the scheduler's lists, which have one value for each param group, follow the groups"]
    notes += [
        f"group {number} has lr {group.hyper['lr']}, but its scheduler starts from"
        f" {group.hyper['initial_lr']}: the next step uses the scheduler's value"
        for number, group in enumerate(groups)
        if group.hyper.get("initial_lr", group.hyper.get("lr")) != group.hyper.get("lr")
        and all(state.groups[n].hyper.get("lr") != group.hyper["lr"] for n in origins[number])
    ]
    return adapted if isinstance(scheduler, list) else adapted[0], notes


def _regroup_lists(state: WritableState, scheduler: Any, origins: Sequence[Sequence[int]]) -> Any:
    if not isinstance(scheduler, dict):
        return scheduler
    changed = dict(scheduler)
    for key in PER_GROUP:
        values = scheduler.get(key)
        if not isinstance(values, list) or not values or len(values) != len(state.groups):
            continue
        changed[key] = []
        for number, sources in enumerate(origins):
            # A new group without a source has only parameters without elements (`_follow_empty`),
            # for which any value serves.
            first = sources[0] if sources else 0
            if any(values[n] != values[first] for n in sources):
                raise UsageError(
                    f"group {number}",
                    f"joins parameters whose schedulers have different {key}",
                    "keep the source's groups apart",
                )
            changed[key].append(values[first])
    return changed


def _list_some(fqns: Iterable[str]) -> str:
    return abridge([repr(fqn) for fqn in fqns], _SHOWN)
