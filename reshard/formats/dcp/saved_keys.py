"""Keep the keys of DCP directories, so that the program that saved it loads the output.

Programs name the parts of their state dicts as they like (Composer ``state.model`` and
``state.optimizers.DecoupledAdamW``, torchtune ``optimizer.state.0.exp_avg``, torchtitan
``optimizer.state.<fqn>.exp_avg``), and ``dcp.load`` looks for exactly these keys. Weights and
optimizer slots are cut again; all other items are copied byte by byte, so that no object in them
has to be understood.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonpath
from pathlib import PurePosixPath
from typing import Any

from reshard.containers import skeletons
from reshard.containers.skeletons import LaidOut
from reshard.core.box import Box, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import UINT8, DType
from reshard.core.location import Location, leads_outside
from reshard.core.manifest import BUFFER, MASTER, PARAM, WEIGHT_KINDS, Entry, Key, Manifest
from reshard.formats.base import StateConversion
from reshard.formats.dcp import metadata, reader, writer
from reshard.formats.dcp.directory import is_metadata
from reshard.formats.dcp.items import ZIP
from reshard.formats.dcp.metadata import Block, Metadata, StoredTensor
from reshard.formats.dcp.writer import CopiedTensor
from reshard.formats.request import Request
from reshard.layouts.partition import compute_equal_piece
from reshard.quantised import moments
from reshard.state_dict import torch_state_dict
from reshard.state_dict.torch_state_dict import Value
from reshard.system.files import SourceFiles, get_size
from reshard.system.paths import as_path, find_rank
from reshard.training import copied_files
from reshard.training.copied_files import ITEM
from reshard.training.state import WritableState
from reshard.units import some

_NOTES = (".json", ".yaml", ".yml", ".txt", "")  # suffixes
# OLMo-core 3.0.0 ``train/checkpoint.py`` keeps its trainer's state beside its one directory of DCP,
# and does not find it elsewhere. Ranks without a file of their own read that of rank 0.
_BESIDE_TRAINER, _TRAINER = "model_and_optim", "train"
_OF_TRAINER = (
    "OLMo-core's ranks without a file in train/ read train/rank0.pt, and none restores its random"
    " state at another number of ranks"
)


@dataclass(frozen=True, slots=True)
class SavedDirectory:
    """The items of one DCP directory.

    Args:
        folder: its name below the top directory; empty for the top directory itself.
        path: where its files are.
        about: its metadata.
    """

    folder: str
    path: str
    about: Metadata

    @property
    def names(self) -> Mapping[str, tuple[Any, ...]]:
        """The path of each key in the state dict, also of one that its program flattened."""
        return reader.parse_flat_paths(self.about.paths) or self.about.paths


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedKeys(Request):
    """The request for the items of a checkpoint of one or several DCP directories.

    Args:
        directories: all directories that have items.
        owners: folder and key in ``.metadata`` -> the entry of the manifest that has the tensor.
        top: the directory that contains them, or the only one.
        beside: the source's other files, name below the top directory -> size.
    """

    directories: Sequence[SavedDirectory] = ()
    owners: Mapping[tuple[str, str], Key] = field(default_factory=dict)
    top: str = ""
    beside: Mapping[str, int] = field(default_factory=dict)


def find(conversion: StateConversion) -> SavedKeys | None:
    """Return the request for the items of the source, if the output can have the same keys.

    That is so if the user chose neither another layout, nor a part of the state, nor new param
    groups, and if all of the source is one DCP directory, or several side by side, whose names and
    tensors no pass has changed.

    Raises:
        ReshardError: as `metadata.read`.
    """
    manifest, request = conversion.manifest, conversion.request
    given = conversion.options.given()
    is_new = "param_groups" in given or given.get("init_optimizer") == "zeros"
    is_partial = request.weights_only and manifest.has_optimizer
    if not request.keeps_layout or is_partial or is_new or request.live.groups:
        return None
    if request.rng in ("derive", "drop"):
        return None
    paths = {PurePosixPath(path) for path in manifest.files}
    parents = sorted({path.parent for path in paths if path.suffix == ".distcp"})
    if not parents:
        return None
    top = PurePosixPath(commonpath(parents))
    is_beside_trainer = top.name == _BESIDE_TRAINER and _find_trainer(top.parent)
    top = top.parent if is_beside_trainer else top
    if not all(path.is_relative_to(top) for path in paths):
        return None
    directories = [_read_directory(parent, top) for parent in parents]
    found = [each for each in directories if each is not None]
    owners = _find_owners(manifest, found, request.world_size)
    if len(found) < len(parents) or not owners or not _can_copy(found, owners, manifest):
        return None
    beside = _find_files_beside(manifest, top, is_own=top not in parents)
    return replace(
        SavedKeys.of(request), directories=found, owners=owners, top=str(top), beside=beside
    )


def _read_directory(path: PurePosixPath, top: PurePosixPath) -> SavedDirectory | None:
    """Return the items of a directory; None if it has no metadata."""
    location = Location([as_path(str(path))])
    if not any(map(is_metadata, location.files)):
        return None
    about = metadata.read(reader.find_metadata_files(location))
    return SavedDirectory("/".join(path.relative_to(top).parts), str(location), about)


def _find_trainer(top: PurePosixPath) -> dict[str, str]:
    """Return the files of OLMo-core's trainer, name below the top directory -> path."""
    folder = Location([as_path(str(top))]).folders.get(_TRAINER)
    files = folder.files.items() if folder else ()
    root = as_path(str(top))
    return {f"{_TRAINER}/{n}": str(path) for n, path in files if not leads_outside(path, root)}


