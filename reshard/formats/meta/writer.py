"""Lay out a Llama that Meta's own code loads: one file per tensor-parallel rank, params.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.containers.json_files import format_json
from reshard.containers.torch_writer import Storage, StorageBlock, StorageView
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry, Skeleton
from reshard.errors import UsageError
from reshard.formats.meta.directory import EMBEDDING, PARAMS
from reshard.layouts.model_parallel.rules import Table
from reshard.layouts.model_parallel.shards import Split, list_blocks
from reshard.layouts.model_parallel.traits import Traits
from reshard.training.state import WritableState

_LARGE = 100_000  # rows: from Llama 3 on the embedding is cut along rows, before along columns


def lay_out(
    state: WritableState,
    *,
    ranks: int,
    table: Table,
    params: Mapping[str, Any],
    dtype: DType | None,
) -> Skeleton:
    """Lay out the directory.

    Raises:
        UsageError: the ranks do not divide a tensor, or no rule states how one is cut.
    """
    # Meta's model never ties weights: ``tok_embeddings`` and ``output`` are both written.
    tied = {kept: alias for alias, kept in state.manifest.tied.items()}
    tensors: dict[str, tuple[Entry, DType]] = {}
    for weight in state.weights:
        for name in filter(None, (weight.fqn, tied.get(weight.fqn))):
            tensors[name] = weight.value, dtype or weight.dtype
    params = {**params, "vocab_size": tensors[EMBEDDING][0].shape[0]}
    groups = params.get("n_kv_heads") or params["n_heads"]
    if groups % ranks:
        raise UsageError(f"--tp {ranks}", f"does not divide {groups} key and value heads")
    files = [
        torch_writer.lay_out_object(
            f"consolidated.{rank:02d}.pth",
            {
                name: _build_slot(
                    name, entry, dtype, _choose_split(name, entry, table), ranks, rank
                )
                for name, (entry, dtype) in tensors.items()
            },
        )
        for rank in range(ranks)
    ]
    return skeletons.join([*files, skeletons.lay_out_bytes(PARAMS, format_json(params))])


def describe_values(state: WritableState, *, ranks: int) -> Iterator[str]:
    """Yield what the user must know about derived and dropped values."""
    rows = next(weight.shape[0] for weight in state.weights if weight.fqn == EMBEDDING)
    if ranks > 1:
        how = "rows, as in Llama 3" if rows >= _LARGE else "columns, as in Llama 1 and 2"
        yield f"the embedding of {rows} rows is cut along its {how}"


def build_params(traits: Traits) -> dict[str, Any]:
    """Return params.json of a Llama, with the width of its feed-forward layer as a multiplier.

    ``hidden_dim`` in ``llama/model.py`` is two thirds of four times the width, times the
    multiplier, rounded up to a multiple of ``multiple_of``. With a multiple of 1 the multiplier is
    exact.
    """
    hidden, ffn = traits.hidden or 0, traits.ffn or 0
    base = int(2 * (4 * hidden) / 3)
    return {
        "dim": hidden,
        "n_layers": traits.layers,
        "n_heads": traits.heads,
        "n_kv_heads": traits.groups,
        "vocab_size": traits.vocab,
        "multiple_of": 1,
        # The model truncates the product: half a unit keeps float rounding from losing one.
        "ffn_dim_multiplier": (ffn + 0.5) / base if base else None,
        "norm_eps": traits.norm_eps,
        "rope_theta": traits.rope_theta,
    }


def _choose_split(name: str, entry: Entry, table: Table) -> Split:
    if name == EMBEDDING:
        return Split(0 if entry.shape[0] >= _LARGE else 1)
    return table.require(name, {}).rule.split(gated=True)


def _build_slot(
    name: str, entry: Entry, dtype: DType, split: Split, ranks: int, rank: int
) -> StorageView:
    shape, pairs = list_blocks(name, entry.shape, split, ranks, rank)
    # Meta's files have no fused tensors, so a rank's piece is a single block.
    ((box, _),) = pairs
    part = StorageBlock(entry.kind, entry.fqn, entry.shape, box)
    return StorageView(Storage(dtype, box.volume, (part,)), shape)
