"""Lay out a DCP directory: a ``.metadata`` and one ``__R_0.distcp`` for each shard.

Each item is a complete ``torch.save`` archive, as ``FileSystemWriter`` makes them, with two
differences: items begin at multiples of 64 bytes, so that tensors do too, and ``.metadata`` neither
states the path of the directory nor is written in protocol 4.

Sources: torch 2.13 ``distributed/checkpoint/{metadata,filesystem,default_planner,_traverse}.py``,
``distributed/checkpoint/planner_helpers.py`` (which blocks a DTensor has).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.containers.pickles.canonical import Canonicalizer
from reshard.containers.pickles.pickler import Pickler
from reshard.containers.pickles.values import Call, Global, UnsharedItems, UnsharedObject
from reshard.containers.torch_writer import Part, Slot, Storage
from reshard.containers.zip_writer import ALIGNMENT
from reshard.core.box import Box, Index, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry, Key, OutputFile, Skeleton, StoredChecksum
from reshard.errors import UnsupportedError
from reshard.formats.request import Request
from reshard.formats.trainers.accelerate import lay_out_accelerate_extras
from reshard.layouts.partition import compute_equal_piece
from reshard.model.adapter_names import find_saved_names
from reshard.state_dict import torch_state_dict
from reshard.state_dict.torch_state_dict import Value
from reshard.training.state import WritableState

_VERSION = "1.0.0"
_DCP = "torch.distributed.checkpoint"
_METADATA = f"{_DCP}.metadata"
_Path = tuple[Any, ...]  # str and int


def lay_out(state: WritableState, request: Request) -> Skeleton:
    """Lay out one DCP directory of a training state, with a data file for each rank.

    Each tensor is cut along its first dim as FSDP 2 cuts it.

    Raises:
        IncompleteError: the source lacks what the optimizer needs.
    """
    root: dict[str, Any] = {"model": torch_state_dict.build_weights(state, dtype=request.dtype)}
    if not request.weights_only:
        root["optim"] = _build_optimizer(state)
    beside = torch_state_dict.collect_extra_state(state.manifest.train)
    root.update((name, value) for name, value in beside.items() if name not in root)
    return lay_out_state(root, shards=request.world_size)


def lay_out_fsdp(state: WritableState, request: Request) -> Skeleton:
    """Lay out the two directories of FSDP's ``SHARDED_STATE_DICT``, named as by Accelerate.

    The weights of an adapter without its base have PEFT's names beside an optimizer, as HF Trainer
    saves and loads them; the optimizer's names show those of the model.
    """
    shards, weights_only = request.world_size, request.weights_only
    names = {} if weights_only else find_saved_names(weight.fqn for weight in state.weights)
    weights = torch_state_dict.build_weights(state, dtype=request.dtype)
    saved = {names.get(fqn, fqn): value for fqn, value in weights.items()}
    model = lay_out_state({"model": saved}, shards=shards, directory="pytorch_model_fsdp_0")
    if weights_only:
        return model
    root = {"optimizer": _build_optimizer(state)}
    moments = lay_out_state(root, shards=shards, directory="optimizer_0")
    return skeletons.join([model, moments])


def _build_optimizer(state: WritableState) -> dict[str, Any]:
    """Build the optimizer's state dict with ``param_names``, for optimizers of named parameters."""
    return torch_state_dict.build_optimizer(state, "fqn", named=True)


def lay_out_accelerate(state: WritableState, request: Request) -> Skeleton:
    """Lay out what Accelerate's ``save_state`` writes under ``SHARDED_STATE_DICT``."""
    parts = [lay_out_fsdp(state, request)]
    if not request.weights_only:
        parts += lay_out_accelerate_extras(state, request.world_size)
    return skeletons.join(parts)


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor of the source whose items are copied as they are.

    Args:
        blocks: each block, and the entry of the bytes of its item in the source.
    """

    dtype: DType
    shape: Index
    blocks: tuple[tuple[Box, Entry], ...]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that is stored as one item; its tensors are `Slot`."""

    value: Any


