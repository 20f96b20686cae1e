"""Keep the keys of DCP directories, so that the program that saved it loads the output.

Programs name the parts of their state dicts as they like (Composer ``state.model`` and
``state.optimizers.DecoupledAdamW``, torchtune ``optimizer.state.0.exp_avg``, torchtitan
``optimizer.state.<fqn>.exp_avg``), and ``dcp.load`` looks for exactly these keys. Weights and
optimizer slots are cut again; all other items are copied byte by byte, so that no object in them
has to be understood.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonpath
from pathlib import PurePosixPath
from typing import Any

from reshard.containers import safetensors_shards, skeletons
from reshard.containers.skeletons import LaidOut
from reshard.core.box import Box, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import UINT8, DType
from reshard.core.keys import remove_wrappers
from reshard.core.location import Location, leads_outside, note_outside
from reshard.core.manifest import (
    BUFFER,
    MASTER,
    PARAM,
    WEIGHT_KINDS,
    Entry,
    Key,
    Manifest,
    Skeleton,
)
from reshard.formats.base import StateConversion
from reshard.formats.dcp import hf_shards, metadata, reader, writer
from reshard.formats.dcp.directory import ADAPTER, is_hf_shard, is_metadata
from reshard.formats.dcp.items import ZIP
from reshard.formats.dcp.metadata import Block, Metadata, StoredTensor
from reshard.formats.dcp.writer import CopiedTensor
from reshard.formats.request import Request
from reshard.layouts.partition import compute_equal_piece
from reshard.model.adapter_names import ROOT
from reshard.quantised import moments
from reshard.state_dict import torch_state_dict
from reshard.state_dict.torch_state_dict import StateTensor
from reshard.system.files import SourceFiles, get_size
from reshard.system.paths import as_path, find_rank
from reshard.training import copied_files
from reshard.training.copied_files import ITEM
from reshard.training.state import WritableState
from reshard.units import abridge

_NOTES = (".json", ".yaml", ".yml", ".txt", "")  # suffixes
# Programs that keep their trainer's state beside or below their one directory of DCP do not find it
# elsewhere: OLMo-core 3.0.0 ``train/checkpoint.py``, whose ranks without a file of their own read
# that of rank 0, as prime-rl's do (559b447 ``trainer/ckpt.py``); xtuner b934f46 ``v1/train``.
_TRAINER = "train"
_BESIDE = {"model_and_optim": _TRAINER, "weights": "train_state.json"}
_BELOW = {"trainer": "dataloader"}
_OF_TRAINER = (
    "OLMo-core's ranks without a file in train/ read train/rank0.pt, and none restores its random"
    " state at another number of ranks"
)
# NeMo Automodel 0.7 ``components/checkpoint/checkpointing.py``; NeMo RL has them one folder lower.
_SHARDS, _OPTIMIZER = "model", "optim"
_OF_WEIGHTS = (  # in the folder of the weights
    *("adapter_config.json", "automodel_peft_config.json"),
    ".hf_metadata/fqn_to_file_index_mapping.json",
)
_SHARD = "shard-00001-model-00001-of-00001.safetensors"  # of whole tensors, which are in one file
# slime 0.2.2 and miles 0.1.0 ``backends/fsdp_utils/checkpoint.py`` find the step by this file.
_ITERATION, _TRACKER = re.compile(r"iter_(\d+)"), "latest_checkpointed_iteration.txt"


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
        iteration: the name of the top directory, if a run has it beside a file with its number.
        weights: the file to write, if the weights are one adapter or shards for Hugging Face.
    """

    directories: Sequence[SavedDirectory] = ()
    owners: Mapping[tuple[str, str], Key] = field(default_factory=dict)
    top: str = ""
    beside: Mapping[str, int] = field(default_factory=dict)
    iteration: str = ""
    weights: str = ""


