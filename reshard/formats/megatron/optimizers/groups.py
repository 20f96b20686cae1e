"""Megatron's param groups: which parameters are in which, and in what order the optimizer has them.

Groups differ in how they update their members: no weight decay for vectors (biases, norms), another
learning rate for the embedding and the output layer or, with muP, for the matrices of layers,
separate groups for experts. Within a group parameters are in the order of ``named_parameters``,
chunk after chunk; the optimizer numbers them through all groups.

Source: Megatron-LM core_v0.16.1 ``core/optimizer/__init__.py`` (_get_param_groups,
get_standard_config_overrides), core_v0.19.2 (get_mup_config_overrides). Before core 0.9 a group has
no ``is_expert_parallel``, and before Megatron-LM 2.3 no ``wd_mult``: ``weight_decay`` is 0 then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.core.box import Index
from reshard.formats.megatron import grouped, names
from reshard.formats.megatron.arguments import Arguments
from reshard.layouts.model_parallel.rules import Table

_QK = ("q_layernorm.", "k_layernorm.")
_ENDS = (
    names.EMBEDDING,
    names.OUTPUT,
    names.LEGACY_EMBEDDING,
    "language_model.output_layer.weight",
    names.LEGACY_OUTPUT,
)
_DEFAULT, _DECOUPLED, _SCALED = "default", "decoupled", "scaled by muP"  # schedules
_OPTIMIZER = "optimizer"  # in a group: the optimizer, if it is not that of the matrices
_MUONS = frozenset(("momentum_beta", "use_nesterov", "num_ns_steps"))


@dataclass(frozen=True, slots=True)
class GroupKind:
    """The properties that tell param groups apart."""

    decays: bool
    expert: bool
    schedule: str = _DEFAULT


def _classify_param(fqn: str, shape: Index, args: Arguments, table: Table) -> GroupKind:
    is_exempt = args.flag("apply_wd_to_qk_layernorm") and any(part in fqn for part in _QK)
    return GroupKind(
        decays=(len(shape) != 1 and not fqn.endswith(".bias")) or is_exempt,
        expert=is_expert(fqn, args, table),
        schedule=_find_schedule(fqn, shape, args),
    )


def _find_schedule(fqn: str, shape: Index, args: Arguments) -> str:
    if args.values.get("decoupled_lr") is not None and fqn in _ENDS:
        return _DECOUPLED
    optimizer = str(args.values.get("optimizer"))
    if not _has_mup(args) or ("muon" in optimizer and is_matrix(fqn, shape)):
        return _DEFAULT
    is_matrix_of_layer = len(shape) > 1 and fqn not in _ENDS and not fqn.startswith("embedding.")
    # Adam scales the rates of the layers' matrices, SGD those of all other parameters.
    return _SCALED if is_matrix_of_layer != (optimizer == "sgd") else _DEFAULT


def _has_mup(args: Arguments) -> bool:
    width = args.number("hidden_size")
    return args.flag("use_mup") and args.number("mup_base_hidden_size", default=width) != width


def is_expert(fqn: str, args: Arguments, table: Table) -> bool:
    """Return whether a parameter is an expert's whose gradients are reduced among other ranks.

    Source: ``core/transformer/moe/experts.py`` (``allreduce``). That is so with expert parallelism.
    """
    return args.ep > 1 and (names.find_expert(fqn, table) is not None or grouped.is_grouped(fqn))


def is_matrix(fqn: str, shape: Index) -> bool:
    """Return whether Muon updates a parameter, in a run that has Muon and Adam.

    Adam updates all others (``core/optimizer/muon.py``, ``get_megatron_muon_optimizer``).
    """
    return len(shape) == 2 and fqn not in _ENDS


def updates_matrices(
    groups: Sequence[Mapping[str, Any]], chain: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether the groups are of Muon, or of another optimizer that updates matrices alone.

    Since core 0.18 (``core/optimizer/emerging_optimizers.py``) it may be Lion, SOAP and others; the
    groups of all other parameters then state their optimizer. The package ``emerging_optimizers``
    names a setting of Muon ``momentum_beta``, 0.3 ``momentum``, as torch's SGD does, which has
    ``dampening`` besides.

    Args:
        groups: the groups of one optimizer.
        chain: the groups of all optimizers of the run.
    """
    others_are_named = any(_OPTIMIZER in group for group in chain)
    return any(
        (others_are_named and _OPTIMIZER not in group)
        or (
            "betas" not in group
            and (not _MUONS.isdisjoint(group) or ("momentum" in group and "dampening" not in group))
        )
        for group in groups
    )


def _classify_group(group: Mapping[str, Any], args: Arguments) -> GroupKind:
    scale = group.get("wd_mult", group.get("pre_wd_mult", group.get("weight_decay", 1.0)))
    schedule = _DEFAULT
    # ``default_config`` is False for a group that overrides the learning rate's schedule.
    if group.get("is_decoupled_lr") is True or group.get("default_config") is False:
        decoupled = args.values.get("decoupled_lr")
        is_scaled = _has_mup(args) and (decoupled is None or group.get("max_lr") != decoupled)
        schedule = _SCALED if is_scaled else _DECOUPLED
    return GroupKind(scale != 0, group.get("is_expert_parallel") is True, schedule)


def assign_members(
    groups: Sequence[Mapping[str, Any]],
    params: Mapping[str, Index],
    args: Arguments,
    table: Table,
) -> list[list[str]]:
    """Return the parameters of each group, in its order.

    Args:
        groups: the stored groups; of two of the same kind the first has all members.
        params: name -> shape, in the order of ``named_parameters``.
    """
    kinds = [_classify_group(group, args) for group in groups]
    members: list[list[str]] = [[] for _ in groups]
    for fqn, shape in params.items():
        kind = _classify_param(fqn, shape, args, table)
        if kind in kinds:
            members[kinds.index(kind)].append(fqn)
    return members


def explain_unassigned(
    groups: Sequence[Mapping[str, Any]], params: Mapping[str, Index], args: Arguments, table: Table
) -> str:
    """Return why the rules do not tell which group each parameter is in; empty if they do.

    Args:
        groups: the stored groups, which do not list their members.
    """
    kinds = [_classify_group(group, args) for group in groups]
    # A kind of the model may have no group, if all of its parameters are frozen.
    wanted = {_classify_param(fqn, shape, args, table) for fqn, shape in params.items()}
    is_strange = any(k.schedule != _DEFAULT and k not in wanted for k in kinds)
    if len(set(kinds)) == len(kinds) and not is_strange:
        return ""
    return "they are not those that Megatron makes of this model, and do not list their members"