def lay_out_state(
    root: Mapping[str, Any],
    *,
    shards: int,
    directory: str = "",
    attributes: Mapping[str, Any] | None = None,
) -> Skeleton:
    """Lay out the directory of any nested state dict with a `Value` for each tensor.

    Args:
        attributes: what a program adds to the object in ``.metadata``.

    Raises:
        UnsupportedError: two of its keys are the same once joined.
    """
    leaves = flatten(Canonicalizer().convert(root))
    return lay_out_leaves(leaves, shards=shards, directory=directory, attributes=attributes)


def lay_out_leaves(
    leaves: Iterable[tuple[_Path, Any]],
    *,
    shards: int,
    directory: str,
    attributes: Mapping[str, Any] | None = None,
) -> Skeleton:
    """Lay out the directory of a state dict that is flattened into leaves, each with its path.

    Raises:
        UnsupportedError: two paths are the same once joined.
    """
    prefix = f"{directory}/" if directory else ""
    templates = _TemplateCache()
    files = [_DataFile(prefix, f"__{rank}_0.distcp", templates) for rank in range(shards)]
    about = _MetadataBuilder(attributes or {})
    for path, value in leaves:
        key = ".".join(map(str, path))
        if key in about.paths:
            raise UnsupportedError(
                key, "is the joined name of two different values; DCP cannot store both"
            )
        about.paths[key] = path
        if isinstance(value, Value):
            _add_tensor(about, files, key, value)
        elif isinstance(value, CopiedTensor):
            _add_copy(about, files, key, value)
        elif isinstance(value, Entry):
            about.add_object(key, files[0], files[0].add_copy(value))
        else:
            item = value.value if isinstance(value, StoredObject) else value
            about.add_object(key, files[0], files[0].add_object(item))
    pickle = about.build_pickle(f"{prefix}.metadata")
    data_files = [file.build_skeleton() for file in files if file.at]
    return skeletons.join([*data_files, skeletons.lay_out_bytes(f"{prefix}.metadata", pickle)])


