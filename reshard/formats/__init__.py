"""The registry of formats. Each module reads files into a manifest, or lays out files for one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from reshard.errors import (
    IncompleteError,
    UnrecognisedError,
    UnsupportedError,
    UsageError,
)
from reshard.formats import deepspeed, huggingface, plain
from reshard.manifest import Entry, Manifest, check

PLAIN_SUFFIXES = (".pt", ".bin", ".pth")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.(?:safetensors|bin)$")
_RANK_FILE = re.compile(  # Meta, FairScale, verl and others; what stands before the rank's number
    r"^((?:consolidated\.|shard_|.*(?:tp|pp|dp|mp|ep)[-_]rank[-_]|.*world_size_\d+_rank_))\d+"
)
_DETECTORS = {
    deepspeed.NAME: deepspeed.detect,
    huggingface.NAME: huggingface.detect,
    plain.NAME: plain.detect,
}
NAMES = tuple(_DETECTORS)


def read(
    path: str | Path, *, force: str | None = None, tag: str | None = None, key: str | None = None
) -> Manifest:
    """The checkpoint at a file or directory, its coverage proved.

    Args:
        force: one of `NAMES`, where detection is not wanted.
        tag: which checkpoint of a run directory.
        key: which state dict of a ``torch.save`` file, dotted.

    Raises:
        UnrecognisedError: no format knows what lies there.
        ReshardError: whatever the format finds wrong.
    """
    path = Path(path)
    if not path.exists():
        raise UnrecognisedError(path, "there is no such file or directory")
    if force not in (None, *NAMES):
        raise UsageError(f"--from {force}", f"formats are {', '.join(NAMES)}")
    if not force:
        _refuse_one_of_many(path)
    if force and not _DETECTORS[force](path):
        raise UnrecognisedError(path, f"is no {force} checkpoint", "leave out --from")
    manifest = _read(path, force or _detect(path, tag), tag, key)
    check(manifest)
    return manifest


def _refuse_one_of_many(path: Path) -> None:
    """A file that its name says to be one of several is never taken for the model.

    Raises:
        IncompleteError: a shard of a Hugging Face model, given without its index.
        UnsupportedError: one rank's file of a format that is not read yet.
    """
    shard = _SHARD.search(path.name)
    files = [path] if path.is_file() else []
    if path.is_dir() and not huggingface.has_index(path):
        files = sorted(path.glob("*.safetensors"))
        shard = next((m for file in files if (m := _SHARD.search(file.name))), None)
    if shard and int(shard[2]) > 1:
        raise IncompleteError(
            path,
            f"holds {files[0].name}, shard {int(shard[1])} of {int(shard[2])}, without the index"
            " that says how the shards belong together",
            "give the directory with model.safetensors.index.json and all shards",
        )
    for file in files:
        match = _RANK_FILE.search(file.name)
        siblings = match and len(list(file.parent.glob(f"{match[1]}*{file.suffix}"))) > 1
        if match and siblings:
            raise UnsupportedError(
                file,
                "is one rank's shard of a model-parallel or sharded checkpoint, which reshard"
                " does not merge yet",
                "it would be wrong to take it for the whole model; --from torch does so if it is",
            )


def read_outputs(directory: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Fqn -> entry of every weights file among ``names``, read from the files' own headers."""
    found: dict[str, Entry] = {}
    for name in names:
        path = directory / name
        if path.suffix == ".safetensors":
            found.update((entry.fqn, entry) for entry in huggingface.read(path).entries.values())
        elif path.suffix in PLAIN_SUFFIXES:
            found.update((entry.fqn, entry) for entry in plain.read(path).entries.values())
    return found


def _detect(path: Path, tag: str | None) -> str:
    if tag is not None or deepspeed.detect(path):
        return deepspeed.NAME
    if huggingface.detect(path):
        return huggingface.NAME
    if plain.detect(path):
        return plain.NAME
    if path.is_file() and path.stat().st_size == 0:
        raise IncompleteError(path, "is empty", "fetch it again")
    raise UnrecognisedError(path, "is no checkpoint that reshard knows", _hint(path))


def _hint(path: Path) -> str:
    """Checkpoints one level below or above, so that a wrong level costs one more command."""
    if not path.is_dir():
        return f"give the checkpoint's directory, e.g. {path.parent}"
    near = [child for child in sorted(path.iterdir()) if child.is_dir()]
    found = [
        str(p)
        for p in [*near, path.resolve().parent]
        if deepspeed.detect(p) or huggingface.detect(p)
    ]
    if found:
        return f"did you mean {found[0]}?" + (
            f" ({len(found)} candidates)" if len(found) > 1 else ""
        )
    return "give a run directory, a checkpoint directory, or a file of weights"


def _read(path: Path, name: str, tag: str | None, key: str | None) -> Manifest:
    if name == deepspeed.NAME:
        return deepspeed.read(path, tag)
    if name == huggingface.NAME:
        return huggingface.read(path)
    return plain.read(path, key)
