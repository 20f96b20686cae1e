"""Replicas: copies of one block that several ranks store, which are compared or averaged.

The copies of tensor-parallel ranks may drift apart. This happened to BLOOM's layer norms and row
biases; bigscience's Megatron-DeepSpeed averages them in ``ds_to_universal``
(``WEIGHTS_TO_AVERAGE_PATTERNS``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Literal

from reshard.core.box import contiguous_cuts, whole
from reshard.core.chunks import Chunk, contiguous, group_by_box
from reshard.core.dtypes import DType
from reshard.core.manifest import (
    BUFFER,
    WEIGHT_KINDS,
    Entry,
    Manifest,
    SourceFile,
    find_source_file,
)
from reshard.errors import DifferentError, UnsupportedError
from reshard.system.files import SourceFiles
from reshard.tensors.lazy import find_first_difference, read_block

Replicas = Literal["error", "first", "mean"]

_BLOCK_ELEMENTS = 1 << 20


def check(
    entries: Iterable[Entry],
    files: Mapping[str, SourceFile],
    pool: SourceFiles,
    policy: Replicas = "error",
    *,
    most_read: int | None = None,
) -> list[str]:
    """Compare the stored replicas of tensors; all ranks must have the same values.

    Stored checksums are compared where possible, otherwise the values. If a buffer differs (each
    rank has its own running statistics), the first rank's is used, with a note.

    Args:
        entries: the tensors to compare.
        files: the source files by path.
        pool: the open files.
        policy: ``first`` uses the first rank's values of every tensor that differs, with a note.
        most_read: largest block, in bytes, that is read if the files store no checksums of the same
            bytes; None reads all.

    Returns:
        Notes on the tensors that differ.

    Raises:
        DifferentError: replicas of a parameter, or of its optimizer state, differ.
    """
    notes = []
    for entry in entries:
        difference = _find_difference(entry, files, pool, most_read)
        if difference is None:
            continue
        first, other, at = difference
        kind = "" if entry.kind in WEIGHT_KINDS else f"{entry.kind} of "
        text = f"differs between {first.file} and {other.file} (element {at})"
        if entry.kind != BUFFER and policy == "error":
            raise DifferentError(
                f"{kind}{entry.fqn}",
                text,
                "the ranks have drifted apart, the files belong to different runs, or each file has"
                " a shard, whose cut --rules FILE states; only if the ranks have drifted"
                " apart, use the first rank's values with --replicas first, or their mean with"
                " --replicas mean",
            )
        what = "buffer" if entry.kind == BUFFER else "tensor"
        notes.append(f"{what} {kind}{entry.fqn!r} {text}: the first rank's is written")
    return notes


def _find_difference(
    entry: Entry,
    files: Mapping[str, SourceFile],
    pool: SourceFiles,
    most_read: int | None = None,
) -> tuple[Chunk, Chunk, int] | None:
    if entry.layout.is_partition:  # it stores every element once
        return None
    for box, (first, *others) in group_by_box(entry.chunks).items():
        block = replace(entry, shape=box.shape, chunks=(_rebase(first),))
        checksum = _read_checksum(first, files) if others else None
        for other in others:
            found = _read_checksum(other, files) if checksum else None
            if checksum and checksum == found:
                continue
            is_shown = checksum and found and checksum[1:] == found[1:]
            if not is_shown and most_read is not None and block.nbytes > most_read:
                continue
            at = find_first_difference(pool, block, replace(block, chunks=(_rebase(other),)))
            if at is not None:
                return first, other, at
    return None


def _read_checksum(chunk: Chunk, files: Mapping[str, SourceFile]) -> tuple[object, ...] | None:
    records = find_source_file(files, chunk.file).records
    start, stop = chunk.byte_span
    at = bisect_right(records, start, key=lambda record: record.byte_offset) - 1
    if at < 0 or records[at].crc32 is None or stop > records[at].byte_offset + records[at].nbytes:
        return None
    record = records[at]
    offset = start - record.byte_offset
    # Records with equal CRCs count as equal, and so do chunks at the same position in them.
    return record.crc32, record.nbytes, offset, chunk.byte_strides, chunk.dtype


def _rebase(chunk: Chunk) -> Chunk:
    return replace(chunk, box=whole(chunk.box.shape))


@contextmanager
def average_replicas(
    manifest: Manifest, policy: Replicas, kinds: Sequence[str] | None
) -> Iterator[tuple[Manifest, list[str]]]:
    """Yield a manifest in which replicas that differ are replaced by their mean, and notes.

    The mean is computed in fp32 (of fp64 values in fp64), in rank order, and rounded once. It is
    stored in a temporary file as long as the context lasts. Buffers are not averaged, because each
    rank has its own.

    Args:
        manifest: the checkpoint.
        policy: with any policy but ``mean``, the manifest is unchanged.
        kinds: the kinds of tensors to average; None for all.

    Raises:
        UnsupportedError: replicas differ whose dtype cannot be averaged.
    """
    if policy != "mean":
        yield manifest, []
        return
    from reshard.engine.output.temporary import temporary  # imported here, because few runs need it

    with temporary() as directory, SourceFiles(manifest.files) as pool:
        path = Path(directory) / "means"
        entries, notes = [], []
        with path.open("wb") as out:
            for entry in manifest.entries.values():
                is_averaged = entry.kind != BUFFER and (kinds is None or entry.kind in kinds)
                if is_averaged and _find_difference(entry, manifest.files, pool) is not None:
                    chunks = tuple(_write_means(entry, str(path), out, pool))
                    ranks = len(entry.chunks) // len(chunks)
                    notes.append(f"{entry.kind} {entry.fqn!r}: the mean of {ranks} ranks")
                    entries.append(replace(entry, chunks=chunks))
                else:
                    entries.append(entry)
        files = {
            **manifest.files,
            str(path): SourceFile(str(path), path.stat().st_size, lasting=False),
        }
        if not notes:
            yield manifest, []
            return
        yield replace(manifest.with_entries(entries), files=files), notes


def _write_means(entry: Entry, path: str, out: BinaryIO, pool: SourceFiles) -> Iterator[Chunk]:
    if entry.dtype.family != "float":
        raise UnsupportedError(
            entry.fqn,
            f"differs between ranks, and {entry.dtype.name} cannot be averaged",
            "use the first rank's values with --replicas first",
        )
    for box, copies in group_by_box(entry.chunks).items():
        chunk = contiguous(path, out.tell(), entry.dtype, box)
        blocks = [replace(entry, shape=box.shape, chunks=(_rebase(copy),)) for copy in copies]
        for cut in contiguous_cuts(box.shape, _BLOCK_ELEMENTS):
            mean = _compute_mean([read_block(pool, block, cut) for block in blocks], entry.dtype)
            out.write(mean)
        yield chunk


def _compute_mean(copies: Sequence[bytearray], dtype: DType) -> bytes:
    import torch

    kind = dtype.to_torch()
    wide = torch.promote_types(kind, torch.float32)
    total = torch.frombuffer(copies[0], dtype=kind).to(wide)
    for copy in copies[1:]:
        total = total + torch.frombuffer(copy, dtype=kind).to(wide)
    mean = (total / len(copies)).to(kind)
    return mean.view(torch.uint8).numpy().tobytes()
