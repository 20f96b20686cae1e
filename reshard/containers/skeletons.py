"""Combine skeletons: several files of one target, several archives of one file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.core.manifest import Entry, Key, OutputFile, Skeleton
from reshard.layouts.runs import EqualRuns, RankOffsets


class LaidOut(NamedTuple):
    """The files of a target, and notes for the user about derived and dropped state.

    Args:
        copied: entries of the source, beside those of its manifest, that fill copies of stored
            values; a layout that has them leaves nothing out.
        load_line: the line that loads the files, as `Writer.load_line`; empty: the writer's own.
    """

    skeleton: Skeleton
    notes: tuple[str, ...]
    copied: tuple[Entry, ...] = ()
    load_line: str = ""


def join(parts: Iterable[Skeleton]) -> Skeleton:
    """Join the skeletons of several files; an entry has the chunks of all, in their order."""
    files: list[OutputFile] = []
    entries: dict[Key, list[Entry]] = {}
    for part in parts:
        files += part.files
        for entry in part.entries:
            entries.setdefault(entry.key, []).append(entry)
    return Skeleton(tuple(files), tuple(map(_merge_entries, entries.values())))


def _merge_entries(entries: Sequence[Entry]) -> Entry:
    if len(entries) == 1:
        return entries[0]
    return replace(entries[0], chunks=tuple(chunk for entry in entries for chunk in entry.chunks))


def rename(part: Skeleton, name: str) -> Skeleton:
    """Return the same file under another name."""
    return _rename_files(part, lambda _: name)


def move_into(part: Skeleton, directory: str) -> Skeleton:
    """Return the same files in a subdirectory."""
    return _rename_files(part, lambda name: f"{directory}/{name}")


def move_out(part: Skeleton, directory: str) -> Skeleton:
    """Return the files of a subdirectory without it, the inverse of `move_into`."""
    return _rename_files(part, lambda name: name.removeprefix(f"{directory}/"))


def _rename_files(part: Skeleton, rename: Callable[[str], str]) -> Skeleton:
    return Skeleton(
        tuple(
            replace(file, name=rename(file.name), like=file.like and rename(file.like))
            for file in part.files
        ),
        tuple(
            replace(entry, chunks=tuple(replace(c, file=rename(c.file)) for c in entry.chunks))
            for entry in part.entries
        ),
    )


def lay_out_ranks(
    first: Skeleton, others: Iterable[Skeleton], *, repeated: Collection[str] = ()
) -> Skeleton:
    """Lay out files with the same tensors in the same storages, one equal run of each for a rank.

    Args:
        first: the file of the first rank, whose run of a tensor is as long as any.
        others: those of the other ranks, without entries. Their storages may begin elsewhere,
            because the lengths of names and pickles differ.
        repeated: kinds of entries that every rank stores whole.
    """
    every = [first, *others]
    names = tuple(part.files[0].name for part in every)
    starts = [stored.byte_offset for stored in first.files[0].checksums]
    begins = ([stored.byte_offset for stored in part.files[0].checksums] for part in every)
    offsets_by_storage = [RankOffsets(names, offsets) for offsets in zip(*begins, strict=True)]

    def lay_out_entry(entry: Entry) -> Entry:
        at = entry.chunks[0].byte_offset
        storage = bisect_right(starts, at) - 1
        if entry.kind in repeated:
            files = zip(names, offsets_by_storage[storage].byte_offsets, strict=True)
            copies = ((name, begin + at - starts[storage]) for name, begin in files)
            chunk = entry.chunks[0]
            chunks = tuple(
                replace(chunk, file=name, byte_offset=byte_offset) for name, byte_offset in copies
            )
            return replace(entry, chunks=chunks)
        runs = EqualRuns(
            offsets_by_storage[storage], entry.dtype, entry.shape, at - starts[storage]
        )
        # The other ranks' chunks are computed, not laid out: the first rank's must be the same run.
        if tuple(runs.of_rank(0)) != tuple(entry.chunks):
            raise AssertionError(
                f"{entry.fqn!r} does not have the layout of the first of {len(names)} runs"
            )
        return replace(entry, chunks=runs)

    return Skeleton(
        tuple(part.files[0] for part in every),
        tuple(map(lay_out_entry, first.entries)),
    )


def lay_out_bytes(name: str, data: bytes) -> Skeleton:
    """Lay out a file whose content is known."""
    return Skeleton((OutputFile.from_bytes(name, data),), ())
