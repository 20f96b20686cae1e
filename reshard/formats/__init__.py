"""The registry of formats. Each module reads files into a manifest, or lays out files for one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import (
    IncompleteError,
    UnrecognisedError,
    UnsupportedError,
    UsageError,
    understood,
)
from reshard.formats import (
    colossalai,
    deepspeed,
    huggingface,
    megatron,
    meta,
    nanotron,
    placeholders,
    pytorch,
    run,
    safetensors,
)
from reshard.formats.dcp.names import is_hf_shard
from reshard.formats.json_files import json_object
from reshard.formats.place import Place
from reshard.formats.torch_saves import SUFFIXES
from reshard.manifest import Entry, Manifest, check
from reshard.paths import as_path

if TYPE_CHECKING:
    from reshard.model_parallel.rules import Table

PLAIN_SUFFIXES = (".pt", ".bin", ".pth")
Paths = str | Path | Sequence[str | Path]

_SHARD = re.compile(r"-(\d+)-of-(\d+)\.(?:safetensors|bin)$")
_TORCHTUNE = re.compile(r"hf_model_\d{4}_\d+\.pt")  # until 0.3: shard, epoch; without an index
_MODEL_PARALLEL = re.compile(  # Meta, Megatron and others; what stands before the rank's number
    r"^((?:consolidated\.|.*(?:tp|pp|mp|ep)[-_]rank[-_])\d+)"
)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What the user said of a source beside its path, as in `read`."""

    tag: str | None
    key: str | None
    model: str | None
    wrap: str | None
    rules: Path | None


def read(
    paths: Paths,
    *,
    force: str | None = None,
    tag: str | None = None,
    key: str | None = None,
    model: str | None = None,
    wrap: str | None = None,
    rules: Path | None = None,
    prove: bool = True,
) -> Manifest:
    """The checkpoint at a file or directory, its coverage proved.

    Args:
        paths: several directories where each node kept its own files.
        force: one of `NAMES`, where detection is not wanted.
        tag: which checkpoint of a run directory.
        key: which state dict of a checkpoint that holds several, dotted.
        model: ``config.json``, a directory of one, or ``module:factory``, where files do not say
            what they hold; ``wrap``: how FSDP 1 wrapped it (see `model.describe`).
        rules: a user's lines for the table of a model-parallel checkpoint's parameters.
        prove: False leaves the proof (`manifest.check`) to the caller.

    Raises:
        UnrecognisedError: no format knows what lies there.
        ReshardError: whatever the format finds wrong.
    """
    place = Place.of(as_paths(paths))
    with understood(place):
        manifest = _read_as(place, force, _Choice(tag, key, model, wrap, rules))
    if prove:
        check(manifest)
    return placeholders.looked_for(manifest)


def _read_as(place: Place, force: str | None, choice: _Choice) -> Manifest:
    """As `read`, without the proof."""
    if force not in (None, *NAMES):
        raise UsageError(f"--from {force}", f"formats are {', '.join(NAMES)}")
    if not force:
        _refuse_one_of_many(place)
    if force and not _is(force, place):
        raise UnrecognisedError(place, f"is no {force} checkpoint", "leave out --from")
    name = force or (_detected(place) if choice.tag is None else None)
    return _read(place, name, choice) if name else _read_run(place, choice)


def open_alone(path: Path) -> None:
    """Read the header of one file, whatever lies beside it; of what has none, nothing.

    Raises:
        CorruptError: it is truncated or altered.
    """
    if path.suffix == ".safetensors":
        safetensors.read(path)
    elif path.suffix in SUFFIXES:
        from reshard.formats import torch_file

        torch_file.read(path)
    elif path.suffix == ".json":
        json_object(path)


def as_paths(paths: Paths) -> list[Path]:
    """One path or several, as a list."""
    return [as_path(paths)] if isinstance(paths, (str, Path)) else [as_path(path) for path in paths]


