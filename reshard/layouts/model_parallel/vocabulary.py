"""The rows of an embedding that are padding, so that tensor-parallel ranks share it evenly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reshard.core.manifest import WEIGHT_KINDS, Entry, Manifest
from reshard.layouts.model_parallel import moves
from reshard.layouts.model_parallel.rules import Table


def take_first_rows(entry: Entry, rows: int) -> Entry:
    """Return a tensor's first rows."""
    kept = moves.make_row_moves(entry.shape, [(0, 0, rows)])
    shape = (rows, *entry.shape[1:])
    return replace(entry, shape=shape, chunks=tuple(moves.apply_moves(entry.chunks, kept)))


def find_row_counts(manifest: Manifest, table: Table, constants: Mapping[str, int]) -> set[int]:
    """Return the row counts of a manifest's vocabularies, padding included."""
    return {
        weight.shape[0]
        for weight in manifest.of_kind(*WEIGHT_KINDS)
        if (match := table.find(weight.fqn, constants)) is not None and match.rule.is_vocabulary
    }


def cut_rows(
    manifest: Manifest, table: Table, constants: Mapping[str, int], rows: int
) -> tuple[Manifest, int]:
    """Return a manifest whose vocabularies have at most ``rows`` rows, and how many were cut.

    Weights and optimizer states are cut in the same way.
    """
    entries, removed = [], 0
    for entry in manifest.entries.values():
        match = table.find(entry.fqn, constants) if entry.shape[:1] > (rows,) else None
        if match is not None and match.rule.is_vocabulary:
            removed = entry.shape[0] - rows
            entries.append(take_first_rows(entry, rows))
        else:
            entries.append(entry)
    return (manifest.with_entries(entries), removed) if removed else (manifest, 0)