def _find_files_beside(manifest: Manifest, top: PurePosixPath, *, is_own: bool) -> dict[str, int]:
    """Return the files that are copied, name below the top directory -> size.

    They are the files that were read beside the items. If programs keep DCP's directories in one of
    their own, they also keep notes there that are not tensors, such as the step in a JSON file,
    without which they do not resume.
    """
    beside = {
        path.removeprefix(f"{top}/"): file.nbytes
        for path, file in manifest.files.items()
        if not path.endswith(".distcp")
    }
    if is_own:
        files = Location([as_path(str(top))]).files
        notes = {name: str(path) for name, path in files.items() if path.suffix in _NOTES}
        added = {**notes, **_find_trainer(top)}
        beside.update((name, get_size(path)) for name, path in added.items())
    return beside


def _find_owners(
    manifest: Manifest, directories: Sequence[SavedDirectory], ranks: int
) -> dict[tuple[str, str], Key]:
    """Return the entry of each key; empty if an entry is not exactly one stored tensor."""
    tensors = {(d.folder, key): each for d in directories for key, each in d.about.tensors.items()}
    names = {(d.folder, key): path for d in directories for key, path in d.names.items()}
    items = _ItemIndex(directories)
    owners: dict[tuple[str, str], Key] = {}
    for entry in manifest.entries.values():
        is_decoded = moments.is_decoded(entry)
        if is_decoded and not moments.cuts_blocks(entry, _list_starts(entry, ranks)):
            continue  # its codes are copied; torchao reads no part of a block
        found = {items.find(moments.find_stored(chunk)) for chunk in entry.chunks}
        place = found.pop() if len(found) == 1 else None
        stored = tensors.get(place) if place is not None else None
        is_same = (
            stored is not None
            and stored.shape == entry.shape
            and (is_decoded or stored.dtype == entry.dtype)
        )
        if place is None or not is_same or place in owners or place not in names:
            return {}
        # A master has its number in the list of its param group.
        if entry.kind in (PARAM, BUFFER) and names[place][-1] != entry.fqn:
            return {}
        owners[place] = entry.key
    # Names of one weight that are stored twice are equal; each of them gets the kept value.
    kept = {fqn: (kind, fqn) for kind, fqn in owners.values() if kind in (PARAM, BUFFER)}
    for place in tensors.keys() - owners.keys():
        alias = manifest.tied.get(str(names[place][-1])) if place in names else None
        if alias in kept:
            owners[place] = kept[alias]
    return owners


def _list_starts(entry: Entry, ranks: int) -> list[int]:
    rows = entry.shape[0] if entry.shape else 0
    return [compute_equal_piece(rows, ranks, rank)[0] for rank in range(ranks)]


class _ItemIndex:
    """Finds the key of the item that contains a chunk."""

    def __init__(self, directories: Sequence[SavedDirectory]) -> None:
        items: dict[str, list[tuple[int, int, tuple[str, str]]]] = {}
        for directory in directories:
            for tensor in directory.about.tensors.values():
                for block in tensor.blocks:
                    place = directory.folder, block.key
                    span = (block.byte_offset, block.byte_offset + block.nbytes, place)
                    items.setdefault(f"{directory.path}/{block.file}", []).append(span)
        self._items = {path: sorted(spans) for path, spans in items.items()}

    def find(self, chunk: Chunk) -> tuple[str, str] | None:
        """Return folder and key; None if no item contains the chunk, or the chunk is computed."""
        spans = self._items.get(chunk.file, [])
        at = bisect_right(spans, chunk.byte_offset, key=lambda span: span[0]) - 1
        start, stop = chunk.byte_span
        return spans[at][2] if at >= 0 and spans[at][0] <= start and stop <= spans[at][1] else None


