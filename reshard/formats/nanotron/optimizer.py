"""The ranks' optimizers, by name: each has the state of its own part of every parameter.

A file is ``torch.optim``'s state dict with ``names`` beside (index -> fqn, of what has state) and,
with fp32 gradient accumulation, fp32 copies by name under ``gradient_accumulator``. With ZeRO-1
every tensor but the step is a flat piece of the rank's part (``optim/zero.py``,
``_partition_parameters``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from reshard.box import Index
from reshard.errors import CorruptError, IncompleteError
from reshard.files import SourceFiles
from reshard.formats import torch_file, torch_objects
from reshard.formats.nanotron.directory import Census, RankFile
from reshard.formats.nanotron.slices import Placed
from reshard.formats.torch_objects import Tensor, TorchFile
from reshard.formats.values import plain
from reshard.manifest import MASTER, Chunk, Entry, Key, ParamGroup
from reshard.schema import COUNT, TEXT, expect, fields, mapping, record, sequence

_MIXED = "files of different runs or steps are mixed: fetch the checkpoint again as a whole"
_STEP = "step"
_FILE = record(
    names=mapping(item=TEXT),
    state=mapping(item=mapping()),
    param_groups=sequence(fields(params=sequence(COUNT))),
)

Places = Mapping[str, Mapping[tuple[int, int], Placed]]  # fqn -> (tp, exp) -> its part


@dataclass(slots=True)
class Optimizer:
    """What all ranks' files say together."""

    files: list[TorchFile] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)
    stages: list[list[ParamGroup]] = field(default_factory=list)  # param groups of each
    other: dict[str, Any] = field(default_factory=dict)  # fqn -> state that is no tensor
    unnamed: int = 0  # parameters in groups that have no state, hence no name


def piece(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """The run ``[start, stop)`` of a rank: equal pieces, the last ones shorter by an element.

    >>> [piece(10, 4, rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    size = -(-numel // ranks)
    full = ranks - (size * ranks - numel)  # ranks that have all of a piece
    return tuple(n * size - max(0, n - full) for n in (rank, rank + 1))  # type: ignore[return-value]


def read(census: Census, places: Places, pool: SourceFiles) -> Optimizer:
    """Every slot, step and group.

    Args:
        places: which part of each parameter a rank has, as its weights say.

    Raises:
        CorruptError: ranks that contradict one another, or their weights.
        IncompleteError: a parameter has state and no weights.
    """
    found = Optimizer()
    chunks: dict[Key, tuple[Entry, list[Chunk]]] = {}
    for rank in census.optimizer:
        file = torch_file.read(rank.path)
        found.files.append(file)
        names = _names(file)
        for fqn, kind, tensor in _tensors(file, names):
            place = _place(file, rank, places, fqn)
            _add(chunks, place, (kind, fqn), tensor.chunk, rank)
        _add_loose(found, file, names, pool)
        if all(rank.rank(axis) == 0 for axis in ("dp", "tp", "exp")):
            found.stages.append(_groups(found, file, names))
    found.entries = [
        Entry(e.fqn, e.kind, e.dtype, e.shape, tuple(held)) for e, held in chunks.values()
    ]
    return found


def _names(file: TorchFile) -> dict[Any, str]:
    """Index -> fqn, once it is known that the file has the form of an optimizer.

    Raises:
        CorruptError: it has not.
    """
    expect(file.path, file.root, _FILE)
    expect(file.path, file.root, fields(gradient_accumulator=mapping(TEXT)))
    names: dict[Any, str] = file.root["names"]
    return names


def _tensors(file: TorchFile, names: Mapping[Any, str]) -> Iterable[tuple[str, str, Tensor]]:
    """(fqn, kind, tensor) of everything that has the shape of its parameter.

    Raises:
        CorruptError: state under an index that has no name.
    """
    for index, slots in file.root["state"].items():
        if index not in names:
            raise CorruptError(file.path, f"has state under {index!r}, which names no parameter")
        for kind, value in slots.items():
            if kind != _STEP and isinstance(value, Tensor):
                yield names[index], kind, value
    for fqn, value in file.root.get("gradient_accumulator", {}).items():
        if isinstance(value, Tensor):
            yield fqn, MASTER, value


def _place(file: TorchFile, rank: RankFile, places: Places, fqn: str) -> Placed:
    held = places.get(fqn)
    if held is None:
        raise IncompleteError(
            file.path, f"has state of {fqn!r}, of which model/ has no weights", "copy them here"
        )
    tp, exp = rank.rank("tp"), rank.rank("exp")
    whole = next(iter(held.values())) if len(held) == 1 else None
    found = whole or held.get((tp, exp)) or held.get((tp, 0))  # experts alone name their rank
    if found is None:
        raise CorruptError(file.path, f"has a part of {fqn!r} that no weights have", _MIXED)
    return found


def _add(
    chunks: dict[Key, tuple[Entry, list[Chunk]]],
    place: Placed,
    key: Key,
    stored: Chunk,
    rank: RankFile,
) -> None:
    """The blocks of one rank's tensor.

    Raises:
        CorruptError: it has not the size that its weights have.
    """
    kind, fqn = key
    if "dp" in rank.ranks:
        start, stop = piece(prod(place.local), rank.sizes["dp"], rank.rank("dp"))
        wanted: Index = (stop - start,)
    else:
        start, stop = 0, prod(place.local)
        wanted = place.local
    if stored.box.shape != wanted:
        raise CorruptError(
            stored.file,
            f"the {kind} of {fqn!r} has shape {stored.box.shape}, its weights make it {wanted}",
            _MIXED,
        )
    entry, held = chunks.setdefault(key, (Entry(fqn, kind, stored.dtype, place.shape, ()), []))
    if entry.dtype != stored.dtype:
        raise CorruptError(stored.file, f"the {kind} of {fqn!r} is {stored.dtype}", _MIXED)
    if "dp" in rank.ranks:
        held += place.run_chunks(stored, start, stop)
    else:
        held += place.chunks(stored)


def _add_loose(
    found: Optimizer, file: TorchFile, names: Mapping[Any, str], pool: SourceFiles
) -> None:
    """Steps, which all ranks must agree on, and what is neither.

    Raises:
        CorruptError: they do not.
    """
    for index, slots in file.root["state"].items():
        fqn = names[index]
        value = slots.get(_STEP)
        if isinstance(value, Tensor):
            value = torch_objects.number_at(pool, value.chunk)
        if isinstance(value, (int, float)):
            step = found.steps.setdefault(fqn, float(value))
            if step != value:
                raise CorruptError(
                    file.path,
                    f"the optimizer's step of {fqn!r} is {value}, {step} elsewhere",
                    _MIXED,
                )
        other = {k: plain(v) for k, v in slots.items() if k != _STEP and not isinstance(v, Tensor)}
        if other:
            found.other[fqn] = other


def _groups(found: Optimizer, file: TorchFile, names: Mapping[Any, str]) -> list[ParamGroup]:
    """A pipeline stage's groups."""
    made = []
    for group in file.root["param_groups"]:
        hyper = {str(name): plain(value) for name, value in group.items() if name != "params"}
        indices = group.get("params", ())
        fqns = tuple(names[index] for index in indices if index in names)
        found.unnamed += len(indices) - len(fqns)
        made.append(ParamGroup(hyper, fqns))
    return made
