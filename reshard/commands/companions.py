"""The small files without which no run goes on: the model's config, tokenizer, the progress."""

from __future__ import annotations

import json
from pathlib import Path

from reshard.containers.json_files import json_text
from reshard.files import read_small_file
from reshard.formats.huggingface import companions as beside
from reshard.location import directory
from reshard.manifest import Manifest, OutputFile, Skeleton

_PROGRESS = "trainer_state.json"  # HF Trainer's, and our trainer's
_MAX_BYTES = 64 << 20


def with_companions(
    skeleton: Skeleton, manifest: Manifest, *, beside: str = "", above: str = ""
) -> Skeleton:
    """The skeleton with the files that lie beside the source's, in the same place beside its own.

    Args:
        beside: where in the skeleton goes what lies in the checkpoint's directory.
        above: where goes what lies above it (HF Trainer puts its own above DeepSpeed's).
    """
    place = directory(manifest.origin.path)
    taken = {file.name for file in skeleton.files}
    added: dict[str, OutputFile] = {}
    for folder, below in ((place, beside), (place.resolve().parent, above)):
        for path in _beside(folder):
            name = f"{below}/{path.name}" if below else path.name
            if name not in taken and name not in added:
                data = (
                    _progress(path, manifest) if path.name == _PROGRESS else read_small_file(path)
                )
                added[name] = OutputFile(name, len(data), ((0, data),))
        if added and not beside:
            break
    return Skeleton((*skeleton.files, *added.values()), skeleton.entries, skeleton.checksums)


def config_beside(manifest: Manifest) -> Path | None:
    """A transformers ``config.json`` of the checkpoint's directory, or of the run's.

    Raises:
        CorruptError: it is not JSON.
    """
    place = directory(manifest.origin.path)
    found = beside.companions(None, [place, place.resolve().parent]).directory
    return found / "config.json" if found else None


def _progress(path: Path, manifest: Manifest) -> bytes:
    """Return the account of the run, with the values that the manifest has of it."""
    data = read_small_file(path)
    wanted = manifest.train.trainer_state or {}
    held = json.loads(data) if wanted else {}
    if all(held.get(name) == value for name, value in wanted.items()):
        return data
    return json_text({**held, **wanted})


def _beside(folder: Path) -> list[Path]:
    """A model's files and the run's progress; nothing of a directory that has neither."""
    found = list(beside.companions(None, [folder]).others)
    config = folder / "config.json"
    if config.is_file() and beside.is_model_config(config):
        found.append(config)
    progress = folder / _PROGRESS
    if progress.is_file():
        found.append(progress)
    return [path for path in found if path.stat().st_size <= _MAX_BYTES]
