"""Find and join the safetensors files of tensor-parallel ranks, each with a part of every tensor.

No file states the cuts, and a file looks like a whole model: the user's rules state them. vLLM's
``save_sharded_state`` writes such files, ``model-rank-0-part-0.safetensors`` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.containers import safetensors
from reshard.core.box import Index
from reshard.core.location import list_missing_ranks, name_missing
from reshard.core.manifest import Manifest
from reshard.errors import FETCH_MISSING, IncompleteError, ReshardError
from reshard.system.threads import map_files
from reshard.units import abridge

if TYPE_CHECKING:  # loaded late: most models are read without rules
    from reshard.layouts.model_parallel.rules import Table
    from reshard.layouts.model_parallel.shards import Split

_NUMBER = re.compile(r"\d+")


def find_slices(path: Path, files: Iterable[Path]) -> dict[int, Path]:
    """Return the files with the tensor names of one, by the only number in which names differ.

    The result is empty if there is no other such file, or several numbers of the name differ.
    """
    numbers = _NUMBER.findall(path.name)
    form = _NUMBER.sub("#", path.name)
    like = [p for p in files if p != path and _NUMBER.sub("#", p.name) == form]
    stored = set(safetensors.read(path).tensors) if like else set()
    found, places = {path: numbers}, set()
    for other, names in zip(like, map_files(like, _read_names), strict=True):
        others = _NUMBER.findall(other.name)
        if names == stored:
            found[other] = others
            places |= {at for at, text in enumerate(others) if text != numbers[at]}
    if len(found) == 1 or len(places) != 1:
        return {}
    (place,) = places
    return {int(texts[place]): file for file, texts in found.items()}


def _read_names(path: Path) -> set[str] | None:
    try:
        return set(safetensors.read(path).tensors)
    except ReshardError:  # another file than the one to read
        return None


def load_rules(path: Path | None, names: Iterable[str]) -> Table | None:
    """Return the user's rules; None if they name none of these tensors."""
    if path is None:
        return None
    from reshard.layouts.model_parallel.rules import Table, add_user_rules

    table = replace(add_user_rules(Table("", ()), path), source=str(path))
    return table if any(table.find(name, {}) for name in names) else None


def join_slices(slices: Mapping[int, Path], ranks: Sequence[Manifest], table: Table) -> Manifest:
    """Join the files of all ranks, given in rank order.

    Raises:
        IncompleteError: a rank's file is missing.
        CorruptError: the tensors of two ranks do not fit together.
        UsageError: no rule names a tensor.
    """
    from reshard.layouts.model_parallel.combine import join_tensor_ranks

    first = min(1, *slices)  # ranks count from 0 or from 1
    missing = list_missing_ranks(slices, range(first, max(slices)))
    if missing:
        folder = next(iter(slices.values())).parent
        raise IncompleteError(folder, name_missing(slices, missing), FETCH_MISSING)

    def find_split(name: str, _shape: Index) -> Split:
        return table.require(name, {}).rule.split(gated=True)

    manifest = join_tensor_ranks(ranks, find_split)
    mesh = {"world": len(ranks), "tp": len(ranks)}
    detail = f"{len(ranks)} slices"
    return replace(manifest, origin=replace(manifest.origin, mesh=mesh, detail=detail))


def describe_slices(path: Path, slices: Mapping[int, Path]) -> str:
    """Return the note that a file was read alone although others have the same tensors."""
    names = abridge(sorted(p.name for p in slices.values() if p != path))
    return (
        f"{path.name} was read alone, but {names} beside it"
        f" {'has' if len(slices) == 2 else 'have'} the same tensor names: if they are the slices"
        " of tensor-parallel ranks, each has a part of every tensor; state the cuts with"
        " --rules FILE to join them"
    )
