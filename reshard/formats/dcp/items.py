"""Read the items of DCP: each a ``torch.save`` archive, or a tensor of a safetensors stream.

Items begin at any byte, so nothing in them is aligned. A tensor is stored in its memory order,
which only the pickle inside the item states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from reshard.containers import safetensors, torch_objects, torch_reader
from reshard.containers.pickles.values import Call
from reshard.containers.torch_objects import Tensor
from reshard.core.box import Box
from reshard.core.chunks import Chunk
from reshard.core.dtypes import DType
from reshard.core.manifest import Record, SourceFile
from reshard.errors import CorruptError, UnsupportedError
from reshard.formats.dcp.archives import ArchiveCache
from reshard.formats.dcp.metadata import Block
from reshard.quantised import moments
from reshard.system.files import LFS_HEAD, Section, SourceFiles, refuse_lfs_pointer
from reshard.system.ranges import Range

ZIP = b"PK"  # the first bytes of a torch.save archive
_BATCH = 512  # blocks whose archives are opened together
_MIXED = "the file and .metadata belong to different saves: fetch the checkpoint again as a whole"
# The fault is in torch 2.13 ``distributed/tensor/_utils.py``: the blocks of a `_StridedShard`.
_UNEVEN = (
    f"{_MIXED}. If FSDP and tensor parallelism cut it along one dim, and a rank has no rows of it,"
    " torch itself saved wrong blocks: save one file per rank with torch.save"
)


class ItemReader:
    """Reads blocks and objects of the ``.distcp`` files of one checkpoint."""

    def __init__(self, pool: SourceFiles) -> None:
        self.globals: set[str] = set()
        self._pool = pool
        self._archives = ArchiveCache()
        self._taken: set[tuple[str, int]] = set()
        self._records: dict[str, list[Record]] = {}
        self._streams: dict[tuple[str, int], dict[str, Chunk]] = {}

    def list_sources(self) -> dict[str, SourceFile]:
        """Return every file that was opened, as a manifest lists it."""
        return {
            path: SourceFile(
                path,
                self._get_size(path),
                tuple(sorted(records, key=lambda record: record.byte_offset)),
                version=self._pool.find_version(path),
            )
            for path, records in self._records.items()
        }

    def read_chunks(self, stored: Sequence[tuple[Path, Block, DType]]) -> list[Chunk | Call]:
        """Return for each block its chunk, or the `Call` of a tensor that its class computes.

        The files are read one after the other, and the ends of many archives are fetched at a time:
        over a network, each read by itself would take a round trip.

        Args:
            stored: blocks, with the paths of their files and the dtypes of their tensors.
        """
        places = [(str(path), block.byte_offset, block.nbytes) for path, block, _ in stored]
        order = sorted(range(len(stored)), key=places.__getitem__)
        found: dict[int, Chunk | Call] = {}
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            fetched = self._pool.prefetch(self._list_ends(places[number] for number in batch))
            for number in batch:
                found[number] = self._read_chunk(*stored[number])
            self._pool.drop(fetched)
        return [found[number] for number in range(len(stored))]

    def _list_ends(self, places: Iterable[Range]) -> Iterator[Range]:
        """Yield the ranges that are read first, of all archives that their files can contain."""
        for name, start, nbytes in places:
            if start + nbytes <= self._get_size(name):
                for offset, count in Section.find_ends(start, nbytes):
                    yield name, offset, count

    def _read_chunk(self, path: Path, block: Block, dtype: DType) -> Chunk | Call:
        section = self._find_section(str(path), block)
        if section is None:
            return self._read_from_stream(str(path), block, dtype)
        # Two blocks of one dtype and shape could be read from one position, one with wrong values.
        if (section.path, section.start) in self._taken:
            raise CorruptError(
                path,
                f".metadata places both {block.key!r} and another block at byte"
                f" {block.byte_offset}",
                ".metadata was altered, or belongs to another save",
            )
        self._taken.add((section.path, section.start))
        box = block.box or Box((), ())
        known = self._archives.find(section)
        if known:
            whole, record = known
            self._records[section.path].append(record)
        else:
            file = self._open(section)
            tensor = file.root
            values = moments.describe(tensor)
            if values is not None and values.box.shape == box.shape:
                return replace(values, box=box)
            if torch_objects.is_wrapped(tensor):
                described: Call = tensor
                return described
            if not isinstance(tensor, Tensor):
                raise _build_error(path, block, dtype, type(tensor).__name__)
            self._archives.add(file, section)
            whole = tensor.chunk
        if whole.box.shape != box.shape or whole.dtype != dtype:
            is_uneven = whole.dtype == dtype and whole.box.shape[1:] == box.shape[1:]
            remedy = _UNEVEN if is_uneven else _MIXED
            raise _build_error(path, block, dtype, f"{whole.dtype} {whole.box.shape}", remedy)
        return Chunk(box, whole.file, whole.byte_offset, whole.byte_strides, dtype)

    def read_object(self, path: Path, block: Block) -> torch_objects.TorchFile:
        """Return a stored object; its tensors are described, and its classes are names.

        Raises:
            UnsupportedError: the object was not saved by ``torch.save``.
            CorruptError: the archive is damaged.
        """
        section = self._find_section(str(path), block)
        if section is None:
            raise UnsupportedError(path, f"{block.key!r} is not a torch.save archive")
        return self._open(section)

    def _open(self, section: Section) -> torch_objects.TorchFile:
        file = torch_reader.read_archive(section)
        self.globals |= file.globals
        self._records[section.path] += file.records.values()
        return file

    def _get_size(self, name: str) -> int:
        self._records.setdefault(name, [])
        return self._pool.find_version(name).nbytes

    def _find_section(self, name: str, block: Block) -> Section | None:
        """Return the archive of a block; None if a safetensors stream begins there."""
        stop, size = block.byte_offset + block.nbytes, self._get_size(name)
        if stop > size:
            refuse_lfs_pointer(name, self._pool.read(name, 0, min(size, LFS_HEAD)))
            raise CorruptError(
                name,
                f".metadata places {block.key!r} at bytes {block.byte_offset} to {stop}, but the"
                f" file has {size}",
                "the file is truncated: fetch it again",
            )
        if (name, block.byte_offset) in self._streams:
            return None
        section = Section(self._pool, name, block.byte_offset, block.nbytes)
        return section if section.read(0, min(2, section.nbytes)) == ZIP else None

    def _read_from_stream(self, name: str, block: Block, dtype: DType) -> Chunk:
        # A file has at most one stream, behind its objects. For each of its tensors the metadata
        # give the offset of the stream, not that of the tensor.
        position = (name, block.byte_offset)
        if position not in self._streams:
            nbytes = self._get_size(name) - block.byte_offset
            section = Section(self._pool, name, block.byte_offset, nbytes)
            if section.read(0, min(9, nbytes))[8:] != b"{":
                raise CorruptError(
                    name,
                    f".metadata places {block.key!r} at byte {block.byte_offset}, where neither a"
                    " torch.save archive nor a safetensors stream begins",
                    _MIXED,
                )
            self._streams[position] = safetensors.read_section(section).tensors
        chunk = self._streams[position].get(block.key)
        box = block.box or Box((), ())
        if chunk is None or (chunk.box.shape, chunk.dtype) != (box.shape, dtype):
            raise CorruptError(
                name,
                f"does not contain {block.key!r} ({dtype} {box.shape}) at byte {block.byte_offset}",
                _MIXED,
            )
        return replace(chunk, box=box)


def _build_error(
    path: Path, block: Block, dtype: DType, found: str, remedy: str = _MIXED
) -> CorruptError:
    shape = block.box.shape if block.box else ()
    return CorruptError(
        path,
        f"contains {found} at byte {block.byte_offset}, but .metadata states {dtype} {shape} of"
        f" {block.key!r} there",
        remedy,
    )
