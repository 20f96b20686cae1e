"""Ways to damage a checkpoint that a real framework wrote, as disks, people and programs do."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from reshard import formats
from reshard.checks.scan import find_chunk
from reshard.core.box import index_of
from reshard.core.manifest import Entry, Manifest, Record
from tests.support.edited_files import edit_safetensors_header


@dataclass(frozen=True)
class Source:
    """A writable copy of a checkpoint, and what the user says of it."""

    path: Path
    told: dict[str, str]

    def manifest(self) -> Manifest:
        """Read the manifest, as the readers see it."""
        return formats.read(self.path, **self.told)

    def file(self, pattern: str) -> Path:
        """Return the only file of a name."""
        (found,) = self.path.rglob(pattern)
        return found


def largest(manifest: Manifest, kind: str) -> Entry:
    """Return the largest tensor of floating point numbers of a kind."""
    return max(
        (e for e in manifest.of_kind(kind) if e.dtype.family == "float"), key=lambda e: e.numel
    )


def write(
    source: Source, entry: Entry, flat: int, data: bytes, *, seal: bool, replica: int = 0
) -> None:
    """Put bytes where an element is stored.

    Args:
        seal: make the stored CRC-32 right again, as a program would that wrote it so.
    """
    index = index_of(flat, entry.shape)
    first = find_chunk(entry, index)
    chunk = [c for c in entry.chunks if c.box == first.box][replica]
    inside = (i - o for i, o in zip(index, chunk.box.origin, strict=True))
    at = chunk.byte_offset + sum(i * s for i, s in zip(inside, chunk.byte_strides, strict=True))
    content = bytearray(Path(chunk.file).read_bytes())
    content[at : at + len(data)] = data
    records = source.manifest().files[chunk.file].records
    for record in records if seal else ():
        stop = record.byte_offset + record.nbytes
        if record.byte_offset <= at < stop and record.crc32 is not None:
            _reseal(content, record, zlib.crc32(content[record.byte_offset : stop]))
    Path(chunk.file).write_bytes(content)


def _reseal(content: bytearray, record: Record, crc: int) -> None:
    """Write a member's CRC-32 into the directory of its archive, the next one in the file."""
    name = record.name.encode()
    at = record.byte_offset + record.nbytes
    while True:
        at = content.index(b"PK\x01\x02", at + 1)
        if content[at + 46 : at + 46 + len(name)] == name:
            break
    content[at + 16 : at + 20] = crc.to_bytes(4, "little")


def read(entry: Entry, flat: int, numel: int = 1) -> bytes:
    """Return the bytes of neighbouring elements of one stored block."""
    chunk = find_chunk(entry, index_of(flat, entry.shape))
    inside = (i - o for i, o in zip(index_of(flat, entry.shape), chunk.box.origin, strict=True))
    at = chunk.byte_offset + sum(i * s for i, s in zip(inside, chunk.byte_strides, strict=True))
    with Path(chunk.file).open("rb") as file:
        file.seek(at)
        return file.read(numel * chunk.dtype.itemsize)


def flip(kind: str, *, seal: bool, replica: int = 0, byte: int = 0) -> Callable[[Source], None]:
    """Flip the lowest bit of a byte in the middle of the largest tensor of a kind."""

    def damage(source: Source) -> None:
        entry = largest(source.manifest(), kind)
        at = entry.numel // 2
        data = bytearray(read(entry, at))
        data[byte] ^= 1
        write(source, entry, at, bytes(data), seal=seal, replica=replica)

    return damage


