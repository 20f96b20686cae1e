"""Refuse paths that are not a checkpoint by themselves, with a hint: one shard, a wrong level."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from reshard.containers.torch_detect import PLAIN_SUFFIXES
from reshard.core.location import Location, get_directory
from reshard.core.manifest import Manifest
from reshard.errors import IncompleteError, UnrecognisedError, UnsupportedError
from reshard.formats import foreign, huggingface, registry, run_directory
from reshard.formats.dcp.directory import is_hf_shard
from reshard.formats.pytorch.directory import NAME, find_torch_files, is_part
from reshard.system.paths import as_path
from reshard.units import abridge, make_natural_key

_SHARD = re.compile(r"-(\d+)-of-(\d+)\.(?:safetensors|bin)$")
_TORCHTUNE = re.compile(r"hf_model_\d{4}_\d+\.pt")  # until 0.3: shard, epoch; without an index
_MODEL_PARALLEL = re.compile(  # Meta, Megatron and others; up to the rank's number
    r"^((?:consolidated\.|.*(?:tp|pp|mp|ep)[-_]rank[-_])\d+)"
)
_KINDS = "pass a run directory, a checkpoint directory, or a weights file"
_MODEL = re.compile(
    r"(pytorch_|adapter_)?model(_\d+)?\.(bin|pt|pth)"
)  # beside runs, the model itself
_LEVELS = 3  # of directories below the given one, in which a run is looked for
_SEARCHED = 100  # directories of one level: more of them are not runs
_TRAINER_STATE = re.compile(r"train(er|ing)?[-_]states?\.(bin|pth?)")  # SkyRL's, for example
_AXES = {  # Megatron's arguments; the second is the name before Megatron-LM 2.5
    "tensor_model_parallel_size": "tp",
    "model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
}
_STATE = "dcp"  # ROLL 8eb27cc ``fsdp2_strategy.py``: below the model, with its optimizer
_VERSION = "checkpoint_version"  # in every file of Megatron's
_FOREIGN = {
    ".gguf": "GGUF (llama.cpp's)",
    ".onnx": "ONNX",
    ".msgpack": "Flax's msgpack",
    ".h5": "HDF5 (Keras')",
    ".npz": "numpy's npz",
    ".pdparams": "PaddlePaddle's pdparams",
}


def refuse_one_of_many(location: Location) -> None:
    """Refuse a file that its name states to be one of several.

    Another package's format may give its files such names, and reads them.

    Raises:
        IncompleteError: a shard of a Hugging Face model, given without its index.
        UnsupportedError: one rank's file of a format that is not read yet; torchtune's old shards.
    """
    try:
        _refuse_by_name(location)
    except (IncompleteError, UnsupportedError):
        if not registry.detects_extension(location):
            raise


def _refuse_by_name(location: Location) -> None:
    names = [location.chosen] if location.chosen else []
    shard = _SHARD.search(location.chosen or "")
    if not location.chosen and huggingface.find_index(location) is None:
        names = [name for name in location.files if name.endswith(".safetensors")]
        if not names and not registry.detect(location):
            names = [name for name in location.files if name.endswith(".bin")]
        found = (_SHARD.search(name) for name in names if not is_hf_shard(name))
        shard = next((match for match in found if match), None)
        names += [name for name in location.files if name.endswith(PLAIN_SUFFIXES)]
    if shard and not location.chosen and huggingface.is_whole_set(location):
        return
    if shard and int(shard[2]) > 1 and not is_hf_shard(shard.string):
        raise IncompleteError(
            location,
            f"contains {shard.string}, shard {int(shard[1])} of {int(shard[2])}, but no index that"
            " states how the shards belong together",
            "pass the directory that has the index (model.safetensors.index.json,"
            " pytorch_model.bin.index.json) and all shards"
            f"{huggingface.suggest_parts(get_directory(location.path))}",
        )
    _refuse_torchtune_shards(location, names)
    _refuse_rank_files(location, names)


def _refuse_torchtune_shards(location: Location, names: Iterable[str]) -> None:
    """Refuse the shards that torchtune wrote before it had an index, if one of them is meant."""
    shards = [name for name in location.files if _TORCHTUNE.fullmatch(name)]
    if len(shards) > 1 and any(map(_TORCHTUNE.fullmatch, names)):
        raise UnsupportedError(
            location.path,
            f"contains shards of a model that torchtune wrote without an index: {shards[0]} ...",
            "load the shards of one epoch and save them as one state dict; --from torch reads a"
            " single shard",
        )


def _refuse_rank_files(location: Location, names: Iterable[str]) -> None:
    name = next(filter(_MODEL_PARALLEL.search, names), None)
    if name is None or sum(1 for n in location.files if _MODEL_PARALLEL.search(n)) < 2:
        return
    if not any(registry.detects(kind, location) for kind in ("deepspeed", "meta")):
        known = registry.detect(location.folder) if location.chosen else None
        raise UnsupportedError(
            location.files[name],
            "is one rank's shard of a model-parallel checkpoint"
            + ("" if known else ", of an unknown format"),
            f"pass its directory: {location.path.parent}"
            if known
            else "it is not the whole model; if it is, pass --from torch",
        )


def refuse_parts_of_megatron(manifest: Manifest) -> None:
    """Refuse files of Megatron's model-parallel ranks that are not in the ranks' folders.

    Raises:
        UnsupportedError: the arguments in such a file state several model-parallel ranks.
    """
    if manifest.origin.format not in registry.get_format(NAME).sources:
        return
    client = manifest.train.client
    if _VERSION not in client:
        return
    # Programs of their own save the arguments as a dict, or in one.
    named = ((_AXES.get(name.rpartition(".")[2]), size) for name, size in _walk(client))
    grid = {axis: size for axis, size in named if axis and type(size) is int and size > 1}
    if grid:
        raise UnsupportedError(
            manifest.origin.path,
            f"is the part of one of Megatron's model-parallel ranks: it states"
            f" {', '.join(f'{axis} {size}' for axis, size in grid.items())}",
            "put the files of all ranks into their folders mp_rank_* again, under the name"
            " model_optim_rng.pt, and pass the directory above; if it is the whole model, pass"
            " --from torch",
        )


def _walk(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _walk(value)


def is_checkpoint(location: Location) -> bool:
    """Return whether a checkpoint is directly at a location."""
    return find_format(location) is not None


def find_format(location: Location) -> str | None:
    """Return the name of the format of the checkpoint directly at a location, or None.

    A loose file is none if a folder with a checkpoint is beside it: verl saves ``data.pt``, the
    state of its data loader, beside the folder ``actor``.
    """
    foreign.refuse(location)
    name = registry.detect(location)
    return None if name is None or _find_parts_beside(location) else name


def _find_parts_beside(location: Location) -> list[str]:
    """Return the loose files beside a folder that contains the checkpoint; empty without one."""
    folders = [location.folders[name] for name in run_directory.PARTS if name in location.folders]
    if location.chosen or not folders or not _has_only_loose_files(location):
        return []
    files = _find_loose_files(location)
    return files if files and any(map(_is_run, folders)) else []


def _has_only_loose_files(location: Location) -> bool:
    parts = list(filter(is_part, location.files))
    are_trainers = bool(parts) and all(map(_TRAINER_STATE.fullmatch, parts))
    return registry.is_loose(location) or (
        are_trainers and registry.detect(location) == NAME and not huggingface.detect(location)
    )


def _find_loose_files(location: Location) -> list[str]:
    """Return the ``torch.save`` files whose names are not those of a model."""
    return [name for name in find_torch_files(location) if not _MODEL.fullmatch(name)]


def find_checkpoint_below(location: Location, read: Iterable[str]) -> str:
    """Return the newest checkpoint of the run whose model a directory has; empty if none.

    Args:
        read: the files that were read.
    """
    if location.chosen:
        return ""
    numbers = run_directory.list_numbered(location)
    newest = numbers[max(numbers)] if numbers else location.folders.get(_STATE)
    if newest is None or any(newest.path in as_path(file).parents for file in read):
        return ""
    return str(newest.path) if _is_run(newest) else ""


def refuse_beside_runs(location: Location) -> None:
    """Refuse to take a loose file for the model if the folders beside it are runs.

    Raises:
        UnrecognisedError: there is a loose file, and runs; the message names them.
    """
    if location.chosen or not registry.is_loose(location):
        return
    # Trainers save the final model beside the folders of its checkpoints: that is not refused.
    files = _find_loose_files(location)
    runs = [str(folder) for folder in location.folders.values() if files and _is_run(folder)]
    if runs:
        raise UnrecognisedError(
            location,
            f"contains the file {files[0]}, and there are runs in directories beside it:"
            f" {', '.join(runs)}",
            f"pass one of them, e.g. {runs[0]}, or {location.path / files[0]}",
        )


def _is_run(location: Location) -> bool:
    def known(below: Location) -> bool:
        return registry.detect(below) is not None and not registry.is_loose(below)

    try:
        return run_directory.find_checkpoint(location, None, known) is not None
    except UnrecognisedError:  # its pointer names a missing checkpoint, or it has several
        return True


def find_run(location: Location) -> Location:
    """Return the directory of a run: the only run in the directories below, else the location.

    Programs keep each run in a directory of its own: ms-swift in ``output/vN-DATE``,
    LLaMA-Factory in ``saves/MODEL/lora/sft``.

    Raises:
        UnrecognisedError: the directories below have several runs.
    """
    if location.chosen or is_checkpoint(location) or _is_run(location):
        return location
    level = [location]
    for _ in range(_LEVELS):
        level = _list_folders(level)
        runs = [folder for folder in level if _is_run(folder)]
        # The user may mean a run whose saves were all interrupted.
        others = [run for run in level if run not in runs and run_directory.list_numbered(run)]
        if runs and len(runs + others) > 1:
            paths = sorted(map(str, runs + others), key=make_natural_key)
            newest = max(map(str, runs), key=make_natural_key)
            raise UnrecognisedError(
                location, f"contains several runs: {abridge(paths)}", f"pass one, e.g. {newest}"
            )
        if runs:
            return runs[0]
        if len(level) > _SEARCHED:
            break
    return location


def _list_folders(level: Iterable[Location]) -> list[Location]:
    inner = [parent.folders.items() for parent in level]
    return [folder for items in inner for name, folder in items if not name.startswith(".")]


def suggest(location: Location) -> str:
    """Return the checkpoints in directories below, or one level above, as a hint."""
    from tarfile import is_tarfile  # imported late, since it imports all compression modules

    if location.chosen and is_tarfile(location.path):
        return (
            "it is a tar archive (for example a .nemo file of NeMo): unpack it, and pass the"
            " directory"
        )
    names = [location.chosen] if location.chosen else location.files
    foreign = [kind for suffix, kind in _FOREIGN.items() if any(n.endswith(suffix) for n in names)]
    if foreign:
        return (
            f"reshard does not read {foreign[0]}: pass the PyTorch model beside it, or the one"
            " that it was made from"
        )
    if location.chosen:
        above = Location([location.path.parent], inner=True)
        return f"pass the checkpoint's directory, {above}" if _is_run(above) else _KINDS
    above = Location([location.path.resolve().parent], inner=True)
    found = _find_below(location) or ([above] if _is_run(above) else [])
    return f"did you mean {abridge(list(map(str, found)))}?" if found else _KINDS


def _find_below(location: Location) -> list[Location]:
    level = [location]
    for _ in range(_LEVELS):
        level = _list_folders(level)
        found = [folder for folder in level[:_SEARCHED] if registry.detect(folder)]
        if found or len(level) > _SEARCHED:
            return found
    return []