def _deepspeed(place: Place, choice: _Choice) -> Manifest:
    return pytorch.with_companions(deepspeed.read(place, choice.tag, choice.rules), place)


def _megatron(place: Place, choice: _Choice) -> Manifest:
    return megatron.read(place, _table(megatron.NAME, choice))


def _meta(place: Place, choice: _Choice) -> Manifest:
    return meta.read(place, _table(meta.NAME, choice))


def _table(name: str, choice: _Choice) -> Table:
    from reshard.model_parallel.rules import builtin, with_users

    return with_users(builtin(name), choice.rules)


def _nanotron(place: Place, _choice: _Choice) -> Manifest:
    return nanotron.read(place)


def _colossalai(place: Place, choice: _Choice) -> Manifest:
    return colossalai.read(place, model=choice.model, wrap=choice.wrap)


def _pytorch(place: Place, choice: _Choice) -> Manifest:
    return pytorch.read(place, key=choice.key, model=choice.model, wrap=choice.wrap)


def _huggingface(place: Place, _choice: _Choice) -> Manifest:
    return huggingface.read(place)


def _is_pytorch(place: Place) -> bool:
    """What a trainer puts beside Megatron's iterations is no checkpoint of PyTorch's."""
    return not megatron.holds(place) and pytorch.detect(place)


def _is_loose(place: Place) -> bool:
    return not megatron.holds(place) and pytorch.detect_loosely(place)


_Reader = Callable[[Place, _Choice], Manifest]
_FORMATS: tuple[tuple[str, Callable[[Place], bool], _Reader], ...] = (  # more particular ones first
    (deepspeed.NAME, deepspeed.detect, _deepspeed),
    (megatron.NAME, megatron.detect, _megatron),
    (meta.NAME, meta.detect, _meta),
    (nanotron.NAME, nanotron.detect, _nanotron),
    (colossalai.NAME, colossalai.detect, _colossalai),
    (pytorch.NAME, _is_pytorch, _pytorch),
    (huggingface.NAME, huggingface.detect, _huggingface),
    (pytorch.NAME, _is_loose, _pytorch),
)
NAMES = tuple(sorted({name for name, _, _ in _FORMATS}))


def _is(name: str, place: Place) -> bool:
    return any(detect(place) for known, detect, _ in _FORMATS if known == name)


def _detected(place: Place) -> str | None:
    """The format of what lies directly at a place."""
    return next((name for name, detect, _ in _FORMATS if detect(place)), None)


def _is_detected(place: Place) -> bool:
    return _detected(place) is not None


def _read(place: Place, name: str, choice: _Choice) -> Manifest:
    reader = next(reader for known, _, reader in _FORMATS if known == name)
    return reader(place, choice)


def _read_run(place: Place, choice: _Choice) -> Manifest:
    """A checkpoint of a run directory.

    Raises:
        UnrecognisedError: none, or no telling which.
    """
    if place.chosen and place.path.stat().st_size == 0:
        raise IncompleteError(place, "is empty", "fetch it again")
    found = (
        None if place.chosen else run.checkpoint(place, choice.tag, lambda p: bool(_detected(p)))
    )
    name = _detected(found) if found else None
    if found and name:
        return _read(found, name, replace(choice, tag=None))
    if choice.tag is not None and deepspeed.detect(place):
        return deepspeed.read(place, choice.tag)  # which says which tags there are
    raise UnrecognisedError(place, "is no checkpoint that reshard knows", _hint(place))


