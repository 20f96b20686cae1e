"""Checks of a destination before any work is done."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

from reshard.errors import ExistsError, ReshardError, ResourceError, UsageError
from reshard.system.paths import explain_tilde, is_remote, resolve
from reshard.units import abridge

if TYPE_CHECKING:
    from reshard.system.remote.path import RemotePath

_SAFETENSORS = ".safetensors"
_WEIGHTS = (_SAFETENSORS, ".bin", ".pt", ".pth")
# --overwrite replaces a directory only if all of its files have one of these suffixes.
_EXPORT_SUFFIXES = frozenset(
    [
        *_WEIGHTS,
        ".json",
        ".txt",
        ".model",
        ".jinja",
        ".py",
        ".md",
        ".tiktoken",
    ]
)


_FOREIGN = {  # suffixes of files that reshard does not write, and how to get such a file
    ".gguf": "write a directory, and convert it with llama.cpp's convert_hf_to_gguf.py",
    ".onnx": "write a directory, and export it with optimum-cli",
    **dict.fromkeys((".ckpt", ".pkl", ".tar"), "write a file of torch.save: model.pt"),
    **dict.fromkeys((".h5", ".npz", ".msgpack"), "write model.safetensors"),
}
_ALIKE = 0.8  # similarity of a suffix that is taken for a misspelled one


def check_suffix(destination: Path) -> None:
    """Refuse a destination whose name looks like that of one file, but would become a directory.

    Raises:
        UsageError: its suffix is misspelled, or that of a format that reshard does not write.
    """
    suffix = destination.suffix.lower()
    remedy = _FOREIGN.get(suffix, "")
    if _is_misspelled(suffix):
        remedy = f"did you mean {destination.with_suffix(_SAFETENSORS)}?"
    if remedy:
        raise UsageError(
            destination, f"ends in {destination.suffix}, which reshard does not write", remedy
        )


def _is_misspelled(suffix: str) -> bool:
    if suffix in ("", _SAFETENSORS):
        return False
    from difflib import SequenceMatcher  # few destinations have another suffix

    return SequenceMatcher(None, suffix, _SAFETENSORS).ratio() > _ALIKE


def check_destination(
    destination: Path,
    sources: list[Path],
    *,
    is_directory: bool,
    overwrite: bool,
    resume: bool = False,
) -> None:
    """Check that output may be written to `destination`.

    Args:
        destination: the path of the output.
        sources: the paths that are read, which must not be written to.
        is_directory: whether the output is a directory rather than one file.
        overwrite: whether an existing destination may be replaced.
        resume: whether to accept files of a run that died while an object store copied them.

    Raises:
        ExistsError: the destination exists (and ``overwrite`` is off or would delete other files),
            is a file instead of a directory or the reverse, or is inside a source.
        UsageError: its parent directory does not exist.
        ReshardError: its parent directory cannot be written to.
    """
    real = resolve(destination)
    _check_apart(destination, sources, overwrite=overwrite)
    if is_remote(str(real)):
        if _is_moving(real) and is_directory and resume:
            return
    elif not destination.parent.is_dir():
        parent = resolve(destination.parent)
        remedy = "choose another path" if _exists(parent) else "create it first"
        raise UsageError(
            destination,
            f"there is no directory {parent}",
            explain_tilde(destination) or remedy,
        )
    elif not os.access(destination.parent, os.W_OK | os.X_OK):
        raise ReshardError(
            destination,
            f"cannot be written: you may not write to {destination.parent.resolve()}",
            "choose another path, or request write permission",
        )
    elif is_directory and os.path.ismount(real):
        raise ExistsError(
            destination,
            "is a mount point, and a mount point cannot be replaced by a rename",
            "choose a directory inside it",
        )
    if destination.is_dir() and is_directory:
        _check_directory(destination, overwrite=overwrite)
    elif destination.is_dir():
        raise ExistsError(
            destination, "is a directory, but the output is a single file", "choose another name"
        )
    elif _exists(destination) and (is_directory or not destination.is_file()):
        kind = "not a directory" if is_directory else "not a regular file"
        raise ExistsError(destination, f"exists and is {kind}", "choose another name")
    elif _exists(destination) and not overwrite:
        raise ExistsError(destination, "already exists", "remove it, or pass --overwrite")


def _check_apart(destination: Path, sources: list[Path], *, overwrite: bool) -> None:
    real = resolve(destination)
    for source in sources:
        inside = resolve(source)
        if real == inside or inside in real.parents:
            raise ExistsError(
                destination,
                f"is inside the source {source}, and sources are never written to",
                "choose a destination outside of the source",
            )
        # Without --overwrite, `_check_directory` refuses such a destination, as it is not empty.
        if real in inside.parents and overwrite:
            raise ExistsError(
                destination, f"contains the source {source}", "choose another destination"
            )


def _check_directory(destination: Path, *, overwrite: bool) -> None:
    children = sorted(destination.iterdir())
    foreign = [c.name for c in children if c.is_dir() or not _is_export(c.name)]
    # Without a file of weights, the directory is not an export, whatever its suffixes are.
    if children and not foreign and not any(c.suffix in _WEIGHTS for c in children):
        foreign = [children[0].name]
    if children and not overwrite:
        raise ExistsError(
            destination,
            f"exists and is not empty ({abridge([child.name for child in children], 1)})",
            "choose another name" if foreign else "remove it, or pass --overwrite",
        )
    if foreign:
        raise ExistsError(
            destination,
            f"--overwrite would delete {foreign[0]!r}, and it replaces only exported models",
            "remove the directory yourself, or choose another",
        )


def _is_moving(destination: Path) -> bool:
    from reshard.engine.output import remote
    from reshard.system.remote import objects

    there = cast("RemotePath", destination)
    objects.check_bucket(there)
    return remote.is_moving(there)


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()  # a broken link does not "exist"


def check_space(destination: Path, nbytes: int) -> None:
    """Check that `nbytes` bytes fit on the destination's file system.

    Raises:
        ResourceError: the file system has less free space than ``nbytes``.
    """
    free = shutil.disk_usage(destination.parent.resolve()).free
    if free < nbytes:
        raise ResourceError(
            destination,
            f"{nbytes:,} bytes must be written, but only {free:,} are free on its file system",
            "free some space, or choose another destination",
        )


def _is_export(name: str) -> bool:
    # DeepSpeed's rank files end in _states.pt: they are a training checkpoint, not an export.
    return Path(name).suffix in _EXPORT_SUFFIXES and not name.endswith("_states.pt")
