"""Read the header of a safetensors file, and lay out such a file.

Source: safetensors 0.8 ``safetensors/src/tensor.rs`` (``Metadata::validate``, ``serialize``). A
file laid out here is byte-identical to what ``safetensors.torch.save_file`` writes for the same
tensors and metadata.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from reshard.core import dtypes
from reshard.core.box import MAX_DIMS, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry, SourceFile
from reshard.errors import DAMAGED, CorruptError, UnsupportedError
from reshard.system.files import Section, SourceFiles, get_size, refuse_lfs_pointer

SUFFIX = ".safetensors"
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_RANK = {dtype: index for index, dtype in enumerate(dtypes.ALL)}


class SafetensorsFile(NamedTuple):
    """The header of one file: a chunk for each tensor, and the metadata strings."""

    source: SourceFile
    tensors: dict[str, Chunk]
    metadata: dict[str, str]


def is_safetensors_file(path: Path) -> bool:
    """Return whether a file's name ends in `SUFFIX`, or has no suffix and the file has a header.

    The cache of the Hugging Face Hub calls its files by a hash.
    """
    if path.suffix:
        return path.suffix == SUFFIX
    with path.open("rb") as file:
        head = file.read(9)
    length = int.from_bytes(head[:8], "little")
    return head[8:] == b"{" and length <= min(get_size(path) - 8, _MAX_HEADER)


def read(path: str | Path) -> SafetensorsFile:
    """Read and validate one header.

    Raises:
        CorruptError: the header is not JSON, or its tensors do not fill the file.
        UnsupportedError: a tensor has an unknown dtype.
    """
    with SourceFiles() as files:
        nbytes = files.find_version(str(path)).nbytes
        return read_section(Section(files, str(path), 0, nbytes))


def read_section(section: Section) -> SafetensorsFile:
    """Read one header of a section, which may be the end of a larger file.

    Raises:
        CorruptError, UnsupportedError: as `read`.
    """
    path, size = section.path, section.nbytes
    if size < 8:
        raise CorruptError(path, f"has {size} bytes, too few for a safetensors header", DAMAGED)
    length = struct.unpack("<Q", section.read(0, 8))[0]
    if length > min(size - 8, _MAX_HEADER):
        refuse_lfs_pointer(path, section.read(0, min(size, 16)))
        raise CorruptError(
            path, f"its header states a size of {length} bytes, but the file has {size}", DAMAGED
        )
    header = _parse(path, section.read(8, length))
    metadata = header.pop("__metadata__", {})
    start, stop = section.start + 8 + length, section.start + size
    tensors = {name: _parse_chunk(path, name, start, value) for name, value in header.items()}
    _check_tiling(path, tensors, start, stop)
    source = SourceFile(path, stop, version=section.version)
    return SafetensorsFile(source, tensors, metadata)


def _parse(path: str, raw: bytes) -> dict[str, Any]:
    # Python keeps the last of two equal keys in silence: a tensor would be lost.
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("its header contains a name twice")
        return table

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptError(path, f"its header cannot be read: {error}", DAMAGED) from error
    if not isinstance(header, dict):
        raise CorruptError(path, "its header is not a JSON object", DAMAGED)
    metadata = header.get("__metadata__", {})
    texts = [*header, *metadata, *metadata.values()] if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) and _is_utf8(text) for text in texts):
        raise CorruptError(path, "its header has names or metadata that are not strings", DAMAGED)
    return header


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_chunk(path: str, name: str, data_start: int, value: Any) -> Chunk:
    try:
        code, shape = value["dtype"], tuple(value["shape"])
        start, stop = value["data_offsets"]
        numbers = (*shape, start, stop)
        # `isinstance` would accept JSON's true and false.
        sane = all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(path, f"the header's entry {name!r} is malformed", DAMAGED) from error
    if not sane or not isinstance(code, str):
        raise CorruptError(path, f"the header's entry {name!r} is malformed", DAMAGED)
    if len(shape) > MAX_DIMS:
        raise CorruptError(
            path, f"{name!r} has {len(shape)} dims; expected at most {MAX_DIMS}", DAMAGED
        )
    dtype = dtypes.BY_SAFETENSORS.get(code)
    if dtype is None:
        raise UnsupportedError(path, f"{name!r} has dtype {code!r}, which reshard does not know")
    if dtype.packed > 1:
        if not shape or shape[-1] % dtype.packed:
            raise UnsupportedError(path, f"{name!r}: rows of {code} {shape} do not fill bytes")
        shape = (*shape[:-1], shape[-1] // dtype.packed)
    if stop - start != prod(shape) * dtype.itemsize:
        raise CorruptError(
            path,
            f"{name!r}: {dtype} {shape} does not fill bytes {start} to {stop}",
            DAMAGED,
        )
    return contiguous(path, data_start + start, dtype, whole(shape))


def _check_tiling(path: str, tensors: Mapping[str, Chunk], start: int, stop: int) -> None:
    """Check that tensors follow one another without gap or overlap up to the last byte."""
    at = start
    for name, chunk in sorted(tensors.items(), key=lambda item: item[1].byte_span):
        begin, end = chunk.byte_span
        if begin != at:
            raise CorruptError(path, f"{name!r} starts at byte {begin}, expected {at}", DAMAGED)
        at = end
    if at != stop:
        raise CorruptError(
            path, f"its tensors end at byte {at}, but the file at byte {stop}", DAMAGED
        )


def lay_out(
    path: str, tensors: Iterable[tuple[Entry, DType]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[Entry], int]:
    """Return the header's bytes, the entries as ``path`` will hold them, and the file's size.

    Args:
        metadata: the strings; an empty mapping is written too, as `save_file` does.

    Raises:
        UnsupportedError: safetensors cannot store a name or a dtype.
    """
    tensors = list(tensors)
    _check_names(entry.fqn for entry, _ in tensors)
    ordered = sorted(tensors, key=lambda item: (_RANK[item[1]], item[0].fqn))
    header: dict[str, Any] = (
        {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    )
    at = 0
    for entry, dtype in ordered:
        if not dtype.safetensors or (dtype.packed > 1 and not entry.shape):
            raise UnsupportedError(
                entry.fqn,
                f"safetensors has no dtype for {dtype}",
                "write a .pt file instead, or leave the tensor out with --exclude",
            )
        stop = at + entry.numel * dtype.itemsize
        header[entry.fqn] = {
            "dtype": dtype.safetensors,
            "shape": [*entry.shape[:-1], *(size * dtype.packed for size in entry.shape[-1:])],
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # ``serialize`` aligns the data to 8 bytes
    start = 8 + len(text)
    placed = []
    for entry, dtype in ordered:
        offset = start + header[entry.fqn]["data_offsets"][0]
        chunk = contiguous(path, offset, dtype, whole(entry.shape))
        placed.append(Entry(entry.fqn, entry.kind, dtype, entry.shape, (chunk,)))
    return struct.pack("<Q", len(text)) + text, placed, start + at


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name == "__metadata__" or not _is_utf8(name):
            raise UnsupportedError(
                repr(name), "is not a name that safetensors can store", "rename it with --rename"
            )