def flatten(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Yield leaves with their paths, as ``flatten_state_dict`` makes them.

    Dicts are always flattened, a list only if it has dicts or tensors. An empty dict is lost.
    """
    if isinstance(value, Entry):
        value = Value(value.dtype, value.shape, value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, (*path, str(key)))
    elif isinstance(value, list) and any(map(_is_nest, value)):
        for number, item in enumerate(value):
            yield from flatten(item, (*path, number))
    else:
        yield path, value


def _is_nest(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_nest, value))
    return isinstance(value, (Mapping, Value, Entry))


def divide(value: Value, shards: int) -> list[tuple[int, Box]]:
    """Return (shard, block) of a tensor; of empty blocks at one origin, only the first.

    >>> from reshard.core import dtypes
    >>> [(r, b.origin, b.shape) for r, b in divide(Value(dtypes.UINT8, (3,), divided=True), 4)]
    [(0, (0,), (1,)), (1, (1,), (1,)), (2, (2,), (1,)), (3, (3,), (0,))]
    """
    if not value.divided or not value.shape:
        return [(0, whole(value.shape))]
    by_origin: dict[Index, tuple[int, Box]] = {}
    zeros = (0,) * (len(value.shape) - 1)
    for rank in range(shards):
        start, stop = compute_equal_piece(value.shape[0], shards, rank)
        box = Box((start, *zeros), (stop - start, *value.shape[1:]))
        by_origin.setdefault(box.origin, (rank, box))
    return list(by_origin.values())


def _add_tensor(
    about: _MetadataBuilder, files: Sequence[_DataFile], key: str, value: Value
) -> None:
    placed = [
        (rank, box, files[rank].add_block(value, box)) for rank, box in divide(value, len(files))
    ]
    about.add_tensor(key, value, [(files[rank], box, position) for rank, box, position in placed])


def _add_copy(
    about: _MetadataBuilder, files: Sequence[_DataFile], key: str, value: CopiedTensor
) -> None:
    placed = []
    for number, (box, item) in enumerate(value.blocks):
        file = files[number % len(files)]
        placed.append((file, box, file.add_copy(item)))
    about.add_tensor(key, Value(value.dtype, value.shape), placed)


# The data files


@dataclass(frozen=True, slots=True)
class _ItemTemplate:
    """An item of one dtype and shape, laid out as at the beginning of a file."""

    skeleton: Skeleton
    chunk: Chunk | None  # the position of its elements, if it has any


class _TemplateCache(dict[tuple[DType, Index], _ItemTemplate]):
    """Items of equal dtype and shape, each laid out once."""

    def __missing__(self, key: tuple[DType, Index]) -> _ItemTemplate:
        dtype, shape = key
        box = whole(shape)
        parts = (Part("", "", shape, box),) if box.volume else ()
        skeleton = torch_writer.lay_out_object("", Slot(Storage(dtype, box.volume, parts), shape))
        chunk = skeleton.entries[0].chunks[0] if skeleton.entries else None
        return self.setdefault(key, _ItemTemplate(skeleton, chunk))


_Position = tuple[int, int]  # byte offset, nbytes


@dataclass(slots=True)
class _DataFile:
    """One ``.distcp`` file that grows by one item at a time."""

    prefix: str
    name: str  # in .metadata
    templates: _TemplateCache
    at: int = 0
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    checksums: list[StoredChecksum] = field(default_factory=list)
    entries: dict[Key, Entry] = field(default_factory=dict)
    chunks: dict[Key, list[Chunk]] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path below the destination."""
        return self.prefix + self.name

    def add_block(self, value: Value, box: Box) -> _Position:
        """Add a block of a tensor."""
        if value.entry is None:
            slot = Slot(Storage(value.dtype, box.volume, data=value.data), box.shape)
            return self._append(torch_writer.lay_out_object(self.path, slot, in_stream=True))
        template = self.templates[value.dtype, box.shape]
        start, nbytes = self._append(template.skeleton)
        if template.chunk is not None:
            entry, at = value.entry, start + template.chunk.byte_offset
            chunk = Chunk(box, self.path, at, template.chunk.byte_strides, value.dtype)
            empty = Entry(entry.fqn, entry.kind, value.dtype, entry.shape, ())
            self.entries.setdefault(entry.key, empty)
            self.chunks.setdefault(entry.key, []).append(chunk)
        return start, nbytes

    def add_object(self, value: Any) -> _Position:
        """Add a pickled object."""
        item = torch_writer.lay_out_object(self.path, value, in_stream=True)
        start, nbytes = self._append(item)
        for entry in item.entries:
            moved = (replace(c, byte_offset=c.byte_offset + start) for c in entry.chunks)
            self.entries.setdefault(entry.key, replace(entry, chunks=()))
            self.chunks.setdefault(entry.key, []).extend(moved)
        return start, nbytes

    def add_copy(self, item: Entry) -> _Position:
        """Add the bytes of an item of the source."""
        start = self.at + -self.at % ALIGNMENT
        chunk = contiguous(self.path, start, item.dtype, whole(item.shape))
        self.entries[item.key] = replace(item, chunks=())
        self.chunks[item.key] = [chunk]
        self.at = start + item.nbytes
        return start, item.nbytes

    def build_skeleton(self) -> Skeleton:
        """Return the file."""
        entries = tuple(
            Entry(e.fqn, e.kind, e.dtype, e.shape, tuple(self.chunks[key]))
            for key, e in self.entries.items()
        )
        file = OutputFile(self.path, self.at, tuple(self.literals))
        return Skeleton((file,), entries, tuple(self.checksums))

    def _append(self, item: Skeleton) -> _Position:
        """Append an archive at a multiple of its own alignment."""
        (file,) = item.files
        start = self.at + -self.at % ALIGNMENT
        self.literals += skeletons.shift_literals(file, start)
        self.checksums += skeletons.shift_checksums(item, self.path, start)
        self.at = start + file.nbytes
        return start, file.nbytes


# .metadata

_Block = tuple[_DataFile, Box, _Position]


@dataclass(frozen=True, slots=True)
class _PlacedTensor:
    """A tensor, and where its blocks are stored."""

    dtype: DType
    shape: Index
    blocks: Sequence[_Block]


@dataclass(frozen=True, slots=True)
class _PlacedObject:
    """A pickled object, and where it is stored."""

    file: _DataFile
    position: _Position


@dataclass(slots=True)
class _MetadataBuilder:
    """The content of ``.metadata``, as it grows."""

    attributes: Mapping[str, Any]
    paths: dict[str, _Path] = field(default_factory=dict)
    leaves: dict[str, _PlacedTensor | _PlacedObject] = field(default_factory=dict)
    properties: dict[DType, Call] = field(default_factory=dict)
    sizes: dict[Index, Call] = field(default_factory=dict)

    def add_object(self, key: str, file: _DataFile, position: _Position) -> None:
        """Add a pickled object."""
        self.leaves[key] = _PlacedObject(file, position)

    def add_tensor(self, key: str, value: Value, blocks: Sequence[_Block]) -> None:
        """Add a tensor and its blocks."""
        self.leaves[key] = _PlacedTensor(value.dtype, value.shape, blocks)

    def build_pickle(self, where: str) -> bytes:
        """Return the file's content."""
        announced = ((key, self._announce(leaf)) for key, leaf in self.leaves.items())
        count = sum(
            len(leaf.blocks) if isinstance(leaf, _PlacedTensor) else 1
            for leaf in self.leaves.values()
        )
        state = {
            "state_dict_metadata": UnsharedItems(dict, len(self.leaves), announced),
            "planner_data": self.paths,
            "storage_data": UnsharedItems(dict, count, self._make_storage_data()),
            "storage_meta": None,  # names the directory; torch's reader accepts None
            "version": _VERSION,
            **self.attributes,
        }
        pickler = Pickler(where)
        pickler.write(UnsharedObject(f"{_METADATA}.Metadata", state))
        return pickler.finish()

    def _announce(self, leaf: _PlacedTensor | _PlacedObject) -> UnsharedObject:
        """Return the metadata of a tensor or an object."""
        if isinstance(leaf, _PlacedObject):
            return UnsharedObject(f"{_METADATA}.BytesStorageMetadata")
        chunks = (
            UnsharedObject(
                f"{_METADATA}.ChunkStorageMetadata",
                {"offsets": self._share_size(box.origin), "sizes": self._share_size(box.shape)},
            )
            for _, box, _ in leaf.blocks
        )
        state = {
            "properties": self._share_properties(leaf.dtype),
            "size": self._share_size(leaf.shape),
            "chunks": UnsharedItems(list, len(leaf.blocks), chunks),
        }
        return UnsharedObject(f"{_METADATA}.TensorStorageMetadata", state)

    def _make_storage_data(self) -> Iterator[tuple[UnsharedObject, UnsharedObject]]:
        """Yield the key of each block and object, and where it is stored."""
        for key, leaf in self.leaves.items():
            if isinstance(leaf, _PlacedObject):
                yield _make_stored({"fqn": key, "index": None}, leaf.file, leaf.position)
                continue
            for number, (file, box, position) in enumerate(leaf.blocks):
                offset = self._share_size(box.origin)
                yield _make_stored({"fqn": key, "index": number, "offset": offset}, file, position)

    def _share_size(self, index: Index) -> Call:
        return self.sizes.setdefault(index, Call("torch.Size", (index,)))

    def _share_properties(self, dtype: DType) -> Call:
        if dtype not in self.properties:
            layout = Call("torch.serialization._get_layout", ("torch.strided",))
            memory = Call(f"{_METADATA}._MEM_FORMAT_ENCODING", (0,))
            state = (Global(f"torch.{dtype.name}"), layout, False, memory, False)
            self.properties[dtype] = Call(f"{_METADATA}.TensorProperties", (), state)
        return self.properties[dtype]


def _make_stored(
    index: Mapping[str, Any], file: _DataFile, position: _Position
) -> tuple[UnsharedObject, UnsharedObject]:
    info = {"relative_path": file.name, "offset": position[0], "length": position[1]}
    return (
        UnsharedObject(f"{_METADATA}.MetadataIndex", index),
        UnsharedObject(f"{_DCP}.filesystem._StorageInfo", info),
    )