def _refuse_one_of_many(place: Place) -> None:
    """A file that its name says to be one of several is never taken for the model.

    Raises:
        IncompleteError: a shard of a Hugging Face model, given without its index.
        UnsupportedError: one rank's file of a format that is not read yet; torchtune's old shards.
    """
    if nanotron.detect(place):
        return
    names = [place.chosen] if place.chosen else []
    shard = _SHARD.search(place.chosen or "")
    if not place.chosen and huggingface.index_of(place) is None:
        names = [name for name in place.files if name.endswith(".safetensors")]
        if not names and not _detected(place):
            names = [name for name in place.files if name.endswith(".bin")]
        found = (_SHARD.search(name) for name in names if not is_hf_shard(name))
        shard = next((match for match in found if match), None)
        names += [name for name in place.files if name.endswith(PLAIN_SUFFIXES)]
    if shard and not place.chosen and huggingface.is_whole_set(place):
        return
    if shard and int(shard[2]) > 1 and not is_hf_shard(shard.string):
        raise IncompleteError(
            place,
            f"holds {shard.string}, shard {int(shard[1])} of {int(shard[2])}, without the index"
            " that says how the shards belong together",
            "give the directory with the index (model.safetensors.index.json,"
            " pytorch_model.bin.index.json) and all shards",
        )
    shards = [name for name in place.files if _TORCHTUNE.fullmatch(name)]
    if len(shards) > 1 and any(map(_TORCHTUNE.fullmatch, names)):
        raise UnsupportedError(
            place.path,
            f"holds shards of a model that torchtune wrote without an index: {shards[0]} ...",
            "load those of one epoch and save them as one state dict; --from torch reads one alone",
        )
    for name in names:
        match = _MODEL_PARALLEL.search(name)
        siblings = [n for n in place.files if match and _MODEL_PARALLEL.search(n)]
        if len(siblings) > 1 and not (deepspeed.detect(place) or meta.detect(place)):
            known = _detected(Place(place.directories)) if place.chosen else None
            raise UnsupportedError(
                place.files[name],
                "is one rank's shard of a model-parallel checkpoint"
                + ("" if known else ", of a kind that reshard does not know"),
                f"give its directory, which is read whole: {place.path.parent}"
                if known
                else "it would be wrong to take it for the whole model; --from torch does so if it"
                " is",
            )


_FOREIGN = {
    ".gguf": "GGUF (llama.cpp's)",
    ".onnx": "ONNX",
    ".msgpack": "Flax's msgpack",
    ".h5": "HDF5 (Keras')",
    ".npz": "numpy's npz",
}


def _hint(place: Place) -> str:
    """Checkpoints one level below or above, so that a wrong level costs one more command."""
    from tarfile import is_tarfile  # which imports every way to compress

    if place.chosen and is_tarfile(place.path):
        return "it is a tar archive (NeMo's .nemo is one): unpack it, and give the directory"
    names = [place.chosen] if place.chosen else place.files
    foreign = [kind for suffix, kind in _FOREIGN.items() if any(n.endswith(suffix) for n in names)]
    if foreign:
        return (
            f"{foreign[0]} is not read: give the PyTorch model beside it, or that it was made from"
        )
    if place.chosen:
        return f"give the checkpoint's directory, e.g. {place.path.parent}"
    folders = place.folders
    if "snapshots" in folders:  # of a model in Hugging Face's cache
        folders = folders["snapshots"].folders
    beneath = [folder for name, folder in folders.items() if not name.startswith(".")]
    near = [*beneath, Place([place.path.resolve().parent])]
    found = [str(p) for p in near if _detected(p)]
    if found:
        return f"did you mean {found[0]}?" + (
            f" ({len(found)} candidates)" if len(found) > 1 else ""
        )
    return "give a run directory, a checkpoint directory, or a file of weights"


def read_outputs(directory: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Fqn -> entry of every weights file among ``names``, read from the files' own headers."""
    found: dict[str, Entry] = {}
    for name in names:
        place = Place([directory], name)
        if name.endswith(".safetensors"):
            found.update((entry.fqn, entry) for entry in huggingface.read(place).entries.values())
        elif name.endswith(PLAIN_SUFFIXES):
            found.update((entry.fqn, entry) for entry in pytorch.read(place).entries.values())
    return found