def find(conversion: StateConversion) -> SavedKeys | None:
    """Return the request for the items of the source, if the output can have the same keys.

    That is so if the user chose neither another layout, nor a part of the state, nor new param
    groups, and if all of the source is one DCP directory, or several side by side, whose names and
    tensors no pass has changed.
    """
    manifest, request = conversion.manifest, conversion.request
    given = conversion.options.given()
    is_new = "param_groups" in given or given.get("init_optimizer") == "zeros"
    has_changes = is_new or conversion.slots_left_out > 0 or request.rng in ("derive", "drop")
    if not request.keeps_layout or has_changes or request.live.groups:
        return None
    paths = {PurePosixPath(path) for path in manifest.files}
    parents = sorted({path.parent for path in paths if path.suffix == ".distcp"})
    if not parents:
        return None
    top = PurePosixPath(commonpath(parents))
    trainer, weights = _BESIDE.get(top.name), _find_weights(paths, top)
    if weights or (trainer and as_path(str(top.parent / trainer)).exists()):
        top = PurePosixPath(commonpath([weights or top.parent, top]))
    if not all(path.is_relative_to(top) for path in paths):
        return None
    directories = [_read_directory(parent, top) for parent in parents]
    found = [directory for directory in directories if directory is not None]
    owners = _find_owners(manifest, found, request.world_size)
    if len(found) < len(parents) or not owners or not _can_copy(found, owners, manifest):
        return None
    is_named = _ITERATION.fullmatch(top.name) is not None
    is_of_run = is_named and as_path(str(top.parent / _TRACKER)).is_file()
    return replace(
        SavedKeys.of(request),
        directories=found,
        owners=owners,
        top=str(top),
        beside=_find_beside(conversion, top, is_own=is_of_run or top not in parents),
        iteration=top.name if is_of_run else "",
        weights=weights.relative_to(top).as_posix() if weights else "",
    )


def _has_weights(path: PurePosixPath) -> bool:
    return is_hf_shard(path.name) or path.name == ADAPTER


def _find_weights(paths: Iterable[PurePosixPath], top: PurePosixPath) -> PurePosixPath | None:
    found = {p if p.name == ADAPTER else p.with_name(_SHARD) for p in paths if _has_weights(p)}
    is_one = len(found) == 1 and {path.parent.name for path in found} == {_SHARDS}
    return found.pop() if is_one and top.name == _OPTIMIZER else None


def _read_directory(path: PurePosixPath, top: PurePosixPath) -> SavedDirectory | None:
    location = Location([as_path(str(path))])
    if not any(map(is_metadata, location.files)):
        return None
    about = metadata.read(reader.find_metadata_files(location))
    return SavedDirectory("/".join(path.relative_to(top).parts), str(location), about)


def _find_beside(
    conversion: StateConversion, top: PurePosixPath, *, is_own: bool
) -> dict[str, int]:
    # If programs keep DCP's directories in one of their own, they also keep notes there that are
    # not tensors, such as the step in a JSON file, without which they do not resume.
    beside = {
        path.removeprefix(f"{top}/"): file.nbytes
        for path, file in conversion.manifest.files.items()
        if not path.endswith(".distcp") and not _has_weights(PurePosixPath(path))
    }
    root = as_path(str(top))
    place = Location([root])
    notes = place.files.items() if is_own else ()
    found = [path for name, path in notes if path.suffix in _NOTES and not is_metadata(name)]
    whole = (_BELOW.get(top.name), _TRAINER if is_own else None)
    found += [p for n, folder in place.folders.items() if n in whole for p in folder.files.values()]
    if is_own:
        names = [f"{at}/{name}" for at in ("model", "weights/model") for name in _OF_WEIGHTS]
        found += [path for name in names if (path := root / name).is_file()]
        for name, folder in place.folders.items():
            form = re.compile(rf"{re.escape(name)}_(dp|global)_rank_\d+\.pt")
            found += [path for file, path in folder.files.items() if form.fullmatch(file)]
    outside = [path for path in found if leads_outside(path, root)]
    conversion.notes.warnings += note_outside(outside)
    inside = (path for path in found if path not in outside)
    return beside | {path.relative_to(root).as_posix(): get_size(path) for path in inside}


