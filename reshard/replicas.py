"""Copies of one block that several ranks keep: compared, and averaged where a user asks for that.

Tensor-parallel ranks may drift apart in what they all hold (BLOOM's layer norms and row biases did;
bigscience Megatron-DeepSpeed ``ds_to_universal`` averages them, ``WEIGHTS_TO_AVERAGE_PATTERNS``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from reshard.box import Box, contiguous_cuts, row_major, whole
from reshard.dtypes import DType
from reshard.errors import DifferentError, UnsupportedError
from reshard.files import SourceFiles
from reshard.manifest import (
    BUFFER,
    WEIGHT_KINDS,
    Chunk,
    Entry,
    Manifest,
    Partition,
    SourceFile,
    find_source_file,
)
from reshard.tensors import first_difference, read_block

if TYPE_CHECKING:
    import torch

Replicas = Literal["error", "first", "mean"]

_BLOCK_ELEMENTS = 1 << 20


def check(
    entries: Iterable[Entry],
    files: Mapping[str, SourceFile],
    pool: SourceFiles,
    policy: Replicas = "error",
) -> list[str]:
    """Compare the stored replicas of tensors; all ranks must hold the same values.

    Stored checksums are compared where there are any, else the values. A buffer that differs
    (running statistics are a rank's own) is noted, and the first rank's is taken.

    Args:
        policy: ``first`` takes the first rank's of every tensor that differs, and says so.

    Returns:
        What differs and was taken nevertheless.

    Raises:
        DifferentError: replicas of a parameter, or of its optimizer state, differ.
    """
    notes = []
    for entry in entries:
        found = _different_replicas(entry, files, pool)
        if found is None:
            continue
        first, other, at = found
        kind = "" if entry.kind in WEIGHT_KINDS else f"{entry.kind} of "
        text = f"differs between {first.file} and {other.file} (element {at})"
        if entry.kind != BUFFER and policy == "error":
            raise DifferentError(
                f"{kind}{entry.fqn}",
                text,
                "the ranks have drifted apart, or the files are of different runs; to go on with"
                " the first rank's values: --replicas first, with their mean: --replicas mean",
            )
        what = "buffer" if entry.kind == BUFFER else "tensor"
        notes.append(f"{what} {kind}{entry.fqn!r} {text}: the first rank's is written")
    return notes


def _different_replicas(
    entry: Entry, files: Mapping[str, SourceFile], pool: SourceFiles
) -> tuple[Chunk, Chunk, int] | None:
    """The first two chunks of one box that hold different values, and where."""
    if isinstance(entry.chunks, Partition):
        return None
    for box, (first, *others) in _by_box(entry).items():
        block = replace(entry, shape=box.shape, chunks=(_as_whole(first),))
        sign = _checksum(first, files) if others else None
        for other in others:
            if sign is not None and sign == _checksum(other, files):
                continue
            at = first_difference(pool, block, replace(block, chunks=(_as_whole(other),)))
            if at is not None:
                return first, other, at
    return None


def _by_box(entry: Entry) -> dict[Box, list[Chunk]]:
    found: dict[Box, list[Chunk]] = defaultdict(list)
    for chunk in entry.chunks:
        if chunk.box.volume:
            found[chunk.box].append(chunk)
    return found


def _checksum(chunk: Chunk, files: Mapping[str, SourceFile]) -> tuple[object, ...] | None:
    """The stored checksum of the record that holds a chunk, and where in it the chunk lies."""
    records = find_source_file(files, chunk.file).records
    start, stop = chunk.byte_span
    at = bisect_right(records, start, key=lambda record: record.byte_offset) - 1
    if at < 0 or records[at].crc32 is None or stop > records[at].byte_offset + records[at].nbytes:
        return None
    record = records[at]
    place = start - record.byte_offset
    return record.crc32, record.nbytes, place, chunk.byte_strides, chunk.dtype


def _as_whole(chunk: Chunk) -> Chunk:
    return replace(chunk, box=whole(chunk.box.shape))


@contextmanager
def averaged(
    manifest: Manifest, policy: Replicas, kinds: Sequence[str] | None = None
) -> Iterator[tuple[Manifest, list[str]]]:
    """A manifest in which copies that differ are their mean, and what to say of that.

    The mean is taken in fp32, in rank order, and rounded once; it lies in a temporary file as long
    as the context lasts. Buffers are a rank's own and stay.

    Args:
        policy: all but ``mean`` leaves everything as it is.
        kinds: of the tensors that matter; None: all.

    Raises:
        UnsupportedError: copies of a dtype that has no mean differ.
    """
    if policy != "mean":
        yield manifest, []
        return
    from reshard.output.temporary import temporary  # not at the start: few runs come here

    with temporary() as place, SourceFiles() as pool:
        path = Path(place) / "means"
        entries, notes = [], []
        with path.open("wb") as out:
            for entry in manifest.entries.values():
                wanted = entry.kind != BUFFER and (kinds is None or entry.kind in kinds)
                if wanted and _different_replicas(entry, manifest.files, pool) is not None:
                    chunks = tuple(_means(entry, str(path), out, pool))
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


def _means(entry: Entry, path: str, out: BinaryIO, pool: SourceFiles) -> Iterator[Chunk]:
    """A chunk a block, each the mean of its copies, written one after the other."""
    if entry.dtype.family != "float":
        raise UnsupportedError(
            entry.fqn, f"differs between ranks, and {entry.dtype.name} has no mean"
        )
    for box, copies in _by_box(entry).items():
        strides = row_major(box.shape, entry.dtype.itemsize)
        chunk = Chunk(box, path, out.tell(), strides, entry.dtype)
        held = [replace(entry, shape=box.shape, chunks=(_as_whole(copy),)) for copy in copies]
        for cut in contiguous_cuts(box.shape, _BLOCK_ELEMENTS):
            mean = _mean([read_block(pool, copy, cut) for copy in held], entry.dtype)
            out.write(mean)
        yield chunk


def _mean(copies: Sequence[bytearray], dtype: DType) -> bytes:
    import torch

    kind: torch.dtype = getattr(torch, dtype.name)
    total = torch.frombuffer(copies[0], dtype=kind).to(torch.float32)
    for copy in copies[1:]:
        total = total + torch.frombuffer(copy, dtype=kind).to(torch.float32)
    mean = (total / len(copies)).to(kind)
    return mean.view(torch.uint8).numpy().tobytes()