def put(kind: str, value: float) -> Callable[[Source], None]:
    """Replace a number, with checksums that fit the new one."""

    def damage(source: Source) -> None:
        entry = largest(source.manifest(), kind)
        raw = torch.tensor([value], dtype=getattr(torch, entry.dtype.name)).view(torch.uint8)
        write(source, entry, entry.numel // 3, raw.numpy().tobytes(), seal=True)

    return damage


def clear(kind: str) -> Callable[[Source], None]:
    """Write zeros over a whole tensor."""

    def damage(source: Source) -> None:
        entry = largest(source.manifest(), kind)
        for chunk in entry.chunks:
            nbytes = chunk.box.volume * chunk.dtype.itemsize
            flat = sum(o * prod(entry.shape[d + 1 :]) for d, o in enumerate(chunk.box.origin))
            write(source, entry, flat, bytes(nbytes), seal=True)

    return damage


def shift_by_one(state: Any) -> None:
    """Move a flat partition by one element, so that the last parameter ends in the padding."""
    for flat in state["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
        flat.copy_(flat.roll(1))


def swap_tensors(kind: str) -> Callable[[Source], None]:
    """Swap the contents of two tensors of one shape."""

    def damage(source: Source) -> None:
        held: dict[Any, list[Entry]] = {}
        for entry in source.manifest().of_kind(kind):
            held.setdefault((entry.shape, entry.dtype), []).append(entry)
        pairs = [es for (shape, _), es in held.items() if len(shape) == 2 and len(es) > 1]
        one, two, *_ = max(pairs, key=lambda es: es[0].numel)
        a, b = (read(entry, 0, entry.numel) for entry in (one, two))
        assert a != b
        for entry, data in ((one, b), (two, a)):
            assert len(entry.chunks) == 1, "stored whole"
            write(source, entry, 0, data, seal=True)

    return damage


def transpose(source: Source) -> None:
    """Transpose one rank's shard of a square matrix."""
    for entry in source.manifest().of_kind("param"):
        for chunk in entry.chunks:
            rows, *columns = chunk.box.shape or (0,)
            if len(columns) == 1 and rows > 1 and columns[0] > 1 and len(entry.chunks) > 1:
                flat = chunk.box.origin[0] * entry.shape[1] + chunk.box.origin[1]
                size = chunk.dtype.itemsize
                raw = read(entry, flat, rows * columns[0])
                cells = [raw[i : i + size] for i in range(0, len(raw), size)]
                turned = b"".join(
                    cells[r * columns[0] + c] for c in range(columns[0]) for r in range(rows)
                )
                write(source, entry, flat, turned, seal=True)
                return
    raise AssertionError("no such shard")


def swap_files(one: str, two: str) -> Callable[[Source], None]:
    """Swap the names of two files."""

    def damage(source: Source) -> None:
        a, b = source.file(one), source.file(two)
        aside = a.with_name("aside")
        a.rename(aside)
        b.rename(a)
        aside.rename(b)

    return damage


def swap_contents(one: str, two: str) -> Callable[[Source], None]:
    """Swap the objects in two ranks' files, and save both again."""

    def damage(source: Source) -> None:
        a, b = source.file(one), source.file(two)
        left, right = (torch.load(path, weights_only=False) for path in (a, b))
        torch.save(right, a)
        torch.save(left, b)

    return damage


def copy_file(one: str, name: str) -> Callable[[Source], None]:
    """Add a file of a larger, older run."""

    def damage(source: Source) -> None:
        path = source.file(one)
        shutil.copy(path, path.with_name(name))

    return damage


def remove(pattern: str) -> Callable[[Source], None]:
    """Remove a file, as if it was not fetched."""
    return lambda source: source.file(pattern).unlink()


def truncate(pattern: str) -> Callable[[Source], None]:
    """Cut off the end of a file."""

    def damage(source: Source) -> None:
        path = source.file(pattern)
        os.truncate(path, path.stat().st_size * 9 // 10)

    return damage


def edit_file(path: Path, change: Callable[[Any], None]) -> None:
    """Load a file, change its content and save it, as a program does."""
    state = torch.load(path, weights_only=False)
    with torch.no_grad():
        change(state)
    torch.save(state, path)


def edit(pattern: str, change: Callable[[Any], None]) -> Callable[[Source], None]:
    """Load, change and save every file of a name."""

    def damage(source: Source) -> None:
        paths = sorted(source.path.rglob(pattern))
        assert paths
        for path in paths:
            edit_file(path, change)

    return damage


def edit_json(pattern: str, change: Callable[[Any], None]) -> Callable[[Source], None]:
    """Change a JSON file."""

    def damage(source: Source) -> None:
        path = source.file(pattern)
        held = json.loads(path.read_text())
        change(held)
        path.write_text(json.dumps(held))

    return damage


def edit_header(pattern: str, change: Callable[[Any], None]) -> Callable[[Source], None]:
    """Change the header of a safetensors file."""

    def damage(source: Source) -> None:
        edit_safetensors_header(source.file(pattern), change)

    return damage


def save_again_by_dcp(change: Callable[[Any], None]) -> Callable[[Source], None]:
    """Load, change and save a DCP directory with PyTorch."""

    def damage(source: Source) -> None:
        from torch.distributed.checkpoint.format_utils import (
            dcp_to_torch_save,
            torch_save_to_dcp,
        )

        whole = source.path.with_name("whole.pt")
        dcp_to_torch_save(source.path, whole)
        edit_file(whole, change)
        shutil.rmtree(source.path)
        torch_save_to_dcp(whole, source.path)

    return damage


class Attack:
    """What a pickle must not be allowed to do."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def attack(state: Any) -> None:
    """Return an object that runs a command when it is loaded."""
    state["more"] = Attack()
