"""Pipeline stages: what each trains, by which schedule; and the same on another number of them.

nanotron's trainer has a param group of each parameter (``helpers.py``,
``init_optimizer_and_grad_accumulator``), and its scheduler a value of each group: the stages' own
differ in length. An optimizer that a script made may have the same few groups on every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from reshard.errors import UnsupportedError, UsageError
from reshard.formats.groups import PER_GROUP
from reshard.formats.nanotron import costs
from reshard.join import join_groups
from reshard.manifest import ParamGroup

_INSIDE = ".pp_block."
_Place = tuple[int, int]  # of a group: its stage, its number there


@dataclass(frozen=True, slots=True)
class Stage:
    """What the ranks of one stage have in their optimizers."""

    groups: tuple[ParamGroup, ...]
    scheduler: Any = None


def together(held: Sequence[Stage]) -> Stage:
    """What one stage of all parameters has."""
    places = _places(held)
    if places is not None:
        return _picked(held, places.values())
    groups = join_groups(stage.groups for stage in held)
    return Stage(tuple(groups), held[0].scheduler if held else None)


def is_one_each(held: Sequence[Stage]) -> bool:
    """Whether every parameter is in a group of its own, as nanotron's trainer has it."""
    return all(len(group.fqns) == 1 for stage in held for group in stage.groups)


def dealt(path: str, held: Sequence[Stage], fqns: Sequence[Sequence[str]]) -> tuple[Stage, ...]:
    """What other stages have, by the parameters of each in the model's order.

    Raises:
        UnsupportedError: groups or schedulers that tell stages apart.
    """
    for one, two in pairwise(held):
        if _common(one.scheduler) != _common(two.scheduler):
            raise UnsupportedError(
                path, "its stages' schedulers are not at the same step", "write it at its own --pp"
            )
    places = _places(held)
    if places is not None:
        return tuple(_picked(held, (places[fqn] for fqn in each)) for each in fqns)
    hypers = [[group.hyper for group in stage.groups] for stage in held]
    if any(one != two for one, two in pairwise(hypers)):
        raise UnsupportedError(
            path,
            "its stages have other param groups each, and more than a parameter in one: which"
            " ones other stages would have is not known",
            "write it at its own --pp",
        )
    same = [{fqn for stage in held for fqn in stage.groups[n].fqns} for n in range(len(hypers[0]))]
    return tuple(
        Stage(
            tuple(
                ParamGroup(hyper, tuple(fqn for fqn in each if fqn in members))
                for hyper, members in zip(hypers[0], same, strict=True)
            ),
            held[0].scheduler,
        )
        for each in fqns
    )


def _places(held: Sequence[Stage]) -> dict[str, _Place] | None:
    """The group of each parameter, its first where it is tied, if each has one of its own."""
    if not is_one_each(held):
        return None
    made: dict[str, _Place] = {}
    for stage, each in enumerate(held):
        for number, group in enumerate(each.groups):
            made.setdefault(group.fqns[0], (stage, number))
    return made


def _picked(held: Sequence[Stage], places: Iterable[_Place]) -> Stage:
    """The groups at these places, and a scheduler with the values of these groups."""
    chosen = list(places)
    groups = tuple(held[stage].groups[number] for stage, number in chosen)
    scheduler = held[0].scheduler if held else None
    if not isinstance(scheduler, dict):
        return Stage(groups, scheduler)
    return Stage(
        groups,
        {
            key: [held[stage].scheduler[key][number] for stage, number in chosen]
            if key in PER_GROUP and _is_a_value_a_group(held, key)
            else value
            for key, value in scheduler.items()
        },
    )


def _is_a_value_a_group(held: Sequence[Stage], key: str) -> bool:
    lists = [each.scheduler.get(key) for each in held if isinstance(each.scheduler, dict)]
    return len(lists) == len(held) and all(
        isinstance(values, list) and len(values) == len(each.groups)
        for values, each in zip(lists, held, strict=True)
    )


def _common(scheduler: Any) -> Any:
    """What a scheduler says beside a value a group."""
    if not isinstance(scheduler, dict):
        return scheduler
    return {key: value for key, value in scheduler.items() if key not in PER_GROUP}


# Which parameters a stage has


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a model, and the parameters of each.

    Args:
        cost: of a block that has parameters, in the model's order.
        members: a block's own; of a tied head, the embedding.
    """

    cost: Mapping[str, int]
    members: Mapping[str, tuple[str, ...]]

    def stages(self, ranks: int) -> list[tuple[str, ...]]:
        """The parameters of each stage, in the model's order; a tied one may be in two."""
        held: list[dict[str, None]] = [{} for _ in range(ranks)]
        for block, stage in zip(self.cost, costs.stages([*self.cost.values()], ranks), strict=True):
            held[stage].update(dict.fromkeys(self.members[block]))
        return [tuple(stage) for stage in held]


def blocks(path: str, config: Mapping[str, Any] | None, fqns: Iterable[str]) -> Blocks:
    """Which parameter is in which block.

    Args:
        config: ``model_config.json`` beside the source.
        fqns: every parameter, those of one block in the model's order.

    Raises:
        UsageError: nothing says what a block costs.
        UnsupportedError: a parameter of no block that nanotron's model has.
    """
    cost = costs.blocks(config) if config else {}
    if not cost:
        raise UsageError(
            "--pp",
            "is another number of stages than the source's, and nanotron gives layers to stages by"
            " what each costs to compute: no model_config.json of a Llama, Qwen2 or Starcoder2"
            " beside the source says that",
            "copy the one of the run there, as nanotron's trainer writes it, or keep the source's",
        )
    members: dict[str, list[str]] = {block: [] for block in cost}
    for fqn in fqns:
        block, inside, _ = fqn.partition(_INSIDE)
        if not inside or block not in members:
            raise UnsupportedError(
                path,
                f"{fqn!r} is in none of the blocks of the model that its model_config.json"
                f" describes: {', '.join(cost)}",
                "write it at its own --pp",
            )
        members[block].append(fqn)
    first, *_, head = members
    if not members[head]:
        members[head] = [fqn for fqn in members[first] if fqn.endswith("token_embedding.weight")]
    for block, held in members.items():
        if not held:
            raise UnsupportedError(
                path, f"has no parameter of {block}, which its model_config.json says there is"
            )
    return Blocks(cost, {block: tuple(held) for block, held in members.items()})
