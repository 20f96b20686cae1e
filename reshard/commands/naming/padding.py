"""Rows that pad the vocabulary to what tensor-parallel ranks can share."""

from __future__ import annotations

from reshard.box import Box
from reshard.files import SourceFiles
from reshard.manifest import WEIGHT_KINDS, Entry, Manifest
from reshard.model_parallel.rules import Table
from reshard.tensors import read_block


def notes(manifest: Manifest, table: Table, words: int) -> list[str]:
    """What is to be said of the rows that are taken off: they take part in the softmax."""
    found = []
    with SourceFiles() as pool:
        for entry in manifest.entries.values():
            rule = table.find(entry.fqn, {})
            padded = rule is not None and rule.rule.is_vocabulary and entry.shape[:1] > (words,)
            if padded and entry.chunks and _is_trained(entry, words, pool):
                found.append(f"{entry.fqn} ({entry.kind})")
    if not found:
        return []
    what = f"the padding rows of {', '.join(found)} have values of their own"
    return [f"{what}: they were trained, as they take part in the softmax"]


def _is_trained(entry: Entry, words: int, pool: SourceFiles) -> bool:
    """Whether the rows from ``words`` on differ, or hold optimizer state; read a row at a time."""
    width = entry.shape[1:]
    rows = (
        bytes(read_block(pool, entry, Box((row, *(0,) * len(width)), (1, *width))))
        for row in range(words, entry.shape[0])
    )
    first = next(rows)
    state = entry.kind not in WEIGHT_KINDS and any(first)
    return state or any(row != first for row in rows)
