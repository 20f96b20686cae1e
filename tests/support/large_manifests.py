"""Manifests of large runs without files, to test that their maps stay readable."""

from __future__ import annotations

from itertools import accumulate

from reshard.core import dtypes
from reshard.core.box import Box, row_major, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.manifest import (
    Entry,
    Manifest,
    Origin,
    OutputFile,
    Skeleton,
    SourceFile,
    index_entries,
)
from reshard.layouts.partition import compute_equal_piece, run_chunks

SLOTS = ("exp_avg", "exp_avg_sq", "master")
HEADER, TRAILER = 4096, 1000  # bytes of a file that are no tensor's


def llama(layers=80, hidden=8192, inner=28672, heads=1024, vocabulary=128256):
    """Return name -> shape of a Llama; the defaults are the 70B's."""
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(layers):
        at = f"model.layers.{number}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.k_proj.weight": (heads, hidden),
            f"{at}.self_attn.v_proj.weight": (heads, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def _run(shape, ranks, rank):
    numel = 1
    for size in shape:
        numel *= size
    return compute_equal_piece(numel, ranks, rank)


def zero3(shapes, ranks):
    """Return entries as ZeRO-3 partitions them: each rank's file has a run of every tensor."""
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]
    return _sharded(shapes, names, lambda shape, rank: _run(shape, ranks, rank))


def flat(shapes, ranks):
    """Return entries of one flat run per slot, cut into equal parts, as ZeRO-1 and 2 do it."""
    numels = {fqn: _run(shape, 1, 0)[1] for fqn, shape in shapes.items()}
    starts = dict(zip(shapes, accumulate(numels.values(), initial=0), strict=False))
    part = -(-sum(numels.values()) // ranks)
    size = HEADER + len(SLOTS) * part * 4 + TRAILER
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]
    entries = []
    for slot, kind in enumerate(SLOTS):
        for fqn, shape in shapes.items():
            low, high = starts[fqn], starts[fqn] + numels[fqn]
            chunks = []
            for rank in range(low // part, -(-high // part)):
                start, stop = max(low, rank * part), min(high, (rank + 1) * part)
                offset = HEADER + (slot * part + start - rank * part) * 4
                piece = contiguous(names[rank], offset, dtypes.FLOAT32, whole((stop - start,)))
                chunks += run_chunks(piece, 0, shape, start - low, stop - low)
            entries.append(Entry(fqn, kind, dtypes.FLOAT32, shape, tuple(chunks)))
    return _manifest(entries, dict.fromkeys(names, size))


def _sharded(shapes, names, cut):
    ends = dict.fromkeys(names, HEADER)
    entries = []
    for kind in SLOTS:
        for fqn, shape in shapes.items():
            chunks = []
            for rank, name in enumerate(names):
                start, stop = cut(shape, rank)
                piece = contiguous(name, ends[name], dtypes.FLOAT32, whole((stop - start,)))
                chunks += run_chunks(piece, 0, shape, start, stop)
                ends[name] += (stop - start) * 4
            entries.append(Entry(fqn, kind, dtypes.FLOAT32, shape, tuple(chunks)))
    return _manifest(entries, {name: end + TRAILER for name, end in ends.items()})


def irregular(shapes, ranks, chance):
    """Return rows of every tensor, with a header of another length in each rank's file."""
    names = [f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    ends = {name: HEADER + 64 * chance.randrange(9) for name in names}
    entries = []
    for kind in SLOTS:
        for fqn, shape in shapes.items():
            chunks = []
            for rank, name in enumerate(names):
                start, stop = compute_equal_piece(shape[0], ranks, rank)
                box = Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))
                strides = row_major(box.shape, 4)
                chunks.append(Chunk(box, name, ends[name], strides, dtypes.FLOAT32))
                ends[name] += box.volume * 4 + 64 * chance.randrange(3)
            entries.append(Entry(fqn, kind, dtypes.FLOAT32, shape, tuple(chunks)))
    return _manifest(entries, ends)


def _manifest(entries, sizes):
    origin = Origin("deepspeed", "run", "ZeRO stage 3", mesh={"world": len(sizes)})
    files = {name: SourceFile(name, nbytes) for name, nbytes in sizes.items()}
    return Manifest(origin, index_entries(entries), files, ordered=True)


def skeleton(manifest):
    """Return the skeleton of the same files."""
    files = tuple(OutputFile(file.path, file.nbytes) for file in manifest.files.values())
    return Skeleton(files, tuple(manifest.entries.values()))
