"""Skeletons put together: several files of one target, several archives of one file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from reshard.manifest import Chunk, Entry, Key, OutputFile, Skeleton, StoredChecksum


def joined(parts: Iterable[Skeleton]) -> Skeleton:
    """One skeleton of several files; an entry has the chunks of all of them, in their order."""
    files: list[OutputFile] = []
    checksums: list[StoredChecksum] = []
    entries: dict[Key, Entry] = {}
    chunks: dict[Key, list[Chunk]] = {}
    for part in parts:
        files += part.files
        checksums += part.checksums
        for entry in part.entries:
            entries.setdefault(entry.key, entry)
            chunks.setdefault(entry.key, []).extend(entry.chunks)
    made = (replace(entry, chunks=tuple(chunks[key])) for key, entry in entries.items())
    return Skeleton(tuple(files), tuple(made), tuple(checksums))


def moved(part: Skeleton, directory: str) -> Skeleton:
    """The same files in a directory below."""

    def chunks(entry: Entry) -> tuple[Chunk, ...]:
        return tuple(replace(c, file=f"{directory}/{c.file}") for c in entry.chunks)

    return Skeleton(
        tuple(replace(file, name=f"{directory}/{file.name}") for file in part.files),
        tuple(replace(entry, chunks=chunks(entry)) for entry in part.entries),
        tuple(replace(c, file=f"{directory}/{c.file}") for c in part.checksums),
    )


def of_bytes(name: str, data: bytes) -> Skeleton:
    """A file whose content is known."""
    literals = ((0, data),) if data else ()
    return Skeleton((OutputFile(name, len(data), literals),), ())


def shifted_literals(file: OutputFile, by: int) -> Iterator[tuple[int, bytes]]:
    """The literals of a file that begins ``by`` bytes into another."""
    return ((offset + by, data) for offset, data in file.literals)


def shifted_checksums(part: Skeleton, name: str, by: int) -> Iterator[StoredChecksum]:
    """The checksums of a file that begins ``by`` bytes into the file ``name``."""
    for stored in part.checksums:
        places = tuple(place + by for place in stored.places)
        yield StoredChecksum(name, stored.byte_offset + by, stored.nbytes, places)
