"""Lay out a DCP directory: a ``.metadata`` and one ``__R_0.distcp`` for each shard.

Each item is a complete ``torch.save`` archive, as ``FileSystemWriter`` makes them, with two
differences: items begin at multiples of 64 bytes, so that tensors do too, and ``.metadata`` neither
states the path of the directory nor is written in protocol 4.

Sources: torch 2.13 ``distributed/checkpoint/{metadata,filesystem,default_planner,_traverse}.py``,
``distributed/checkpoint/planner_helpers.py`` (which blocks a DTensor has).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add
from typing import Any, cast

from reshard.containers import skeletons, torch_writer
from reshard.containers.pickles.canonical import Canonicalizer
from reshard.containers.pickles.pickler import Pickler
from reshard.containers.pickles.values import Call, Global, UnsharedItems, UnsharedObject
from reshard.containers.torch_writer import Storage, StorageBlock, StorageView
from reshard.containers.zip_writer import ALIGNMENT
from reshard.core.box import Box, Index, whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry, OutputFile, Skeleton, StoredChecksum
from reshard.errors import UnsupportedError
from reshard.formats.request import Request
from reshard.formats.trainers.accelerate import lay_out_accelerate_extras
from reshard.layouts.blocks import RankBlocks, RankBoxes
from reshard.layouts.partition import compute_equal_piece
from reshard.model.adapter_names import find_saved_names
from reshard.state_dict import torch_state_dict
from reshard.state_dict.torch_state_dict import StateTensor
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
class PiecedTensor:
    """A tensor whose blocks are laid out by the caller, each as an item of one file.

    Args:
        pieces: each block, and the elements that it stores.
        number: that of the file, among as many as there are shards.
    """

    dtype: DType
    shape: Index
    pieces: tuple[tuple[Box, Storage], ...]
    number: int = 0


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that is stored as one item; its tensors are `StorageView`."""

    value: Any


def lay_out_state(
    root: Mapping[str, Any],
    *,
    shards: int,
    directory: str = "",
    attributes: Mapping[str, Any] | None = None,
) -> Skeleton:
    """Lay out the directory of any nested state dict with a `StateTensor` for each tensor.

    Args:
        attributes: what a program adds to the object in ``.metadata``.
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
    files = _DataFiles([f"__{rank}_0.distcp" for rank in range(shards)], prefix)
    about = _MetadataBuilder(attributes or {})
    for path, value in leaves:
        key = ".".join(map(str, path))
        if key in about.paths:
            raise UnsupportedError(
                key, "is the joined name of two different values; DCP cannot store both"
            )
        about.paths[key] = path
        if isinstance(value, StateTensor):
            about.leaves[key] = files.add_tensor(value)
        elif isinstance(value, CopiedTensor):
            about.leaves[key] = files.add_copies(value)
        elif isinstance(value, PiecedTensor):
            about.leaves[key] = files.add_pieces(value)
        elif isinstance(value, Entry):
            about.leaves[key] = files.add_copy(value)
        else:
            item = value.value if isinstance(value, StoredObject) else value
            about.leaves[key] = files.add_object(item)
    metadata = OutputFile.from_bytes(f"{prefix}.metadata", about.build_pickle(f"{prefix}.metadata"))
    skeleton = files.build_skeleton()
    return Skeleton((*skeleton.files, metadata), skeleton.entries)


def flatten(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Yield leaves with their paths, as ``flatten_state_dict`` makes them.

    Dicts are always flattened, a list only if it has dicts or tensors. An empty dict is lost.
    """
    if isinstance(value, Entry):
        value = StateTensor(value.dtype, value.shape, value)
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
    return isinstance(value, (Mapping, StateTensor, Entry))


def divide(value: StateTensor, shards: int) -> list[Box]:
    """Return the block of each rank; of empty blocks at one origin, only the first.

    >>> from reshard.core import dtypes
    >>> [(b.origin, b.shape) for b in divide(StateTensor(dtypes.UINT8, (3,), divided=True), 5)]
    [((0,), (1,)), ((1,), (1,)), ((2,), (1,)), ((3,), (0,))]
    """
    if not value.divided or not value.shape:
        return [whole(value.shape)]
    by_origin: dict[Index, Box] = {}
    zeros = (0,) * (len(value.shape) - 1)
    for rank in range(shards):
        start, stop = compute_equal_piece(value.shape[0], shards, rank)
        box = Box((start, *zeros), (stop - start, *value.shape[1:]))
        by_origin.setdefault(box.origin, box)
    return list(by_origin.values())


# The data files


@dataclass(frozen=True, slots=True)
class _StoredItem:
    """An item, laid out as at the beginning of a file.

    Args:
        data_offset: where its elements begin, if it is a tensor with any.
    """

    file: OutputFile
    data_offset: int = 0

    @classmethod
    def lay_out(cls, value: Any) -> tuple[_StoredItem, tuple[Entry, ...]]:
        skeleton = torch_writer.lay_out_object("", value, in_stream=True)
        (file,) = skeleton.files
        file = replace(file, literals=tuple(file.literals))  # computed once for all items
        first = skeleton.entries[0].chunks[0].byte_offset if skeleton.entries else 0
        return cls(file, first), skeleton.entries


