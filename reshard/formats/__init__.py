"""Read checkpoints: detect the format at a path, read a manifest and prove it complete.

Modules beside the packages of the formats:

    base            the interface of a format: sources, writers, and a conversion between them
    registry        all formats: those of this project and those that other packages declare
    request         the options of an output, with nothing left open
    target_options  the options that only some writers use
    refused_paths   refusals of paths that are not a checkpoint by themselves, with hints
    run_directory   the choice of a checkpoint in a run directory
    adjacent_files  files beside tensors: the trainer's state, its scheduler, random states
    unread          files of a checkpoint that no reader used
    coded_values    the values of weights that files store as codes and scales
    placeholders    weights without elements, which ZeRO 3 leaves in a module
    parameter_kinds
                    which weights are parameters, and which are buffers
    engines         known defects of the engines that load checkpoints
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from reshard.containers import safetensors
from reshard.containers.json_files import read_json_object
from reshard.containers.torch_detect import PLAIN_SUFFIXES, SUFFIXES
from reshard.core.location import Location
from reshard.core.manifest import Entry, Manifest, check
from reshard.errors import (
    CorruptError,
    IncompleteError,
    UnrecognisedError,
    UsageError,
    understood,
)
from reshard.formats import placeholders, refused_paths, registry, run_directory, unread
from reshard.formats.base import ReadHints
from reshard.formats.pytorch.directory import find_whole
from reshard.formats.pytorch.lost_files import naming_lost_files
from reshard.system.files import LFS_HEAD, SourceFiles, find_version, refuse_lfs_pointer
from reshard.system.paths import as_path, is_remote
from reshard.training.completeness import check_state
from reshard.units import abridge

if TYPE_CHECKING:
    from reshard.model import ModelShapes
    from reshard.system.remote.path import RemotePath

__all__ = ["PLAIN_SUFFIXES", "Paths", "as_paths", "open_alone", "read", "read_outputs"]

Paths = str | Path | Sequence[str | Path]
_LISTED = 6


def read(  # noqa: PLR0913 - a keyword an option
    paths: Paths,
    *,
    force: str | None = None,
    tag: str | None = None,
    key: str | None = None,
    model: str | None = None,
    wrap: str | None = None,
    rules: Path | None = None,
    live: ModelShapes | None = None,
    alike: Mapping[str, str] | None = None,
    prove: bool = True,
    is_filled: bool = False,
) -> Manifest:
    """Read the checkpoint at a file or directory, and check that its tensors are complete.

    Args:
        paths: a path, or the directory of each node if nodes stored their own files.
        force: one of `registry.list_names`, to skip detection.
        tag: the checkpoint to choose in a run directory.
        key: the dotted path of a state dict, if a checkpoint has several.
        model: ``config.json``, a directory of one, or ``module:factory``, where files do not say
            what they hold; ``wrap``: how FSDP 1 wrapped it (see `model.describe`).
        rules: file with the user's rules for the parameters of a model-parallel checkpoint.
        live: the model of the program that loads the checkpoint, which gives names and order where
            neither the files nor ``model`` do.
        alike: path of a rank's file -> that of another rank's. If their pickles and positions are
            equal but for what states the rank, the tensors of the second one alone are listed.
        prove: False leaves `prove_whole` to the caller.
        is_filled: whether another model provides the weights that are ZeRO-3 placeholders.

    Raises:
        UnrecognisedError: no format recognizes the path.
        UsageError: ``model`` does not exist, or the format has no ``key``.
        ReshardError: the format cannot read the checkpoint.
    """
    given = as_paths(paths)
    for path in given:
        if is_remote(str(path)):
            cast("RemotePath", path).store.forget()  # a listing may be older than the last save
    location = Location.from_paths(given)
    if model is not None:  # also where the files need no model: a typing error is not ignored
        from reshard.model.build import refuse_missing

        refuse_missing(model)
    with understood(location), _naming_others(location):
        manifest = _read_as(
            location, force, ReadHints(tag, key, model, wrap, rules, live, alike or {})
        )
        if not force:
            refused_paths.refuse_parts_of_megatron(manifest)
    manifest = _fix_versions(manifest)
    if prove:
        prove_whole(manifest)
    return placeholders.warn(manifest, is_filled=is_filled)


def prove_whole(manifest: Manifest) -> None:
    """Prove that tensors are complete, and that an optimizer's state fits its weights.

    Raises:
        CorruptError: elements are missing or overlap, or a slot has not the shape of its weight.
    """
    for proof in (check, check_state):
        prove(manifest, proof)


def prove(manifest: Manifest, proof: Callable[[Manifest], None]) -> None:
    """Run a proof, and name the files of ranks that are missing where it fails because of them.

    Raises:
        IncompleteError: files of ranks are missing.
        CorruptError: it fails for another reason.
    """
    folders = dict.fromkeys(as_path(path).parent for path in manifest.files)
    with naming_lost_files(Location([*folders])):
        proof(manifest)


def _fix_versions(manifest: Manifest) -> Manifest:
    """Return the manifest with the versions of files that have no header, or another reader."""
    versions = {
        path: find_version(path)
        for path, file in manifest.files.items()
        if file.lasting and file.version is None
    }
    files = {
        path: replace(file, version=versions.get(path, file.version))
        for path, file in manifest.files.items()
    }
    return replace(manifest, files=files) if versions else manifest


@contextmanager
def _naming_others(location: Location) -> Iterator[None]:
    try:
        yield
    except (IncompleteError, CorruptError) as error:
        tags = [] if location.chosen else run_directory.list_tags(location)
        parts = as_path(error.where).parts
        others = [tag for tag in tags if tag not in parts]
        if others and len(others) < len(tags):
            advice = f"choose another checkpoint with --tag; there are {abridge(others, _LISTED)}"
            error.remedy = "; or ".join(filter(None, (error.remedy, advice)))
        raise


def _read_as(location: Location, force: str | None, hints: ReadHints) -> Manifest:
    """Read a checkpoint like `read`, without the proof."""
    if force:
        registry.get_format(force)  # an unknown name is an error of its own
        if not registry.detects(force, location):
            raise UnrecognisedError(location, f"is not a {force} checkpoint", "leave out --from")
        return _read_at(location, force, hints)
    # Before detection, because one shard of a model would pass for a whole one.
    refused_paths.refuse_one_of_many(location)
    # A tag chooses inside a run, so a checkpoint directly at the path is not what is meant.
    whole = None if hints.tag else find_whole(location)
    if whole is not None:
        note = f"{location} is a part of {whole}, which was read"
        manifest = _read_as(whole, None, hints)
        return replace(manifest, warnings=(*manifest.warnings, note))
    name = refused_paths.find_format(location) if hints.tag is None else None
    if name is None:
        return _read_run(location, hints)
    refused_paths.refuse_beside_runs(location)
    return _read_at(location, name, hints)


def _read_at(location: Location, name: str, hints: ReadHints) -> Manifest:
    ignored = [
        hint for hint in registry.get_format(name).ignored_hints if getattr(hints, hint) is not None
    ]
    if "key" in ignored:  # the weights that are read would not be those that it names
        raise UsageError(
            f"--key {hints.key}",
            f"does not apply to {name} checkpoints, which have one state dict of the model",
            "leave it out",
        )
    manifest = registry.read(location, name, hints)
    notes = [f"--{hint} was ignored: it does not apply to {name} checkpoints" for hint in ignored]
    left = unread.find(location, manifest)
    notes += unread.describe(left)
    # A checkpoint with an optimizer may itself be in a numbered folder (DeepSpeed, Megatron).
    below = (
        ""
        if manifest.has_optimizer
        else refused_paths.find_checkpoint_below(location, manifest.files)
    )
    if below:
        notes.append(f"{below} is a checkpoint of the run, and was not read: pass it for its state")
    return replace(
        manifest,
        checkpoint_below=below,
        unread_files=left,
        warnings=(*manifest.warnings, *notes),
    )


def _read_run(location: Location, hints: ReadHints) -> Manifest:
    if location.chosen and location.path.stat().st_size == 0:
        raise IncompleteError(location, "is empty", "fetch it again")
    checkpoint = (
        None
        if location.chosen
        else run_directory.find_checkpoint(location, hints.tag, refused_paths.is_checkpoint)
    )
    name = registry.detect(checkpoint) if checkpoint else None
    if checkpoint and name:
        return _read_at(checkpoint, name, replace(hints, tag=None))
    if hints.tag is not None:
        for known in registry.list_formats():
            if known.reads_tags and known.detect(location):
                return known.read(location, hints)  # raises an error that lists the tags
        tags = run_directory.list_tags(location)
        if tags or registry.detect(location):
            raise UnrecognisedError(
                location,
                f"there is no checkpoint {hints.tag!r}",
                f"pass another --tag; there are {abridge(tags, _LISTED)}"
                if tags
                else "leave out --tag, or pass the name of a file in it",
            )
    below = refused_paths.find_run(location)
    if below is not location:
        manifest = _read_as(below, None, hints)
        note = f"{below} was read, the only run in {location}"
        return replace(manifest, warnings=(*manifest.warnings, note))
    _refuse_missing_weights(location)
    raise UnrecognisedError(
        location, "not a recognized checkpoint", refused_paths.suggest(location)
    )


def _refuse_missing_weights(location: Location) -> None:
    """Refuse files of weights that are empty or pointers of Git LFS, which no format detects."""
    paths = [location.path] if location.chosen else location.files.values()
    with SourceFiles() as files:
        for path in paths:
            if path.suffix not in {".safetensors", *SUFFIXES}:
                continue
            nbytes = path.stat().st_size
            if nbytes == 0:
                raise IncompleteError(path, "is empty", "fetch it again")
            if nbytes >= LFS_HEAD:
                refuse_lfs_pointer(path, files.read(str(path), 0, LFS_HEAD))


def open_alone(path: Path) -> None:
    """Read the header of one file regardless of the files beside it, if its kind has a header.

    Raises:
        CorruptError: the file is truncated or altered.
    """
    if path.suffix == ".safetensors":
        safetensors.read(path)
    elif path.suffix in SUFFIXES:
        from reshard.containers import torch_reader

        torch_reader.read(path)
    elif path.suffix == ".json":
        read_json_object(path)


def as_paths(paths: Paths) -> list[Path]:
    """Return one path or several as a list."""
    return [as_path(paths)] if isinstance(paths, (str, Path)) else [as_path(path) for path in paths]


def read_outputs(directory: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Return fqn -> entry from the headers of all files of weights among ``names``."""
    by_suffix = {
        suffix: known for known in registry.list_built_in_formats() for suffix in known.suffixes
    }
    entries: dict[str, Entry] = {}
    for name in names:
        reader = by_suffix.get(Path(name).suffix)
        if reader:
            manifest = reader.read(Location([directory], name), ReadHints())
            entries.update((entry.fqn, entry) for entry in manifest.entries.values())
    return entries
