"""Join the manifests of model-parallel ranks: tensor-parallel pieces, and stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from reshard.core.box import Index
from reshard.core.join import join
from reshard.core.manifest import Entry, Key, Manifest
from reshard.errors import MIXED, CorruptError, IncompleteError
from reshard.layouts.model_parallel.moves import align_copies
from reshard.layouts.model_parallel.shards import Split, gather

SplitOf = Callable[[str, Index], Split]


def join_tensor_ranks(ranks: Sequence[Manifest], split_of: SplitOf) -> Manifest:
    """Join the manifests of one stage's tensor-parallel ranks, given in rank order.

    Args:
        split_of: function of a parameter's name and its shape on the first rank that returns how
            it is cut.
    """
    names = dict.fromkeys(key for rank in ranks for key in rank.entries)
    entries = []
    for key in names:
        sample = next(rank.entries[key] for rank in ranks if key in rank.entries)
        pieces = [rank.entries.get(key) or _make_empty_piece(rank, sample) for rank in ranks]
        entries.append(gather(pieces, split_of(key[1], pieces[0].shape)))
    return join(ranks, entries)


def _make_empty_piece(rank: Manifest, other: Entry) -> Entry:
    # Optimizers have no state for empty parts, while the module's state dict lists them.
    parts = (entry for entry in rank.entries.values() if entry.fqn == other.fqn and not entry.numel)
    part = next(parts, None)
    if part is None:
        raise IncompleteError(
            rank.origin.path,
            f"does not have the {other.kind} {other.fqn!r}, but other ranks have it",
            MIXED,
        )
    return replace(other, shape=part.shape, chunks=())


def join_stages(ranks: Sequence[Manifest]) -> Manifest:
    """Join the manifests of pipeline stages or of expert-parallel ranks, in rank order.

    A tensor that several hold is a replica on each.

    Raises:
        CorruptError: two ranks hold a tensor in different shapes or dtypes.
    """
    joined: dict[Key, Entry] = {}
    for rank in ranks:
        for key, entry in rank.entries.items():
            known = joined.get(key)
            if known is None:
                joined[key] = entry
                continue
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise CorruptError(
                    rank.origin.path,
                    f"{entry.fqn!r} ({entry.kind}) is {entry.dtype.name} {entry.shape}, but"
                    f" {known.dtype.name} {known.shape} on another rank",
                    MIXED,
                )
            joined[key] = replace(known, chunks=align_copies(known.chunks, entry.chunks))
    return join(ranks, joined.values())
