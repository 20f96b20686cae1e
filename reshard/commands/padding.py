"""Rows that pad the vocabulary to what tensor-parallel ranks can share."""

from __future__ import annotations

from reshard.box import Box
from reshard.files import SourceFiles
from reshard.manifest import WEIGHT_KINDS, Entry, Manifest
from reshard.model_parallel.rules import Table
from reshard.tensors import read_block


def note_trained_padding(manifest: Manifest, table: Table, vocab_size: int) -> list[str]:
    """Return notes on padding rows with trained values, which took part in the softmax.

    Args:
        vocab_size: rows that are not padding.
    """
    trained = []
    with SourceFiles() as pool:
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
    return [f"the removed padding rows of {names} were trained: they took part in the softmax"]


def _is_trained(entry: Entry, vocab_size: int, pool: SourceFiles) -> bool:
    """Return whether the padding rows differ, or hold optimizer state; reads one row at a time."""
    width = entry.shape[1:]
    rows = (
        bytes(read_block(pool, entry, Box((row, *(0,) * len(width)), (1, *width))))
        for row in range(vocab_size, entry.shape[0])
    )
    first = next(rows)
    state = entry.kind not in WEIGHT_KINDS and any(first)
    return state or any(row != first for row in rows)
