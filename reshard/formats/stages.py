"""Pipeline stages: each holds the state of its own parameters; together they are the model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.errors import CorruptError
from reshard.manifest import Manifest, ParamGroup, keyed


def param_groups(stages: Iterable[Sequence[ParamGroup]]) -> list[ParamGroup]:
    """The groups of all stages: one with the settings of an earlier stage's is part of it.

    >>> first, second = ParamGroup({"lr": 1}, ("a",)), ParamGroup({"lr": 1}, ("a", "b"))
    >>> [group.fqns for group in param_groups([[first], [second, ParamGroup({"lr": 2}, ("c",))]])]
    [('a', 'b'), ('c',)]
    """
    made: list[ParamGroup] = []
    for stage in stages:
        earlier = list(range(len(made)))
        for group in stage:
            same = next((n for n in earlier if made[n].hyper == group.hyper), None)
            if same is None:
                made.append(group)
            else:
                earlier.remove(same)
                fqns = dict.fromkeys((*made[same].fqns, *group.fqns))  # tied: on two stages
                made[same] = ParamGroup(group.hyper, tuple(fqns))
    return made


def joined(stages: Sequence[Manifest]) -> Manifest:
    """The checkpoint that its stages are together, the first one first; no two share a parameter.

    Raises:
        CorruptError: they were not saved together.
    """
    first = stages[0]
    for other in stages[1:]:
        if other.train.step != first.train.step:
            raise CorruptError(
                first.origin.path,
                f"holds ranks at step {first.train.step} and at step {other.train.step}",
                "files of different runs or steps are mixed: fetch the checkpoint again as a whole",
            )
    ranks = sum(stage.origin.world for stage in stages)
    trains = [stage.train for stage in stages]
    return replace(
        first,
        origin=replace(first.origin, mesh={"world": ranks, "pp": len(stages)}),
        entries=keyed(entry for stage in stages for entry in stage.entries.values()),
        files=_united(stage.files for stage in stages),
        train=replace(
            first.train,
            optimizer_step=_united(train.optimizer_step for train in trains),
            loose=_united(train.loose for train in trains),
            param_groups=tuple(param_groups(train.param_groups for train in trains)),
            opaque=_opaque([train.opaque for train in trains]),
        ),
        tied=_united(stage.tied for stage in stages),
        tied_again=tuple(entry for stage in stages for entry in stage.tied_again),
        frozen=frozenset().union(*(stage.frozen for stage in stages)),
        trained_dtypes=_united(stage.trained_dtypes for stage in stages),
        absent=tuple(fqn for stage in stages for fqn in stage.absent),
        warnings=tuple(dict.fromkeys(text for stage in stages for text in stage.warnings)),
        unread=_united(stage.unread for stage in stages),
        unknown_globals=tuple(sorted({name for s in stages for name in s.unknown_globals})),
        ordered=all(stage.ordered for stage in stages),
    )


def _united(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for table in tables for name, value in table.items()}


def _opaque(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tables by name of all stages; of anything else the first stage's."""
    return {
        name: _united(table for stage in stages if isinstance(table := stage.get(name), Mapping))
        if isinstance(value, Mapping)
        else value
        for stage in reversed(stages)
        for name, value in stage.items()
    }
