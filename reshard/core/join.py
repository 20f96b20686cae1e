"""Join the manifests of ranks or pipeline stages into the manifest of the whole training state.

Each field of a manifest and of its training state has one rule here; a test holds the two tables to
the fields of the classes, so that no new field is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.core.manifest import Entry, Manifest, ParamGroup, TrainState, index_entries
from reshard.errors import MIXED, CorruptError

Combine = Callable[[Sequence[Any]], Any]


def join(parts: Sequence[Manifest], entries: Iterable[Entry] | None = None) -> Manifest:
    """Return one manifest for all parts, with the values of the first part first.

    Args:
        entries: the entries of the result; None for those of all parts, none of which may have
            a tensor in common.

    Raises:
        CorruptError: two parts have different steps, or different update counts of a parameter.
    """
    _check_steps(parts)
    if entries is None:
        entries = (entry for part in parts for entry in part.entries.values())
    joined = {name: rule([getattr(m, name) for m in parts]) for name, rule in MANIFEST.items()}
    return replace(parts[0], entries=index_entries(entries), **joined)


def _join_train(states: Sequence[TrainState]) -> TrainState:
    joined = {name: rule([getattr(s, name) for s in states]) for name, rule in TRAIN.items()}
    return replace(states[0], **joined)


def join_groups(parts: Iterable[Sequence[ParamGroup]]) -> tuple[ParamGroup, ...]:
    """Return the param groups of all parts; a group with an earlier part's settings joins it.

    >>> first, second = ParamGroup({"lr": 1}, ("a",)), ParamGroup({"lr": 1}, ("a", "b"))
    >>> [group.fqns for group in join_groups([[first], [second, ParamGroup({"lr": 2}, ("c",))]])]
    [('a', 'b'), ('c',)]
    """
    joined: list[tuple[Mapping[str, Any], dict[str, None]]] = []
    for groups in parts:
        earlier = list(range(len(joined)))
        for group in groups:
            same = next((n for n in earlier if joined[n][0] == group.hyper), None)
            if same is None:
                joined.append((group.hyper, dict.fromkeys(group.fqns)))
            else:
                earlier.remove(same)  # two groups of one part stay two, also if they are equal
                joined[same][1].update(dict.fromkeys(group.fqns))  # a tied name is on two stages
    return tuple(ParamGroup(hyper, tuple(fqns)) for hyper, fqns in joined)


def _check_steps(parts: Sequence[Manifest]) -> None:
    first = parts[0]
    updates = dict(first.train.optimizer_step)
    for other in parts[1:]:
        if other.train.step != first.train.step:
            raise CorruptError(
                _find_file(other),
                f"was saved at step {other.train.step}, but {Path(_find_file(first)).name} at step"
                f" {first.train.step}",
                MIXED,
            )
        for fqn, step in other.train.optimizer_step.items():
            if updates.setdefault(fqn, step) != step:
                raise CorruptError(
                    _find_file(other),
                    f"{fqn!r} was updated {step:g} times, but {updates[fqn]:g} times on another"
                    " rank",
                    MIXED,
                )


def _find_file(part: Manifest) -> str:
    return next(iter(part.files), part.origin.path)


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def _first_given(values: Sequence[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _agreed(values: Sequence[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else None


def _united(tables: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    united: dict[Any, Any] = {}
    for table in tables:
        for key, value in table.items():
            united.setdefault(key, value)
    return united


def _each_once(lists: Sequence[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(value for values in lists for value in values))


def _one_after_another(lists: Sequence[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(value for values in lists for value in values)


def _any_of(sets: Sequence[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def _sorted(lists: Sequence[Iterable[str]]) -> tuple[str, ...]:
    return tuple(sorted({value for values in lists for value in values}))


def _tables(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each value of the first part that has it; tables are joined key by key."""
    return {
        name: _united([table for part in parts if isinstance(table := part.get(name), Mapping)])
        if isinstance(value, Mapping)
        else value
        for name, value in _united(parts).items()
    }


TRAIN: Mapping[str, Combine] = {
    "step": _first,  # the same in all, see `_check_steps`
    "skipped_steps": _first,
    "samples": _first,
    "optimizer_step": _united,
    "updates_at_start": _first,
    "sums_optimizers": _first,
    "non_tensor_state": _united,
    "param_groups": join_groups,
    "scheduler": _first,
    "scaler": _first,
    "clip": _first,
    "rng": _first,  # a manifest has the first rank's
    "rng_files": _each_once,
    "kept_files": _united,
    "hook_files": _united,
    "client": _first,
    "trainer_state": _first,
    "config": _first,
    "opaque": _tables,
    "objects": _first,  # they belong to `client` and `config`
    "keys": _first,
}
MANIFEST: Mapping[str, Combine] = {  # every field except the entries
    "origin": _first,
    "files": _united,
    "read_files": _each_once,
    "train": _join_train,
    "tied": _united,
    "tied_copies": _one_after_another,
    "unused_copies": _one_after_another,
    "frozen": _any_of,
    "trained_dtypes": _united,
    "placements": _united,
    "wrapped_names": _united,
    "may_be_ddp": any,
    "unnamed_optimizers": _each_once,
    "unnamed": _first_given,
    "checkpoint_below": _first,  # set after the parts are joined
    "absent": _each_once,
    "warnings": _each_once,
    "unknown_globals": _sorted,
    "unread": _united,
    "unread_files": _united,
    "ordered": all,
    "without_frozen": any,
    "keyed": _agreed,
    "ordered_by_model": any,
    "quantisation": _first_given,
    "all_buffers_marked": all,
}