def _find_owners(
    manifest: Manifest, directories: Sequence[SavedDirectory], ranks: int
) -> dict[tuple[str, str], Key]:
    """Return the entry of each key; empty if an entry is not exactly one stored tensor."""
    tensors = {(d.folder, key): item for d in directories for key, item in d.about.tensors.items()}
    names = {(d.folder, key): path for d in directories for key, path in d.names.items()}
    items = _ItemIndex(directories)
    owners: dict[tuple[str, str], Key] = {}
    for entry in manifest.entries.values():
        files = {PurePosixPath(chunk.file) for chunk in entry.chunks}
        if entry.kind in WEIGHT_KINDS and all(map(_has_weights, files)):
            continue  # its file is written anew
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
        # A master has its number in the list of its param group. The keys keep their wrappers.
        bare = remove_wrappers(str(names[place][-1]))
        if entry.kind in (PARAM, BUFFER) and bare != remove_wrappers(entry.fqn):
            return {}
        owners[place] = entry.key
    # Names of one weight that are stored twice are equal; each of them gets the kept value.
    kept = {fqn: (kind, fqn) for kind, fqn in owners.values() if kind in (PARAM, BUFFER)}
    tied = {remove_wrappers(alias): fqn for alias, fqn in manifest.tied.items()}
    for place in tensors.keys() - owners.keys():
        alias = tied.get(remove_wrappers(str(names[place][-1]))) if place in names else None
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
    if saved.weights:
        tensors = torch_state_dict.choose_whole_weights(state, saved.dtype)
        prefix = ROOT if saved.weights.endswith(ADAPTER) else ""
        tensors = [(replace(entry, fqn=prefix + entry.fqn), dtype) for entry, dtype in tensors]
        about = hf_shards.describe_whole(entry for entry, _ in tensors)
        part = safetensors_shards.lay_out_file(saved.weights, tensors, about)
        own = [replace(entry, fqn=entry.fqn.removeprefix(prefix)) for entry in part.entries]
        parts.append(replace(part, entries=tuple(own)))
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
            else f"{abridge(per_rank, 1)} belong to one rank each: the program that saved them may"
            f" need such a file for each of the {ranks} ranks"
        )
    skeleton, load_line = skeletons.join(parts), ""
    if saved.iteration:
        number = str(int(saved.iteration.rpartition("_")[2])).encode()
        tracker = skeletons.lay_out_bytes(_TRACKER, number)
        skeleton = skeletons.join([skeletons.move_into(skeleton, saved.iteration), tracker])
        load_line = f"--load {{path}} (the directory with {_TRACKER})"
    return LaidOut(skeleton, tuple(notes), tuple(copied), load_line)


def place(skeleton: Skeleton, destination: str) -> Skeleton:
    """Return the files of slime's run as they belong into a directory with the name of one step."""
    inside = tuple(file for file in skeleton.files if file.name != _TRACKER)
    if not _ITERATION.fullmatch(destination) or len(inside) == len(skeleton.files):
        return skeleton
    return skeletons.move_out(replace(skeleton, files=inside), inside[0].name.partition("/")[0])


def _build_values(state: WritableState, *, dtype: DType | None) -> dict[Key, StateTensor]:
    weights = torch_state_dict.build_weights(state, dtype=dtype)
    values = {(kind, fqn): value for fqn, value in weights.items() for kind in WEIGHT_KINDS}
    for weight in state.weights:
        if weight.value.kind == MASTER:
            value = weights[weight.fqn]
            values[MASTER, weight.fqn] = replace(value, dtype=weight.value.dtype)
            values[PARAM, weight.fqn] = replace(value, dtype=dtype or weight.dtype)
    for member in state.members:
        slots = member.slots.values()
        values.update((slot.key, torch_state_dict.build_slot(member, slot)) for slot in slots)
    for entry in state.manifest.entries.values():
        if entry.kind not in WEIGHT_KINDS and entry.key not in values:  # it has no weight
            is_cut = bool(entry.shape)
            values[entry.key] = StateTensor(entry.dtype, entry.shape, entry, divided=is_cut)
    return values


def _build_leaves(
    directory: SavedDirectory,
    owners: Mapping[tuple[str, str], Key],
    values: Mapping[Key, StateTensor],
) -> tuple[list[tuple[tuple[Any, ...], Any]], list[Entry]]:
    """Return the leaves of a directory's state dict with their paths, and the copied entries."""
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
    if block is None:  # `metadata.read` refuses an object without a position
        raise AssertionError(name)
    size = (block.nbytes,)
    path = f"{directory.path}/{block.file}"
    chunk = contiguous(path, block.byte_offset, UINT8, whole(size))
    return Entry(f"{directory.folder} {name}".strip(), ITEM, UINT8, size, (chunk,))
