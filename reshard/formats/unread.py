"""Find the files of a checkpoint that no reader used, so that each is reported and compared.

The files of a checkpoint are those of its directory, and of the directory above if it is a part of
a checkpoint: verl's ``actor``, OLMo-core's ``model_and_optim``, DeepSpeed's tag in a checkpoint of
HF Trainer or Accelerate.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from reshard.core.location import Location, get_directory
from reshard.core.manifest import Manifest
from reshard.formats import adjacent_files, run_directory
from reshard.system.paths import as_path, is_remote
from reshard.training.companion_files import CONFIG_FOLDERS, is_companion
from reshard.units import abridge, counted

_DEPTH = 3  # folders below that of the checkpoint
_LISTED = 6
# What programs write beside a checkpoint that is no part of a training state: logs, descriptions,
# settings that only their authors read, pointers to the newest checkpoint, DeepSpeed's script.
_NO_STATE = re.compile(
    r"events\.out\.tfevents.*|latest.*|last_checkpoint|training_args\.bin|zero_to_fp32\.py"
    r"|\.git.*|\.DS_Store|\.lock|.*\.(md|txt|log|out|err|html?|png|jpe?g|gif|svg|pdf|csv|tsv|py"
    r"|sh|ipynb|lock|tmp|partial|ya?ml|toml|ini|cfg)|LICENSE.*|README.*|.*\.index\.json"
    r"|.*\.metadata|metadata\.json|(fsdp_config|ckpt_contents|transformer_config)\.json|\.ready"
)
_NO_STATE_FOLDER = re.compile(
    r"logs?|runs|wandb|tensorboard|lightning_logs|mlruns|configs?|code|\..*|__pycache__|.*\.partial"
)


def find(location: Location, manifest: Manifest) -> dict[str, str]:
    """Return the files that were not read: name, relative to its level -> path.

    Args:
        location: where the checkpoint was read; of a file that the user chose, none are returned.
    """
    if location.chosen:
        return {}
    train = manifest.train
    used = {
        *manifest.files,
        *manifest.read_files,
        *train.rng_files,
        *train.kept_files.values(),
        *train.hook_files.values(),
    }
    parents = {as_path(path).parent for path in used}
    found: dict[str, str] = {}
    for level, below in _list_levels(location, manifest):
        known = {folder.resolve() for folder in {*level.directories, *parents}}
        for name, path in level.files.items():
            is_known = str(path) in used or _is_known(name, manifest)
            if not is_known and not _leads_back(path, known):
                found.setdefault(name, str(path))
        for name, folder in level.folders.items():
            if name != below and not _is_passed_over(name):
                files = dict(_walk(folder, name, _DEPTH, known))
                if used.isdisjoint(files.values()):
                    found |= {name: path for name, path in files.items() if name not in found}
    told = _list_told(manifest.warnings)
    return {
        name: path
        for name, path in found.items()
        if not told.intersection(_list_spellings(name)) and _has_content(path)
    }


def describe(unread: Mapping[str, str]) -> list[str]:
    """Return a note on files that were not read, with one name for all files of a folder."""
    if not unread:
        return []
    return [f"{abridge(group(unread), _LISTED)}: not read, and not part of the output"]


def update_notes(
    notes: Iterable[str], unread: Mapping[str, str], copied: Container[str]
) -> list[str]:
    """Return the notes of a checkpoint without the files that the output has although unread."""
    before = describe(unread)
    left = {name: path for name, path in unread.items() if name not in copied}
    return [*(note for note in notes if note not in before), *describe(left)]


def group(names: Iterable[str]) -> list[str]:
    """Return the names of files; those of several files in a folder are counted."""
    by_top: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_top[name.partition("/")[0]].append(name)
    return [
        below[0] if len(below) == 1 else f"{top}/ ({counted(len(below), 'file')})"
        for top, below in by_top.items()
    ]


def _list_spellings(name: str) -> Iterator[str]:
    """Yield what a reader may call a file: its name or folder, also without suffix or rank."""
    top = name.partition("/")[0]
    yield top
    yield PurePosixPath(top).stem
    yield re.sub(r"[-_.]?rank[-_]?\d+$", "", PurePosixPath(top).stem)


def _list_told(warnings: Iterable[str]) -> set[str]:
    """Return the names of files, with or without suffix, that a reader said not to have read."""
    texts = [text for text in warnings if "not read" in text]
    return {word for text in texts for word in re.split(r"[,:\s]+", text)}


def _list_levels(location: Location, manifest: Manifest) -> Iterator[tuple[Location, str]]:
    origin = get_directory(manifest.origin.path)
    level = location if origin in location.directories else Location([origin], inner=True)
    yield level, ""
    above = level.get_parent()
    if level.own_name in run_directory.PARTS or _is_of_trainer(above):
        yield above, level.own_name


def _is_of_trainer(location: Location) -> bool:
    return adjacent_files.TRAINER_STATE in location.files or bool(
        adjacent_files.list_random_files(location)
    )


def _is_known(name: str, manifest: Manifest) -> bool:
    """Return whether a file is no part of the state, or one that is read without being listed."""
    if _NO_STATE.fullmatch(name) or is_companion(name):
        return True
    return adjacent_files.is_read(name, manifest.train)


def _is_passed_over(folder: str) -> bool:
    """Return whether a folder is another checkpoint of the run, or holds no state by its name."""
    return run_directory.parse_number(folder) is not None or bool(
        _NO_STATE_FOLDER.fullmatch(folder)
    )


def _leads_back(path: Path, known: Collection[Path]) -> bool:
    """Return whether a link leads into one of these folders, or to one around them."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    return any(target.is_relative_to(root) or root.is_relative_to(target) for root in known)


def _walk(
    folder: Location, name: str, depth: int, known: Collection[Path]
) -> Iterator[tuple[str, str]]:
    if _leads_back(folder.path, known):
        return
    is_config = any(name in (config, config.partition("/")[0]) for config in CONFIG_FOLDERS)
    for inner, path in folder.files.items():
        is_left_out = is_config and (is_companion(inner) or _NO_STATE.fullmatch(inner))
        if not is_left_out and not _leads_back(path, known):
            yield f"{name}/{inner}", str(path)
    if depth > 1 and not is_remote(str(folder)):
        for inner, below in folder.folders.items():
            yield from _walk(below, f"{name}/{inner}", depth - 1, known)


def _has_content(path: str) -> bool:
    """Return whether a file has any bytes: DCP opens one for a rank without anything to write."""
    return is_remote(path) or as_path(path).stat().st_size > 0
