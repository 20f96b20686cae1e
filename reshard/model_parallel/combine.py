"""The manifests of model-parallel ranks made one: pieces gathered, stages joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.box import Index
from reshard.errors import CorruptError, IncompleteError
from reshard.manifest import Entry, Key, Manifest, ParamGroup, TrainState, keyed
from reshard.model_parallel.moves import side_by_side
from reshard.model_parallel.shards import Split, gathered

SplitOf = Callable[[str, Index], Split]
_MIXED = "files of different runs or steps are mixed: fetch the checkpoint again as a whole"


def tensor_ranks(ranks: Sequence[Manifest], split_of: SplitOf) -> Manifest:
    """The manifests of tensor-parallel ranks of one stage, in rank order, made one.

    Args:
        split_of: how a parameter is cut, by its name and the first rank's shape of it.

    Raises:
        IncompleteError: a rank lacks a tensor that another has.
        CorruptError: the pieces do not fit together.
    """
    names = dict.fromkeys(key for rank in ranks for key in rank.entries)
    entries = []
    for key in names:
        held = next(rank.entries[key] for rank in ranks if key in rank.entries)
        pieces = [rank.entries.get(key) or _nothing(rank, held) for rank in ranks]
        entries.append(gathered(pieces, split_of(key[1], pieces[0].shape)))
    return joined(ranks, entries)


def _nothing(rank: Manifest, held: Entry) -> Entry:
    """The piece of a rank whose part of the parameter is empty: optimizers leave such parts out.

    Raises:
        IncompleteError: its part is not known to be empty.
    """
    parts = (entry for entry in rank.entries.values() if entry.fqn == held.fqn and not entry.numel)
    part = next(parts, None)
    if part is None:
        raise IncompleteError(
            rank.origin.path, f"lacks the {held.kind} {held.fqn!r} that other ranks hold", _MIXED
        )
    return replace(held, shape=part.shape, chunks=())


def stages(ranks: Sequence[Manifest]) -> Manifest:
    """The manifests of pipeline stages, or of expert-parallel ranks, in rank order, made one.

    A tensor that several hold is a replica on each.

    Raises:
        CorruptError: they hold it in different shapes or dtypes.
    """
    found: dict[Key, Entry] = {}
    for rank in ranks:
        for key, entry in rank.entries.items():
            held = found.get(key)
            if held is None:
                found[key] = entry
                continue
            if (held.shape, held.dtype) != (entry.shape, entry.dtype):
                raise CorruptError(
                    rank.origin.path,
                    f"{entry.fqn!r} ({entry.kind}) is {entry.dtype.name} {entry.shape}, and"
                    f" {held.dtype.name} {held.shape} on another rank",
                    _MIXED,
                )
            found[key] = replace(held, chunks=side_by_side(held.chunks, entry.chunks))
    return joined(ranks, found.values())


def joined(ranks: Sequence[Manifest], entries: Iterable[Entry]) -> Manifest:
    """The first rank's manifest with these entries, and with what the others add.

    Raises:
        CorruptError: two ranks say different things of the training state.
    """
    first = ranks[0]
    return replace(
        first,
        entries=keyed(entries),
        files={path: file for rank in ranks for path, file in rank.files.items()},
        train=_train([(next(iter(rank.files), rank.origin.path), rank.train) for rank in ranks]),
        tied={alias: kept for rank in ranks for alias, kept in rank.tied.items()},
        tied_again=tuple(entry for rank in ranks for entry in rank.tied_again),
        frozen=frozenset().union(*(rank.frozen for rank in ranks)),
        trained_dtypes={n: dtype for rank in ranks for n, dtype in rank.trained_dtypes.items()},
        wrapped={n: listed for rank in ranks for n, listed in rank.wrapped.items()},
        absent=tuple(dict.fromkeys(name for rank in ranks for name in rank.absent)),
        warnings=tuple(dict.fromkeys(text for rank in ranks for text in rank.warnings)),
        unread={name: what for rank in ranks for name, what in rank.unread.items()},
        unknown_globals=tuple(sorted({g for rank in ranks for g in rank.unknown_globals})),
        ordered=all(rank.ordered for rank in ranks),
    )


def _train(states: Sequence[tuple[str, TrainState]]) -> TrainState:
    path, first = states[0]
    steps = dict(first.optimizer_step)
    for other, state in states[1:]:
        if state.step != first.step:
            raise CorruptError(
                other, f"is of step {state.step}, {Path(path).name} of {first.step}", _MIXED
            )
        for fqn, step in state.optimizer_step.items():
            if steps.setdefault(fqn, step) != step:
                raise CorruptError(
                    other,
                    f"{fqn!r} was updated {step:g} times, {steps[fqn]:g} on another rank",
                    _MIXED,
                )
    groups = _groups([state.param_groups for _, state in states])
    return replace(first, optimizer_step=steps, param_groups=groups)


def _groups(ranks: Sequence[tuple[ParamGroup, ...]]) -> tuple[ParamGroup, ...]:
    """Groups with the same hyper-parameters are one; a stage may lack one that another has."""
    found: list[tuple[Mapping[str, Any], dict[str, None]]] = []
    for groups in ranks:
        taken: set[int] = set()
        for group in groups:
            at = next(
                (
                    i
                    for i, (known, _) in enumerate(found)
                    if i not in taken and known == group.hyper
                ),
                None,
            )
            if at is None:
                at = len(found)
                found.append((group.hyper, {}))
            taken.add(at)
            found[at][1].update(dict.fromkeys(group.fqns))
    return tuple(ParamGroup(hyper, tuple(fqns)) for hyper, fqns in found)
