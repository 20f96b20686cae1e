"""Pipeline stages: the param groups and the scheduler of each, and the same for other stages.

nanotron's trainer makes one param group per parameter (``helpers.py``,
``init_optimizer_and_grad_accumulator``), and its scheduler has one value per group, so that the
stages' schedulers differ in length. The optimizer of a script may have the same few groups on every
stage.

nanotron chooses the stage of each block by the costs of the blocks (nanotron at 2411b02
``models/base.py``, ``build_model``, and ``models/{llama,qwen,starcoder2}.py``,
``get_block_compute_costs``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from reshard.core.join import join_groups
from reshard.core.manifest import ParamGroup
from reshard.errors import UnsupportedError, UsageError
from reshard.training.param_groups import PER_GROUP

_INSIDE = ".pp_block."
_GroupIndex = tuple[int, int]  # (stage, number of a group there)


@dataclass(frozen=True, slots=True)
class Stage:
    """The param groups and the scheduler of the ranks of one stage."""

    groups: tuple[ParamGroup, ...]
    scheduler: Any = None


def join_stages(stages: Sequence[Stage]) -> Stage:
    """Return the groups and the scheduler of a single stage of all parameters."""
    indices = _find_groups(stages)
    if indices is not None:
        return _pick_groups(stages, indices.values())
    groups = join_groups(stage.groups for stage in stages)
    return Stage(tuple(groups), stages[0].scheduler if stages else None)


def refuse_empty(stages: Sequence[Sequence[str]]) -> None:
    """Refuse stages without a parameter.

    Args:
        stages: the names of each stage's parameters.

    Raises:
        UsageError: a stage has none.
    """
    empty = next((stage for stage, fqns in enumerate(stages) if not fqns), None)
    if empty is not None:
        raise UsageError(
            f"--pp {len(stages)}",
            f"leaves stage {empty} without a parameter, because nanotron balances stages by the"
            " cost of blocks; nanotron cannot train such a model",
            "pass a smaller --pp",
        )


def is_one_each(stages: Sequence[Stage]) -> bool:
    """Return whether every parameter is in a group of its own, as in nanotron's trainer."""
    return all(len(group.fqns) == 1 for stage in stages for group in stage.groups)


def redistribute(
    path: str, stages: Sequence[Stage], fqns: Sequence[Sequence[str]]
) -> tuple[Stage, ...]:
    """Return the groups and schedulers of other stages, given the parameters of each.

    Raises:
        UnsupportedError: groups or schedulers differ between stages.
    """
    for one, two in pairwise(stages):
        if _drop_per_group(one.scheduler) != _drop_per_group(two.scheduler):
            raise UnsupportedError(
                path,
                "its stages' schedulers are at different steps, so the schedulers of other stages"
                " cannot be derived",
                "keep the source's --pp",
            )
    indices = _find_groups(stages)
    if indices is not None:
        return tuple(_pick_groups(stages, (indices[fqn] for fqn in names)) for names in fqns)
    hypers = [[group.hyper for group in stage.groups] for stage in stages]
    if any(one != two for one, two in pairwise(hypers)):
        raise UnsupportedError(
            path,
            "its stages have different param groups of several parameters, so the groups of other"
            " stages cannot be derived",
            "keep the source's --pp",
        )
    same = [
        {fqn for stage in stages for fqn in stage.groups[n].fqns} for n in range(len(hypers[0]))
    ]
    return tuple(
        Stage(
            tuple(
                ParamGroup(hyper, tuple(fqn for fqn in names if fqn in members))
                for hyper, members in zip(hypers[0], same, strict=True)
            ),
            stages[0].scheduler,
        )
        for names in fqns
    )


def _find_groups(stages: Sequence[Stage]) -> dict[str, _GroupIndex] | None:
    if not is_one_each(stages):
        return None
    first: dict[str, _GroupIndex] = {}
    for stage, own in enumerate(stages):
        for number, group in enumerate(own.groups):
            first.setdefault(group.fqns[0], (stage, number))
    return first


def _pick_groups(stages: Sequence[Stage], indices: Iterable[_GroupIndex]) -> Stage:
    chosen = list(indices)
    groups = tuple(stages[stage].groups[number] for stage, number in chosen)
    scheduler = stages[0].scheduler if stages else None
    if not isinstance(scheduler, dict):
        return Stage(groups, scheduler)
    return Stage(
        groups,
        {
            key: [stages[stage].scheduler[key][number] for stage, number in chosen]
            if key in PER_GROUP and _has_value_per_group(stages, key)
            else value
            for key, value in scheduler.items()
        },
    )


def _has_value_per_group(stages: Sequence[Stage], key: str) -> bool:
    lists = [stage.scheduler.get(key) for stage in stages if isinstance(stage.scheduler, dict)]
    return len(lists) == len(stages) and all(
        isinstance(values, list) and len(values) == len(stage.groups)
        for values, stage in zip(lists, stages, strict=True)
    )


