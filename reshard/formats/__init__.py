"""The registry of formats. Each module reads files into a manifest, or lays out files for one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from reshard.errors import IncompleteError, UnrecognisedError, UsageError
from reshard.formats import deepspeed, huggingface, plain
from reshard.manifest import Entry, Manifest, check

PLAIN_SUFFIXES = (".pt", ".bin", ".pth")
NAMES = (deepspeed.NAME, huggingface.NAME, plain.NAME)


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
    manifest = _read(path, force or _detect(path, tag), tag, key)
    check(manifest)
    return manifest


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
