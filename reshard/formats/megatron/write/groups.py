"""Param groups as Megatron makes them: by weight decay, and the experts' apart.

Source: Megatron-LM core_v0.16.1 ``core/optimizer/__init__.py`` (``_get_param_groups``: parameters
of one dim, and biases, are not decayed), ``core/optimizer/optimizer.py``
(``_filter_and_reorder_param_groups``: by which keys a group is found again). Before 0.16 groups
have no ``default_config``, and each rank orders them by their first members.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.errors import CorruptError, UnsupportedError, shown
from reshard.formats.megatron.optimizers.groups import updates_matrices
from reshard.formats.target_options import Adam
from reshard.training.state import TrainedGroup, TrainedParameter, WritableState
from reshard.units import abridge

_RATES = ("max_lr", "min_lr")
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_SINCE_019 = (*_RATES, "start_wd", "end_wd", "optimizer")  # further keys of a group's identity
_SINCE_016 = "default_config"
_TORCH_ONLY = ("foreach", "capturable", "differentiable", "fused", "maximize", "amsgrad")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class MegatronGroup:
    """One param group of every rank; ``fqns`` are its members on all ranks together."""

    hyper: Mapping[str, Any]
    fqns: frozenset[str]
    is_expert: bool
    of_matrices: bool = False
    of_adam: bool = True


@dataclass(frozen=True, slots=True)
class Groups:
    """All param groups in Megatron's order, and notes on how they were made.

    Args:
        experts: the parameters whose groups have a separate optimizer.
        before_016: whether Megatron-core before 0.16 saved the source.
    """

    groups: tuple[MegatronGroup, ...]
    members: Mapping[str, TrainedParameter]
    experts: frozenset[str]
    notes: tuple[str, ...] = ()
    before_016: bool = False

    def list_for_rank(self, fqns: Sequence[str]) -> list[MegatronGroup]:
        """Return the groups in the order that a rank has them.

        Before 0.16 a rank loads groups by position (``load_state_dict`` of torch's optimizers), and
        a later pipeline stage, which begins with a norm, has other first members than the first.

        Args:
            fqns: the rank's parameters in the order of ``named_parameters``.
        """
        if not self.before_016:
            return list(self.groups)
        last = len(fqns)

        def find_first(group: MegatronGroup) -> int:
            return next((at for at, fqn in enumerate(fqns) if fqn in group.fqns), last)

        return sorted(self.groups, key=find_first)


def make_groups(state: WritableState, experts: frozenset[str], adam: Adam | None) -> Groups:
    """Return the param groups of a training state for Megatron.

    Args:
        experts: the parameters that are in separate groups; empty without expert parallelism.
        adam: which Adam's state to write; None: the source's if it is Megatron's, else ``fused``.

    Raises:
        UnsupportedError: Megatron cannot have these groups.
        CorruptError: a setting that tells groups apart is not a number.
    """
    members = {member.fqn: member for member in state.members}
    is_megatron = all("wd_mult" in g.hyper or "pre_wd_mult" in g.hyper for g in state.groups)
    notes: list[str] = []
    sources = (
        [(dict(g.hyper), [m.fqn for m in g.members]) for g in state.groups]
        if is_megatron
        else _group_by_shape(state.groups, notes)
    )
    # torch's AdamW counts each parameter's steps. Transformer Engine's and apex's count a group's,
    # and their load fails on torch's state.
    is_torch = is_megatron and any("capturable" in group.hyper for group in state.groups)
    fused = adam == "fused" or (adam is None and not is_torch)
    chain = [hyper for hyper, _ in sources]
    merged: dict[tuple[Any, ...], tuple[dict[str, Any], list[str]]] = {}
    for hyper, fqns in sources:
        of_matrices = updates_matrices([hyper], chain)
        of_adam = not of_matrices and hyper.get("optimizer", "adam") == "adam"
        for is_expert in (False, True):
            members_here = [fqn for fqn in fqns if (fqn in experts) == is_expert]
            # Megatron's own groups stay even if empty: all ranks must have the same
            # (_get_param_groups).
            if not members_here and (is_expert or not is_megatron):
                continue
            completed = {
                **_complete_hyper(hyper, fused=fused and of_adam),
                "is_expert_parallel": is_expert,
            }
            identity = (
                of_matrices,
                of_adam,
                *(_get_setting(completed, key, state) for key in (*_IDENTITY, *_SINCE_019)),
            )
            known = merged.setdefault(identity, (completed, []))
            if known[0] != completed:
                keys = zip((*_IDENTITY, *_SINCE_019), identity[2:], strict=True)
                equal = ", ".join(f"{key} {value}" for key, value in keys if value is not None)
                raise UnsupportedError(
                    state.manifest.origin.path,
                    f"has two param groups that Megatron would join, as both have {equal}, with"
                    f" different {_name_differences(known[0], completed)}",
                    "pass equal groups with --param-groups FILE, or write the weights with"
                    " --weights-only",
                )
            known[1].extend(members_here)
    groups = tuple(
        MegatronGroup(
            hyper
            if not (fused and of_adam)
            else {**hyper, "step": count_updates(map(members.__getitem__, fqns), state)},
            frozenset(fqns),
            bool(hyper["is_expert_parallel"]),
            of_matrices,
            of_adam,
        )
        for (of_matrices, of_adam, *_), (hyper, fqns) in merged.items()
        if fqns or not hyper["is_expert_parallel"]
    )
    if is_megatron and len({identity[: 2 + len(_IDENTITY)] for identity in merged}) < len(merged):
        notes.append(
            "some param groups differ only in their learning rates: core 0.16 to 0.18, which do not"
            " tell such groups apart, load the settings of one for both; load it with core 0.19 or"
            " later"
        )
    apart = frozenset(fqn for group in groups if group.is_expert for fqn in group.fqns)
    before_016 = is_megatron and not any(_SINCE_016 in g.hyper for g in state.groups)
    return Groups(groups, members, apart, tuple(notes), before_016)


def _get_setting(hyper: Mapping[str, Any], key: str, state: WritableState) -> Any:
    value = hyper.get(key, hyper.get(f"pre_{key}"))
    if isinstance(value, Hashable):
        return value
    raise CorruptError(
        state.manifest.origin.path,
        f"has a param group whose {key} is {shown(value)}, expected a number",
        "pass the groups with --param-groups FILE, or write the weights with --weights-only",
    )


def _group_by_shape(
    groups: Sequence[TrainedGroup], notes: list[str]
) -> list[tuple[dict[str, Any], list[str]]]:
    members = [(member, group.hyper) for group in groups for member in group.members]
    decayed: tuple[dict[str, Any], list[str]] = ({"wd_mult": 1.0}, [])
    plain: tuple[dict[str, Any], list[str]] = ({"wd_mult": 0.0}, [])
    decay = _find_decay(members)
    changed: list[str] = []
    for member, hyper in members:
        shared, fqns = plain if _is_plain(member) else decayed
        fqns.append(member.fqn)
        if hyper.get("weight_decay", 0.0) != (0.0 if _is_plain(member) else decay):
            changed.append(member.fqn)
        for key, value in hyper.items():
            if key != "weight_decay" and shared.setdefault(key, value) != value:
                raise _make_difference_error(member, key, value, shared[key])
    decayed[0]["weight_decay"], plain[0]["weight_decay"] = decay, 0.0
    if changed:
        notes.append(
            "weight decay follows Megatron's rule (none for norms and biases): changed for"
            f" {abridge(changed, _SHOWN)}"
        )
    if any(rate not in decayed[0] for rate in _RATES):
        notes.append(
            "the param groups state no max_lr and min_lr, by which core 0.19 and later find them"
            " (--lr, --min-lr): for these versions, add both with --param-groups"
        )
    return [decayed, plain]


def _is_plain(member: TrainedParameter) -> bool:
    return len(member.weight.shape) == 1 or member.fqn.endswith(".bias")


def _find_decay(members: Iterable[tuple[TrainedParameter, Mapping[str, Any]]]) -> float:
    # Some decayed parameters may have none: their decay changes, with a note. Two different ones
    # are refused.
    decay = 0.0
    for member, hyper in members:
        own = 0.0 if _is_plain(member) else hyper.get("weight_decay", 0.0)
        if decay != 0.0 and own not in (0.0, decay):
            raise _make_difference_error(member, "weight_decay", own, decay)
        decay = own or decay
    return decay


def _make_difference_error(
    member: TrainedParameter, key: str, value: Any, known: Any
) -> UnsupportedError:
    return UnsupportedError(
        f"{member.fqn!r}",
        f"has {key} {value!r}, but others {known!r}: Megatron has no such group",
        "pass equal groups with --param-groups FILE, or write the weights with --weights-only",
    )


def _complete_hyper(hyper: Mapping[str, Any], *, fused: bool) -> dict[str, Any]:
    completed = {
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        _SINCE_016: True,
        **{key: value for key, value in hyper.items() if key != "param_names"},
    }
    completed.pop("step", None)
    if not fused:
        return completed
    for key in _TORCH_ONLY:  # settings of torch's AdamW, which the fused Adams lack
        completed.pop(key, None)
    completed.setdefault("bias_correction", True)
    return completed


def find_common_count(
    members: Iterable[TrainedParameter], state: WritableState, why: str
) -> float | None:
    """Return how many updates the parameters have seen; None if nothing counts them.

    The run's own counter is another number: Megatron skips the update of a step whose gradients
    overflow.

    Args:
        why: why the number must be the same for all of them.

    Raises:
        UnsupportedError: they have seen different numbers of updates.
    """
    counts = {member.step for member in members if member.step is not None}
    if len(counts) > 1:
        numbers = abridge([f"{count:g}" for count in sorted(counts)], _SHOWN)
        raise UnsupportedError(
            state.manifest.origin.path,
            f"has parameters that were updated {numbers} times, but {why}",
            "write --ckpt-format torch --adam torch --no-distributed-optimizer, which counts the"
            " updates of each parameter",
        )
    return next(iter(counts), None)


def count_updates(members: Iterable[TrainedParameter], state: WritableState) -> int:
    """Return the number of updates of a group, for an optimizer that counts those of groups."""
    why = "this optimizer counts the updates of a param group"
    count = find_common_count(members, state, why)
    known = state.manifest.train.optimizer_step.values()
    return int(max(known, default=state.step) if count is None else count)


def _name_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    return ", ".join(sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k)))
