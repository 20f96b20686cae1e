"""Read the ranks' optimizers, by name: each has the state of its part of every parameter.

A file is ``torch.optim``'s state dict with ``names`` (index -> fqn, of parameters with state) and,
with fp32 gradient accumulation, fp32 copies by name under ``gradient_accumulator``. With ZeRO-1
every tensor except the step is a flat piece of the rank's part (``optim/zero.py``,
``_partition_parameters``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from reshard.containers import torch_objects, torch_reader
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.core.box import Index
from reshard.core.chunks import Chunk
from reshard.core.manifest import MASTER, Entry, Key, ParamGroup
from reshard.core.schema import COUNT, TEXT, expect, fields, mapping, record, sequence
from reshard.errors import MIXED, CorruptError, IncompleteError
from reshard.state_dict.optimizers.hyper_parameters import read_hyper
from reshard.state_dict.optimizers.states import ParsedOptimizer
from reshard.state_dict.plain_values import to_plain
from reshard.system.files import SourceFiles
from reshard.system.threads import map_files
from reshard_nanotron.directory import CheckpointFiles, NamedFile
from reshard_nanotron.slices import TensorShard

_STEP = "step"
_FILE = record(
    names=mapping(item=TEXT),
    state=mapping(item=mapping()),
    param_groups=sequence(fields(params=sequence(COUNT))),
)

PartTable = Mapping[str, Mapping[tuple[int, int], TensorShard]]  # fqn -> (tp, exp) -> its part


@dataclass(slots=True)
class StagedOptimizer(ParsedOptimizer):
    """The joined content of all ranks' files, with the param groups of each pipeline stage."""

    files: list[TorchFile] = field(default_factory=list)
    stages: list[list[ParamGroup]] = field(default_factory=list)
    unnamed: int = 0  # number of parameters without state, and therefore without a name


def compute_piece(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the run ``[start, stop)`` of a rank: equal pieces, the last ones one element shorter.

    >>> [compute_piece(10, 4, rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    size = -(-numel // ranks)
    full = ranks - (size * ranks - numel)  # number of ranks with a full piece
    return tuple(n * size - max(0, n - full) for n in (rank, rank + 1))  # type: ignore[return-value]


def read(listed: CheckpointFiles, parts: PartTable, pool: SourceFiles) -> StagedOptimizer:
    """Read every slot, step and group.

    Args:
        parts: the part of each parameter that a rank has, according to its weights.

    Raises:
        CorruptError: ranks contradict each other, or their weights.
        IncompleteError: a parameter has state but no weights.
    """
    parsed = StagedOptimizer()
    chunks: dict[Key, tuple[Entry, list[Chunk]]] = {}
    opened = map_files([rank.path for rank in listed.optimizer], torch_reader.read)
    for rank, file in zip(listed.optimizer, opened, strict=True):
        parsed.files.append(file)
        names = _check_names(file)
        for fqn, kind, tensor in _iterate_tensors(file, names):
            part = _find_part(file, rank, parts, fqn)
            _add_tensor(chunks, part, (kind, fqn), tensor.chunk, rank)
        _add_non_tensors(parsed, file, names, pool)
        # The first rank has elements of every parameter (`compute_piece`): its groups are complete.
        if all(rank.rank(axis) == 0 for axis in ("dp", "tp", "exp")):
            parsed.stages.append(_read_groups(parsed, file, names))
    parsed.entries = [
        Entry(e.fqn, e.kind, e.dtype, e.shape, tuple(parts)) for e, parts in chunks.values()
    ]
    return parsed


def _check_names(file: TorchFile) -> dict[Any, str]:
    expect(file.path, file.root, _FILE)
    expect(file.path, file.root, fields(gradient_accumulator=mapping(TEXT)))
    names: dict[Any, str] = file.root["names"]
    return names


def _iterate_tensors(
    file: TorchFile, names: Mapping[Any, str]
) -> Iterable[tuple[str, str, Tensor]]:
    for index, slots in file.root["state"].items():
        if index not in names:
            raise CorruptError(file.path, f"has state at index {index!r}, which names no parameter")
        for kind, value in slots.items():
            if kind != _STEP and isinstance(value, Tensor):
                yield names[index], kind, value
    for fqn, value in file.root.get("gradient_accumulator", {}).items():
        if isinstance(value, Tensor):
            yield fqn, MASTER, value


def _find_part(file: TorchFile, rank: NamedFile, part_table: PartTable, fqn: str) -> TensorShard:
    parts = part_table.get(fqn)
    if parts is None:
        raise IncompleteError(
            file.path,
            f"has state of {fqn!r}, but model/ has no weights of it",
            f"copy the weights of {fqn!r} to model/",
        )
    tp, exp = rank.rank("tp"), rank.rank("exp")
    # A parameter that has a single file is whole on every rank.
    whole = next(iter(parts.values())) if len(parts) == 1 else None
    # Only the files of experts name an expert rank; all others count as rank 0.
    part = whole or parts.get((tp, exp)) or parts.get((tp, 0))
    if part is None:
        raise CorruptError(file.path, f"has a part of {fqn!r} without a matching weight", MIXED)
    return part


def _add_tensor(
    chunks: dict[Key, tuple[Entry, list[Chunk]]],
    part: TensorShard,
    key: Key,
    stored: Chunk,
    rank: NamedFile,
) -> None:
    kind, fqn = key
    if "dp" in rank.ranks:
        start, stop = compute_piece(prod(part.local), rank.sizes["dp"], rank.rank("dp"))
        expected: Index = (stop - start,)
    else:
        start, stop = 0, prod(part.local)
        expected = part.local
    if stored.box.shape != expected:
        raise CorruptError(
            stored.file,
            f"the {kind} of {fqn!r} has shape {stored.box.shape}, but its weights imply {expected}",
            MIXED,
        )
    entry, collected = chunks.setdefault(key, (Entry(fqn, kind, stored.dtype, part.shape, ()), []))
    if entry.dtype != stored.dtype:
        raise CorruptError(
            stored.file,
            f"the {kind} of {fqn!r} is {stored.dtype}, but {entry.dtype} in other ranks' files",
            MIXED,
        )
    if "dp" in rank.ranks:
        collected += part.list_run_chunks(stored, start, stop)
    else:
        collected += part.list_chunks(stored)


def _add_non_tensors(
    found: StagedOptimizer, file: TorchFile, names: Mapping[Any, str], pool: SourceFiles
) -> None:
    for index, slots in file.root["state"].items():
        fqn = names[index]
        value = slots.get(_STEP)
        if isinstance(value, Tensor):
            value = torch_objects.read_number(pool, value.chunk)
        if isinstance(value, (int, float)):
            step = found.steps.setdefault(fqn, float(value))
            if step != value:
                raise CorruptError(
                    file.path,
                    f"the optimizer's step of {fqn!r} is {value}, but {step} in other files",
                    MIXED,
                )
        other = {
            k: to_plain(v) for k, v in slots.items() if k != _STEP and not isinstance(v, Tensor)
        }
        if other:
            found.non_tensor_state[fqn] = other


def _read_groups(
    found: StagedOptimizer, file: TorchFile, names: Mapping[Any, str]
) -> list[ParamGroup]:
    groups = []
    for group in file.root["param_groups"]:
        indices = group.get("params", ())
        fqns = tuple(names[index] for index in indices if index in names)
        found.unnamed += len(indices) - len(fqns)
        groups.append(ParamGroup(read_hyper(group), fqns))
    return groups
