"""Stored bytes that belong to no tensor: padding, and bytes that should not be there."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from reshard.core.dtypes import DType
from reshard.core.manifest import Entry, Record, SourceFile, find_source_file
from reshard.system.files import SourceFiles


@dataclass(frozen=True, slots=True)
class Gap:
    """A range of bytes in a record that belongs to no tensor of the checkpoint.

    Args:
        fqn: the tensor before the gap in the record, or the first one after it.
    """

    file: str
    byte_offset: int
    nbytes: int
    fqn: str
    dtype: DType


_Span = tuple[int, int, str, DType]  # first byte, one past the last, fqn, dtype


def find_gaps(entries: Iterable[Entry], files: Mapping[str, SourceFile]) -> list[Gap]:
    """Return the gaps before, between and after the tensors of each record that has tensors."""
    spans: dict[str, list[_Span]] = defaultdict(list)
    for entry in entries:
        for chunk in entry.chunks:
            if chunk.box.volume:
                spans[chunk.file].append((*chunk.byte_span, entry.fqn, chunk.dtype))
    gaps: list[Gap] = []
    for path, ordered in spans.items():
        ordered.sort(key=lambda span: span[:2])
        starts = [span[0] for span in ordered]
        for record in find_source_file(files, path).records:
            first = bisect_left(starts, record.byte_offset)
            last = bisect_left(starts, record.byte_offset + record.nbytes)
            if first < last:
                gaps += _find_record_gaps(path, record, ordered[first:last])
    return gaps


def _find_record_gaps(path: str, record: Record, spans: Sequence[_Span]) -> Iterator[Gap]:
    at = record.byte_offset
    before = spans[0]
    for span in spans:
        if span[0] > at:
            yield Gap(path, at, span[0] - at, *before[2:])
        # Tensors can share bytes, so a span can end before an earlier one.
        at, before = max(at, span[1]), span
    end = record.byte_offset + record.nbytes
    if at < end:
        yield Gap(path, at, end - at, *before[2:])


def count_unexpected(
    pool: SourceFiles, gap: Gap, allowed: Collection[bytes], block_bytes: int
) -> int:
    """Count the elements of a gap whose bytes are not in ``allowed``."""
    size = gap.dtype.itemsize
    step = max(block_bytes // size, 1) * size
    count = 0
    for at in range(0, gap.nbytes, step):
        raw = pool.read(gap.file, gap.byte_offset + at, min(step, gap.nbytes - at))
        if raw.count(0) < len(raw):  # most padding is zero, and needs no loop over its elements
            count += sum(raw[i : i + size] not in allowed for i in range(0, len(raw), size))
    return count
