"""The passes that several commands share; each returns a changed conversion, and adds notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, TypeVar

from reshard.core.box import Box
from reshard.core.manifest import WEIGHT_KINDS, Entry, Manifest
from reshard.formats.base import Conversion
from reshard.naming.options import Naming
from reshard.system.files import SourceFiles
from reshard.tensors.lazy import read_block

if TYPE_CHECKING:
    from reshard.layouts.model_parallel.rules import Table

C = TypeVar("C", bound=Conversion)


def run_passes(passes: Iterable[Callable[[C], C]], conversion: C) -> C:
    """Run passes in order."""
    return reduce(lambda result, run: run(result), passes, conversion)


def apply_names(conversion: C, naming: Naming) -> C:
    """Return the conversion under the chosen names, with notes on what they change."""
    notes = conversion.notes.derived
    notes += naming.notes
    if naming.trimmed is not None:
        notes += _note_trained_padding(conversion.manifest, *naming.trimmed)
    return replace(conversion, manifest=naming.manifest, naming=naming)


def _note_trained_padding(manifest: Manifest, table: Table, vocab_size: int) -> list[str]:
    trained = []
    with SourceFiles(manifest.files) as pool:
        for entry in manifest.entries.values():
            rule = table.find(entry.fqn, {})
            # Tuples are compared, because a 0-d value has no first dim.
            padded = (
                rule is not None and rule.rule.is_vocabulary and entry.shape[:1] > (vocab_size,)
            )
            if padded and entry.chunks and _is_trained(entry, vocab_size, pool):
                trained.append(f"{entry.fqn} ({entry.kind})")
    if not trained:
        return []
    names = ", ".join(trained)
    return [f"the padding rows removed from {names} were trained: they took part in the softmax"]


def _is_trained(entry: Entry, vocab_size: int, pool: SourceFiles) -> bool:
    width = entry.shape[1:]
    rows = (
        bytes(read_block(pool, entry, Box((row, *(0,) * len(width)), (1, *width))))
        for row in range(vocab_size, entry.shape[0])
    )
    first = next(rows)
    state = entry.kind not in WEIGHT_KINDS and any(first)
    return state or any(row != first for row in rows)