@dataclass(slots=True)
class _DataFile:
    """One ``.distcp`` file that grows by one item at a time.

    Args:
        starts: where each item with known bytes begins.
        items: those items; items of one dtype and shape are one object.
    """

    name: str  # in .metadata
    path: str  # below the destination
    at: int = 0
    starts: array[int] = field(default_factory=partial(array, "Q"))
    items: list[_StoredItem] = field(default_factory=list)

    def add(self, item: _StoredItem) -> int:
        start = self.at + -self.at % ALIGNMENT
        self.starts.append(start)
        self.items.append(item)
        self.at = start + item.file.nbytes
        return start

    def build(self) -> OutputFile:
        literals = _ItemLiterals(self.starts, self.items)
        return OutputFile(self.path, self.at, literals, _ItemChecksums(self.starts, self.items))


@dataclass(frozen=True, slots=True)
class _ItemLiterals:
    starts: Sequence[int]
    items: Sequence[_StoredItem]

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        end = 0  # of the item before
        at, known = 0, b""
        for start, item in zip(self.starts, self.items, strict=True):
            for offset, data in item.file.literals:
                # The end of an item and the begin of the next one are written at once.
                is_next = not offset and at + len(known) == end and start - end < ALIGNMENT
                if is_next:
                    known += bytes(start - end) + data
                    continue
                if known:
                    yield at, known
                at, known = start + offset, data
            end = start + item.file.nbytes
        if known:
            yield at, known


@dataclass(frozen=True, slots=True)
class _ItemChecksums:
    starts: Sequence[int]
    items: Sequence[_StoredItem]

    def __iter__(self) -> Iterator[StoredChecksum]:
        for start, item in zip(self.starts, self.items, strict=True):
            for offset, nbytes, locations in item.file.checksums:
                yield StoredChecksum(start + offset, nbytes, tuple(start + at for at in locations))


@dataclass(frozen=True, slots=True)
class _Division:
    """The blocks of all tensors of one dtype and shape, and their items, by rank."""

    boxes: RankBoxes
    items: Sequence[_StoredItem]
    sizes: Sequence[int]


class _DataFiles:
    """The data files of a directory.

    Args:
        names: those in .metadata.
        prefix: what comes before them below the destination.
    """

    def __init__(self, names: Iterable[str], prefix: str) -> None:
        self._files = [_DataFile(name, prefix + name) for name in names]
        self._entries: list[Entry] = []
        self._tensors: list[tuple[Entry, _Division, array[int]]] = []
        self._divisions: dict[tuple[DType, Index, bool, bytes | None], _Division] = {}

    def add_tensor(self, value: StateTensor) -> _PlacedTensor:
        division = self._divide(value)
        starts = array("Q", map(_DataFile.add, self._files, division.items))
        if value.entry is not None and value.numel:
            self._tensors.append((replace(value.entry, dtype=value.dtype), division, starts))
        boxes = division.boxes.boxes
        return _PlacedTensor(value.dtype, value.shape, self._files, boxes, starts, division.sizes)

    def add_copies(self, value: CopiedTensor) -> _PlacedTensor:
        placed = [self.add_copy(item, number) for number, (_, item) in enumerate(value.blocks)]
        return _PlacedTensor.join(value, [box for box, _ in value.blocks], placed)

    def add_copy(self, item: Entry, number: int = 0) -> _PlacedObject:
        file = self._files[number % len(self._files)]
        start = file.at + -file.at % ALIGNMENT
        chunk = contiguous(file.path, start, item.dtype, whole(item.shape))
        self._entries.append(replace(item, chunks=(chunk,)))
        file.at = start + item.nbytes
        return _PlacedObject(file, start, item.nbytes)

    def add_pieces(self, value: PiecedTensor) -> _PlacedTensor:
        slots = [StorageView(storage, box.shape) for box, storage in value.pieces]
        placed = [self.add_object(slot, value.number) for slot in slots]
        return _PlacedTensor.join(value, [box for box, _ in value.pieces], placed)

    def add_object(self, value: Any, number: int = 0) -> _PlacedObject:
        file = self._files[number % len(self._files)]
        item, entries = _StoredItem.lay_out(value)
        start = file.add(item)
        for entry in entries:
            chunks = (
                replace(chunk, file=file.path, byte_offset=start + chunk.byte_offset)
                for chunk in entry.chunks
            )
            self._entries.append(replace(entry, chunks=tuple(chunks)))
        return _PlacedObject(file, start, item.file.nbytes)

    def build_skeleton(self) -> Skeleton:
        """Return the files that have an item, the first ones: a tensor has no gap between ranks."""
        used = [file for file in self._files if file.at]
        paths = [file.path for file in used]
        parts = [Skeleton((), (entry,)) for entry in self._entries]
        for entry, division, starts in self._tensors:
            offsets = (item.data_offset for item in division.items)
            begins = array("Q", map(add, starts, offsets))
            chunks = RankBlocks(paths, division.boxes, begins.__getitem__, entry.dtype)
            parts.append(Skeleton((), (replace(entry, chunks=chunks),)))
        return skeletons.join([Skeleton(tuple(file.build() for file in used), ()), *parts])

    def _divide(self, value: StateTensor) -> _Division:
        key = value.dtype, value.shape, value.divided, value.data
        if key not in self._divisions:
            boxes = divide(value, len(self._files))
            by_shape = {
                shape: self._lay_out_block(value, Box((0,) * len(shape), shape))
                for shape in dict.fromkeys(box.shape for box in boxes)
            }
            items = [by_shape[box.shape] for box in boxes]
            sizes = [item.file.nbytes for item in items]
            self._divisions[key] = _Division(RankBoxes(value.shape, boxes), items, sizes)
        return self._divisions[key]

    @staticmethod
    def _lay_out_block(value: StateTensor, box: Box) -> _StoredItem:
        parts = (StorageBlock("", "", box.shape, box),) if box.volume and value.data is None else ()
        storage = Storage(value.dtype, box.volume, parts, value.data)
        return _StoredItem.lay_out(StorageView(storage, box.shape))[0]


