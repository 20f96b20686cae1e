"""Digests of files in blocks, with which a program checks only the bytes that it reads.

The digests of tensors (`hashes`) are those of whole tensors. A rank of a sharded run reads a file
of its own, or ranges of a large one, so a manifest also has digests of each file, one for each
block of 8 MiB.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from reshard.checks.digests import BLAKE3, SHA256, list_algorithms, start
from reshard.core.manifest import SourceFile
from reshard.errors import UsageError
from reshard.system.files import SourceFiles
from reshard.system.paths import shorten_names
from reshard.system.threads import parallel_for

BLOCK_BYTES = 8 << 20
_MOST_BLOCK_BYTES = 64 << 20  # a damaged manifest may state any size
_local = threading.local()


@dataclass(frozen=True, slots=True)
class FileDigests:
    """The digests of one file.

    Args:
        name: the path below the directory that has all files of the checkpoint.
        block_bytes: the size of each block but the last.
        sha256, blake3: the digest of each block; those of BLAKE3 are empty if it was not installed.
    """

    name: str
    nbytes: int
    block_bytes: int
    sha256: tuple[str, ...]
    blake3: tuple[str, ...] = ()

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> FileDigests:
        """Return the digests as `to_json` has written them.

        Raises:
            KeyError, TypeError, ValueError: a value is missing or of another kind.
        """
        lists = {name: tuple(document.get(name, ())) for name in (SHA256, BLAKE3)}
        nbytes, block_bytes = document["nbytes"], document["block_bytes"]
        if not 0 < block_bytes <= _MOST_BLOCK_BYTES or nbytes < 0:
            raise ValueError(f"{document['name']!r} has blocks of {block_bytes} bytes")
        found = FileDigests(document["name"], nbytes, block_bytes, **lists)
        if not all(len(digests) in (0, found.block_count) for digests in lists.values()):
            raise ValueError(f"{found.name!r} has another number of digests than blocks")
        return found

    @property
    def block_count(self) -> int:
        """The number of blocks."""
        return -(-self.nbytes // self.block_bytes)

    def find_blocks(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        """Return the numbers of the blocks that share a byte with any range ``[start, stop)``.

        Raises:
            UsageError: a range is not inside the file.
        """
        found: set[int] = set()
        for first, stop in ranges:
            if not 0 <= first <= stop <= self.nbytes:
                raise UsageError(
                    self.name,
                    f"has {self.nbytes} bytes; the range {first}:{stop} is not inside it",
                    "pass (start, stop) in bytes",
                )
            if first < stop:
                found.update(range(first // self.block_bytes, -(-stop // self.block_bytes)))
        return sorted(found)

    def choose_algorithm(self) -> tuple[str, Sequence[str]]:
        """Return the fastest algorithm that is listed and can be computed, and its digests.

        Raises:
            UsageError: only BLAKE3 is listed, which is not installed.
        """
        for name in list_algorithms():
            digests: tuple[str, ...] = getattr(self, name)
            if digests or not self.nbytes:
                return name, digests
        raise UsageError(
            self.name, "has only BLAKE3 digests, and blake3 is not installed", "pip install blake3"
        )


def to_json(digests: Any) -> dict[str, Any]:
    """Return the fields of a dataclass of digests; without BLAKE3 if it has none."""
    return {key: value for key, value in asdict(digests).items() if key != BLAKE3 or value}


def hash_files(
    files: Mapping[str, SourceFile], *, workers: int, progress: Callable[[int], None]
) -> list[FileDigests]:
    """Read all files of a checkpoint, and return the digests of their blocks."""
    paths = [path for path, file in files.items() if file.lasting]
    found: dict[str, dict[str, dict[int, str]]] = {
        path: {name: {} for name in list_algorithms()} for path in paths
    }
    items = (
        (path, number) for path in paths for number in range(-(-files[path].nbytes // BLOCK_BYTES))
    )
    with SourceFiles(files) as pool:

        def hash_one(item: tuple[str, int]) -> None:
            path, number = item
            block = _read_block(pool, path, number, files[path].nbytes, BLOCK_BYTES)
            for name, digests in found[path].items():
                digests[number] = _hash(name, block)

        parallel_for(
            items,
            lambda: hash_one,
            workers,
            lambda item: progress(min(BLOCK_BYTES, files[item[0]].nbytes)),
        )
    return [
        FileDigests(
            name,
            files[path].nbytes,
            BLOCK_BYTES,
            **{
                algorithm: tuple(digests[number] for number in sorted(digests))
                for algorithm, digests in found[path].items()
            },
        )
        for path, name in shorten_names(paths).items()
    ]


def find_file(listed: Sequence[FileDigests], path: str) -> FileDigests | None:
    """Return the digests of a file by the end of its path, the longest that is listed; or None."""
    parts = PurePosixPath(path).parts
    names = {digests.name: digests for digests in listed}
    ends = ("/".join(parts[at:]) for at in range(len(parts)))
    return next((names[end] for end in ends if end in names), None)


def find_other_blocks(
    digests: FileDigests, path: str, blocks: Sequence[int], *, workers: int
) -> list[tuple[int, int]]:
    """Return the byte ranges of the blocks whose content differs from the digests.

    Args:
        path: the file, of the listed size.
    """
    algorithm, expected = digests.choose_algorithm()
    size = digests.block_bytes
    other: list[int] = []
    with SourceFiles() as pool:

        def compare(number: int) -> None:
            block = _read_block(pool, path, number, digests.nbytes, size)
            if _hash(algorithm, block) != expected[number]:
                other.append(number)

        parallel_for(blocks, lambda: compare, workers)
    return [(number * size, min((number + 1) * size, digests.nbytes)) for number in sorted(other)]


def _read_block(
    pool: SourceFiles, path: str, number: int, nbytes: int, block_bytes: int
) -> memoryview:
    start = number * block_bytes
    if len(getattr(_local, "buffer", b"")) < block_bytes:
        _local.buffer = bytearray(block_bytes)
    block = memoryview(_local.buffer)[: min(block_bytes, nbytes - start)]
    pool.read_into(path, start, block)
    return block


def _hash(algorithm: str, block: memoryview) -> str:
    digest = start(algorithm)
    digest.update(block)
    return digest.hexdigest()
