"""Tensors that hold several parameters, or one in another order, as the parameters themselves.

    GroupedMLP  all experts of a rank side by side, transposed
    old QKV     before checkpoint version 2.0, query, key and value were in other orders

Sources: Megatron-LM core_v0.16.1 ``transformer/moe/experts.py`` (GroupedMLP), and
``megatron/training/checkpointing.py`` (fix_query_key_value_ordering).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from reshard.core.box import Box, Index, flat_span
from reshard.core.chunks import Chunk
from reshard.core.manifest import Entry
from reshard.core.views import Permute
from reshard.errors import CorruptError
from reshard.formats.megatron.arguments import Arguments
from reshard.layouts.model_parallel.moves import Move, apply_moves, make_row_moves
from reshard.layouts.partition import Member, build_flat_chunks

_GROUPED = re.compile(r"(.*\.mlp\.experts)\.weight([12])")
_QKV = re.compile(r".*\.query_key_value\.(weight|bias)")
_PARTS = 3  # query, key, value
_ORDERED = 2.0  # the checkpoint version since which they lie head by head


def is_grouped(name: str) -> bool:
    """Return whether a parameter holds all experts of a rank."""
    return _GROUPED.fullmatch(name) is not None


def separate(entries: Iterable[Entry], experts: range) -> Iterator[Entry]:
    """Yield entries with a separate tensor for every expert, named like a separate module.

    Args:
        experts: the numbers of the rank's experts.
    """
    for entry in entries:
        match = _GROUPED.fullmatch(entry.fqn)
        if match is None:
            yield entry
            continue
        stored = _get_matrix_shape(entry, match[2], len(experts))
        names = name_separated(entry.fqn, experts)
        numel = stored[0] * stored[1]
        members = [Member(name, stored, e * numel) for e, name in enumerate(names)]
        chunks_of = build_flat_chunks(members, (_make_run(c, entry.shape) for c in entry.chunks))
        for name in names:
            chunks = tuple(Permute((1, 0)).apply(chunks_of[name]))
            yield Entry(name, entry.kind, entry.dtype, stored[::-1], chunks)


def name_separated(name: str, experts: range) -> list[str]:
    """Return the names of the experts' parameters in a grouped one; for any other its own name."""
    match = _GROUPED.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}.local_experts.{e}.linear_fc{match[2]}.weight" for e in experts]


def _get_matrix_shape(entry: Entry, number: str, count: int) -> Index:
    """Return the shape of one expert's matrix as it is stored: (in, out)."""
    dim = 1 if number == "1" else 0  # experts share the rows of weight2, the columns of weight1
    if not count or entry.shape[dim] % count:
        raise CorruptError(
            entry.chunks[0].file,
            f"{entry.fqn!r} has shape {entry.shape}, which {count} experts do not divide",
        )
    part = entry.shape[dim] // count
    return (entry.shape[0], part) if dim else (part, entry.shape[1])


def _make_run(chunk: Chunk, shape: Index) -> tuple[int, Chunk]:
    start, stop = flat_span(chunk.box, shape)
    if stop - start != chunk.box.volume or not chunk.is_dense:
        raise CorruptError(
            chunk.file, "stores experts side by side in a tensor that is not contiguous"
        )
    one = (chunk.dtype.itemsize,)
    return start, replace(chunk, box=Box((0,), (chunk.box.volume,)), byte_strides=one)


def reorder_heads(entries: Iterable[Entry], version: float, args: Arguments) -> Iterator[Entry]:
    """Yield entries with [query, key, value] of each head together, as later versions do."""
    for entry in entries:
        if version >= _ORDERED or not _QKV.fullmatch(entry.fqn):
            yield entry
            continue
        moves = _make_head_moves(entry, version, args)
        yield replace(entry, chunks=tuple(apply_moves(entry.chunks, moves)))


def _make_head_moves(entry: Entry, version: float, args: Arguments) -> tuple[Move, ...]:
    heads = args.number("num_attention_heads") // args.tp
    width, rest = divmod(entry.shape[0], _PARTS * heads) if heads else (0, 1)
    if rest:
        raise CorruptError(
            args.source,
            f"{entry.fqn!r} has {entry.shape[0]} rows, which {heads} heads do not divide",
        )
    apart = version >= 1.0  # 1.0: [head, row, part]; 0: [part, head, row]
    runs = [
        (
            head * width * _PARTS + part if apart else (part * heads + head) * width,
            (head * _PARTS + part) * width,
            width,
        )
        for head in range(heads)
        for part in range(_PARTS)
    ]
    return make_row_moves(entry.shape, runs, step=_PARTS if apart else 1)