def _can_copy(
    directories: Sequence[SavedDirectory],
    owners: Container[tuple[str, str]],
    manifest: Manifest,
) -> bool:
    """Return whether every other item is an archive of its own, with a path in the state dict."""
    for directory in directories:
        about = directory.about
        if about.shapes or about.paths.keys() != about.tensors.keys() | about.objects.keys():
            return False
    with SourceFiles(manifest.files) as pool:
        return all(
            (path := f"{directory.path}/{block.file}") in manifest.files
            and pool.read(path, block.byte_offset, len(ZIP)) == ZIP
            for directory in directories
            for block in _list_other_blocks(directory, owners)
        )


def _list_other_blocks(
    directory: SavedDirectory, owners: Container[tuple[str, str]]
) -> Iterable[Block]:
    yield from filter(None, directory.about.objects.values())
    for key, tensor in directory.about.tensors.items():
        if (directory.folder, key) not in owners:
            yield from tensor.blocks


def lay_out(state: WritableState, saved: SavedKeys) -> LaidOut:
    """Lay out the items under their keys, and copies of the files beside them.

    Raises:
        ReshardError: as `writer.lay_out_leaves`.
    """
    ranks, values = saved.world_size, _build_values(state, dtype=saved.dtype)
    parts, copied = [], []
    for directory in saved.directories:
        leaves, items = _build_leaves(directory, saved.owners, values)
        parts.append(writer.lay_out_leaves(leaves, shards=ranks, directory=directory.folder))
        copied += items
    for name, size in saved.beside.items():
        path = f"{saved.top}/{name}"
        parts.append(copied_files.lay_out(name, path))
        copied.append(copied_files.build_file(name, path, size))
    notes = []
    per_rank = [name for name in saved.beside if find_rank(name) is not None]
    if per_rank and ranks != len(per_rank):
        notes.append(
            _OF_TRAINER
            if f"{_TRAINER}/rank0.pt" in per_rank
            else f"{some(per_rank, 1)} belong to one rank each: the program that saved them may"
            f" need such a file for each of the {ranks} ranks"
        )
    return LaidOut(skeletons.join(parts), tuple(notes), tuple(copied))


def _build_values(state: WritableState, *, dtype: DType | None) -> dict[Key, Value]:
    """Build every tensor of the output.

    Args:
        dtype: dtype of the parameters; None keeps that of each.
    """
    weights = torch_state_dict.build_weights(state, dtype=dtype)
    values = {(kind, fqn): value for fqn, value in weights.items() for kind in WEIGHT_KINDS}
    for weight in state.weights:
        if weight.value.kind == MASTER:
            value = weights[weight.fqn]
            values[MASTER, weight.fqn] = replace(value, dtype=weight.value.dtype)
            values[PARAM, weight.fqn] = replace(value, dtype=dtype or weight.dtype)
    for member in state.members:
        slots = member.slots.values()
        values.update((each.key, torch_state_dict.build_slot(member, each)) for each in slots)
    for entry in state.manifest.entries.values():
        if entry.kind not in WEIGHT_KINDS and entry.key not in values:  # it has no weight
            is_cut = bool(entry.shape)
            values[entry.key] = Value(entry.dtype, entry.shape, entry, divided=is_cut)
    return values


def _build_leaves(
    directory: SavedDirectory,
    owners: Mapping[tuple[str, str], Key],
    values: Mapping[Key, Value],
) -> tuple[list[tuple[tuple[Any, ...], Any]], list[Entry]]:
    """Build the state dict of a directory of the output as leaves with their paths.

    Returns:
        The leaves, and the entries of the items that are copied.
    """
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    copied: list[Entry] = []
    for key, path in directory.about.paths.items():
        owner = owners.get((directory.folder, key))
        if owner is not None:
            leaf: Any = values[owner]
        elif key in directory.about.tensors:
            leaf = _copy_tensor(directory, key, directory.about.tensors[key])
            copied += (item for _, item in leaf.blocks)
        else:
            leaf = _build_item(directory, key, directory.about.objects[key])
            copied.append(leaf)
        leaves.append((path, leaf))
    return leaves, copied


def _copy_tensor(directory: SavedDirectory, key: str, tensor: StoredTensor) -> CopiedTensor:
    """Copy each block once: without collectives, every rank stores a replicated tensor."""
    blocks: dict[Box, Entry] = {}
    for number, block in enumerate(tensor.blocks):
        if block.box is not None and block.box not in blocks:
            blocks[block.box] = _build_item(directory, f"{key} {number}", block)
    return CopiedTensor(tensor.dtype, tensor.shape, tuple(blocks.items()))


def _build_item(directory: SavedDirectory, name: str, block: Block | None) -> Entry:
    """Return the entry of an item's bytes in the source."""
    if block is None:  # `metadata.read` refuses an object without a position
        raise AssertionError(name)
    size = (block.nbytes,)
    path = f"{directory.path}/{block.file}"
    chunk = contiguous(path, block.byte_offset, UINT8, whole(size))
    return Entry(f"{directory.folder} {name}".strip(), ITEM, UINT8, size, (chunk,))