# .metadata


@dataclass(frozen=True, slots=True)
class _PlacedTensor:
    """A tensor, and where its blocks are stored.

    Args:
        files, boxes, starts, sizes: of each block; there may be more files.
    """

    dtype: DType
    shape: Index
    files: Sequence[_DataFile]
    boxes: Sequence[Box]
    starts: Sequence[int]
    sizes: Sequence[int]

    @classmethod
    def join(
        cls,
        tensor: CopiedTensor | PiecedTensor,
        boxes: Sequence[Box],
        placed: Sequence[_PlacedObject],
    ) -> _PlacedTensor:
        return cls(
            tensor.dtype,
            tensor.shape,
            [item.file for item in placed],
            boxes,
            [item.start for item in placed],
            [item.nbytes for item in placed],
        )


@dataclass(frozen=True, slots=True)
class _PlacedObject:
    file: _DataFile
    start: int
    nbytes: int


@dataclass(slots=True)
class _MetadataBuilder:
    attributes: Mapping[str, Any]
    paths: dict[str, _Path] = field(default_factory=dict)
    leaves: dict[str, _PlacedTensor | _PlacedObject] = field(default_factory=dict)
    properties: dict[DType, Call] = field(default_factory=dict)
    sizes: dict[Index, Call] = field(default_factory=dict)

    def build_pickle(self, where: str) -> bytes:
        announced = ((key, self._announce(leaf)) for key, leaf in self.leaves.items())
        count = sum(
            len(leaf.boxes) if isinstance(leaf, _PlacedTensor) else 1
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
        pickler.out += b"."
        return cast("bytes", pickler.out)  # a copy would double the memory

    def _announce(self, leaf: _PlacedTensor | _PlacedObject) -> UnsharedObject:
        if isinstance(leaf, _PlacedObject):
            return UnsharedObject(f"{_METADATA}.BytesStorageMetadata")
        chunks = (
            UnsharedObject(
                f"{_METADATA}.ChunkStorageMetadata",
                {"offsets": self._share_size(box.origin), "sizes": self._share_size(box.shape)},
            )
            for box in leaf.boxes
        )
        state = {
            "properties": self._share_properties(leaf.dtype),
            "size": self._share_size(leaf.shape),
            "chunks": UnsharedItems(list, len(leaf.boxes), chunks),
        }
        return UnsharedObject(f"{_METADATA}.TensorStorageMetadata", state)

    def _make_storage_data(self) -> Iterator[tuple[UnsharedObject, UnsharedObject]]:
        for key, leaf in self.leaves.items():
            if isinstance(leaf, _PlacedObject):
                index: dict[str, Any] = {"fqn": key, "index": None}
                yield _make_stored(index, leaf.file.name, leaf.start, leaf.nbytes)
                continue
            placed = zip(leaf.files, leaf.boxes, leaf.starts, leaf.sizes, strict=False)
            for number, (file, box, start, nbytes) in enumerate(placed):
                offset = self._share_size(box.origin)
                index = {"fqn": key, "index": number, "offset": offset}
                yield _make_stored(index, file.name, start, nbytes)

    def _share_size(self, index: Index) -> Call:
        if index not in self.sizes:
            self.sizes[index] = Call("torch.Size", (index,))
        return self.sizes[index]

    def _share_properties(self, dtype: DType) -> Call:
        if dtype not in self.properties:
            layout = Call("torch.serialization._get_layout", ("torch.strided",))
            memory = Call(f"{_METADATA}._MEM_FORMAT_ENCODING", (0,))
            state = (Global(f"torch.{dtype.name}"), layout, False, memory, False)
            self.properties[dtype] = Call(f"{_METADATA}.TensorProperties", (), state)
        return self.properties[dtype]


def _make_stored(
    index: Mapping[str, Any], name: str, start: int, nbytes: int
) -> tuple[UnsharedObject, UnsharedObject]:
    info = {"relative_path": name, "offset": start, "length": nbytes}
    return (
        UnsharedObject(f"{_METADATA}.MetadataIndex", index),
        UnsharedObject(f"{_DCP}.filesystem._StorageInfo", info),
    )