def _drop_per_group(scheduler: Any) -> Any:
    if not isinstance(scheduler, dict):
        return scheduler
    return {key: value for key, value in scheduler.items() if key not in PER_GROUP}


# Which parameters a stage has


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a model, and the parameters of each.

    Args:
        cost: cost of each block with parameters, in the model's order.
        members: the parameters of a block; those of a tied head are the embedding's.
    """

    cost: Mapping[str, int]
    members: Mapping[str, tuple[str, ...]]

    def assign_stages(self, ranks: int) -> list[tuple[str, ...]]:
        """Return the parameters of each stage, in the model's order; a tied one may be in two."""
        by_stage: list[dict[str, None]] = [{} for _ in range(ranks)]
        for block, stage in zip(
            self.cost, assign_stages([*self.cost.values()], ranks), strict=True
        ):
            by_stage[stage].update(dict.fromkeys(self.members[block]))
        return [tuple(stage) for stage in by_stage]


def list_blocks(path: str, config: Mapping[str, Any] | None, fqns: Iterable[str]) -> Blocks:
    """Return the blocks of a model, with the parameters of each.

    Args:
        config: ``model_config.json`` beside the source.
        fqns: every parameter, those of one block in the model's order.

    Raises:
        UsageError: the costs of the blocks are not known.
        UnsupportedError: a parameter is in no block of nanotron's model.
    """
    cost = list_costs(config) if config else {}
    if not cost:
        raise UsageError(
            "--pp",
            "differs from the source's number of stages. nanotron assigns layers to stages by their"
            " compute cost, which requires the model_config.json of a Llama, Qwen2 or Starcoder2"
            " beside the source",
            "copy the file that nanotron's trainer wrote there, or keep the source's --pp",
        )
    members: dict[str, list[str]] = {block: [] for block in cost}
    for fqn in fqns:
        block, inside, _ = fqn.partition(_INSIDE)
        if not inside or block not in members:
            raise UnsupportedError(
                path,
                f"{fqn!r} is in none of the blocks of the model that its model_config.json"
                f" describes: {', '.join(cost)}",
                "keep the source's --pp",
            )
        members[block].append(fqn)
    first, *_, head = members
    # A tied head has no file of its own, but its stage holds a copy of the embedding.
    if not members[head]:
        members[head] = [fqn for fqn in members[first] if fqn.endswith("token_embedding.weight")]
    for block, names in members.items():
        if not names:
            raise UnsupportedError(
                path, f"has no parameter of {block}, which its model_config.json implies"
            )
    return Blocks(cost, {block: tuple(names) for block, names in members.items()})


HEAD = "model.lm_head"
_LAYER = "model.decoder"


@dataclass(frozen=True, slots=True)
class _ModelKind:
    """Differences between nanotron's models.

    Args:
        flag: key of ``model_config.json`` that identifies the model.
        first: the block of the embedding.
        matrices: number of matrices of equal size in a layer's MLP.
    """

    flag: str
    first: str
    matrices: int


_FAMILIES = (
    _ModelKind("is_llama_config", "model.token_position_embeddings", 3),
    _ModelKind("is_qwen2_config", "model.token_position_embeddings", 3),
    _ModelKind("is_starcoder2_config", "model.token_embeddings", 2),
)


def list_costs(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the cost of each block with parameters, in the model's order.

    The result is empty if the configuration is not one of a known model.
    """
    family = next((family for family in _FAMILIES if config.get(family.flag) is True), None)
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    sizes = [size for name in names if type(size := config.get(name)) is int and size > 0]
    if family is None or len(sizes) < len(names):
        return {}
    layers, heads, hidden, vocab_size = sizes
    width = config.get("intermediate_size")
    if width is None and family.matrices == 2:  # only Starcoder2 has a default
        width = 4 * hidden
    if type(width) is not int:
        return {}
    # Four projections of attention; key and value heads count in full, as in nanotron's formula.
    layer = 4 * heads * (hidden // heads) * hidden + family.matrices * width * hidden
    return {
        family.first: 0,
        **{f"{_LAYER}.{number}": layer for number in range(layers)},
        "model.final_layer_norm": 0,
        HEAD: vocab_size * hidden,
    }


def assign_stages(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the stage of each block: a stage ends with the block that exceeds its share.

    >>> assign_stages([0, 40, 40, 40, 0, 16], 2), assign_stages([0, 40, 40, 40, 0, 500], 3)
    ([0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0])
    """
    # The operations and their order are those of ``build_model``: a share that is rounded
    # differently can move a block to another stage.
    shares = [float(sum(costs)) * ((rank + 1) / ranks) for rank in range(ranks)]
    assigned, stage = list[int](), 0
    for so_far in accumulate(costs):
        assigned.append(stage)
        stage += so_far > shares[stage]
    return assigned
