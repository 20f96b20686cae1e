"""Find the selected checkpoint in the directory of a run that has several.

Pointers and names: DeepSpeed ``latest``; verl ``latest_checkpointed_iteration.txt``; HF Trainer
``checkpoint-N``, Accelerate ``checkpoints/checkpoint_N``, torchtitan ``step-N``, verl
``global_step_N``; nanotron ``latest.txt`` and ``N``; Composer ``epE-baN``, llm-foundry ``baN``;
Lightning ``epoch=E-step=N.ckpt``; NeMo 2 ``...-step=N-...`` with a folder ``weights``; OLMo-core
``stepN`` with one ``model_and_optim``; torchtune ``dist_epoch_N``; litgpt ``step-N/lit_model.pth``;
NeMo Automodel ``epoch_E_step_N``; NeMo RL ``step_N/policy``; prime-rl ``step_N/trainer``;
SpecForge's symlink ``RUN-latest``. Without a pointer the highest number is taken, as their own
resuming does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from reshard.containers.torch_detect import SUFFIXES
from reshard.core.location import Location, refuse_broken_link
from reshard.errors import UnrecognisedError
from reshard.system.files import MAX_POINTER, read_small_file
from reshard.system.paths import as_path
from reshard.units import abridge

_NUMBERED = re.compile(
    r"(?:(?:checkpoint|step|global_step|iter|(?:dist_)?epoch|ckpt)[-_]?"
    r"|(?:ep\d+-)?ba|epoch_\d+_(?:train_)?step_)?"
    r"(\d{1,19})(?:-unsharded)?"
    r"|(?:.*-)?step=(\d{1,19})(?:-.*)?(?:\.ckpt)?"
)
_LINK = re.compile(r"(?:.*[-_])?(?:latest|last)(?:[-_](?:checkpoint|ckpt|unsharded))?")
_POINTERS = (
    *("latest", "latest_checkpointed_iteration.txt", "latest.txt"),
    "latest_ckpt_global_step.txt",  # SkyRL's
)
PARTS = (  # folders of a checkpoint
    *("actor", "critic", "dist_ckpt"),  # verl's; the last one with Megatron
    "weights",  # NeMo's
    "model_and_optim",  # OLMo-core's
    "lit_model.pth",  # litgpt's, if it is DCP
    "policy",  # NeMo RL's
    "value",  # the same, with PPO
    "trainer",  # prime-rl's
)
_FOLDERS = ("checkpoints", "checkpoint", "ckpt", *PARTS)
_OF_RANK = re.compile(r"[-_]rank[-_]?\d+")
_DEPTH = 3  # directories from a run to its checkpoint
_LISTED = 6
_LONGEST = 20  # digits of a step


def find_checkpoint(
    location: Location, tag: str | None, detect: Callable[[Location], bool], depth: int = _DEPTH
) -> Location | None:
    """Return the checkpoint below a directory; None if there is none.

    Raises:
        UnrecognisedError: there are several, and neither pointer, number nor tag chooses one.
        ReshardError: the chosen one cannot be read.
    """
    if detect(location) and tag is None:
        return location
    if depth == 0:
        return None
    chosen = (
        _find_tagged(location, tag)
        if tag
        else _find_pointed(location, detect) or _find_newest(location, detect)
    )
    if chosen:
        found = find_checkpoint(chosen, None, detect, depth - 1)
        if found is None:
            chosen.refuse_unreadable()
            raise UnrecognisedError(
                chosen,
                f"is the checkpoint that {location} points to, but it contains no checkpoint; its"
                " save may have been interrupted",
                _advise_others(location, chosen.name),
            )
        return found
    several = [
        below
        for name in _FOLDERS
        if name in location.folders
        and (below := find_checkpoint(location.folders[name], tag, detect, depth - 1))
    ]
    if len(several) > 1:
        shown = ", ".join(map(str, several))
        raise UnrecognisedError(
            location,
            f"contains several checkpoints: {shown}",
            f"pass one of them, e.g. {several[0]}",
        )
    return several[0] if several else None


def _advise_others(location: Location, broken: str) -> str:
    others = [name for name in list_tags(location) or location.folders if name != broken]
    if not others:
        return f"copy it here again: {location} has no other checkpoint"
    return f"choose another one with --tag; there are {abridge(others, _LISTED)}"


def list_tags(location: Location) -> list[str]:
    """Return the names of the numbered checkpoints of a run, highest first."""
    numbers = list_numbered(location)
    return [numbers[number].path.name for number in sorted(numbers, reverse=True)]


def list_others(path: str) -> list[str]:
    """Return the names of the run's other numbered checkpoints, highest first.

    Args:
        path: a checkpoint of the run, or a part or file of it.
    """
    below = as_path(path)
    for directory in (below, *below.parents)[:_DEPTH]:
        if parse_number(directory.name) is not None:
            tags = list_tags(Location([directory.parent]))
            return [tag for tag in tags if tag != directory.name]
    return []


def _find_tagged(location: Location, tag: str) -> Location | None:
    if tag in location.folders:
        return location.folders[tag]
    number = int(tag) if tag.isdecimal() and len(tag) < _LONGEST else None
    folder = None if number is None else list_numbered(location).get(number)
    return folder or _find_tagged_file(location, tag, number)


def _find_tagged_file(location: Location, tag: str, number: int | None) -> Location | None:
    named: dict[str, str] = {}
    for name, path in sorted(location.files.items()):
        stem = _OF_RANK.sub("", path.stem.removesuffix(".pth"))  # of last.pth.tar
        is_meant = tag in (name, stem) or (number is not None and parse_number(stem) == number)
        if path.suffix in SUFFIXES and is_meant:
            named.setdefault(stem, name)
    return Location(location.directories, *named.values()) if len(named) == 1 else None


def list_numbered(location: Location) -> dict[int, Location]:
    """Return the checkpoints of a run that have a number in their name."""
    return {
        number: folder
        for name, folder in location.folders.items()
        if (number := parse_number(name)) is not None
    }


def _list_numbered_files(location: Location) -> dict[int, Location]:
    found: dict[int, Location] = {}
    if location.chosen:
        return found
    for name in location.files:
        number = parse_number(name) if name.endswith(".ckpt") else None
        if number in found:
            raise UnrecognisedError(
                location,
                f"contains two checkpoints of step {number}: {found[number].chosen} and {name}",
                "move one of them to another directory",
            )
        if number is not None:
            found[number] = Location([location.files[name].parent], name)
    return found


def list_checkpoints(
    location: Location, detect: Callable[[Location], bool]
) -> dict[int, Location | None]:
    """Return the checkpoints of a run by the number in their name, lowest first.

    A number without a checkpoint (an interrupted save) has None. The result is empty if the
    directory is not that of a run.

    Raises:
        UnrecognisedError: there are several runs, or several checkpoints of one number.
    """
    runs = list_runs(location, detect)
    if len(runs) > 1:
        raise UnrecognisedError(
            location,
            f"contains the checkpoints of several models: {' and '.join(runs)}",
            "pass the directories of one model's checkpoints",
        )
    return next(iter(runs.values()), {})


def list_runs(
    location: Location, detect: Callable[[Location], bool], depth: int = _DEPTH
) -> dict[str, dict[int, Location | None]]:
    """Return the runs in a directory, with their checkpoints as in `list_checkpoints`.

    A run that trains several models has each in a folder of the numbered directories (verl:
    ``actor`` and ``critic``). The runs have the names of these folders; a single run has none.

    Raises:
        UnrecognisedError: there are several runs beside one another, or several files of one step.
    """
    if not depth:
        return {}
    numbers = list_numbered(location) or _list_numbered_files(location)
    models = [_list_models(folder, detect, depth - 1) for folder in numbers.values()]
    names = [name for name in _FOLDERS if any(name in folders for folders in models)] or [""]
    found = {
        name: {n: _find_model(numbers[n], name, detect, depth - 1) for n in sorted(numbers)}
        for name in names
    }
    if any(checkpoint for run in found.values() for checkpoint in run.values()):
        return found
    inside = [location.folders[name] for name in _FOLDERS if name in location.folders]
    several = [runs for folder in inside if (runs := list_runs(folder, detect, depth - 1))]
    if len(several) > 1:
        raise UnrecognisedError(
            location,
            f"contains the checkpoints of {len(several)} runs",
            f"pass one of {abridge([str(folder) for folder in inside])}",
        )
    return several[0] if several else {}


def _list_models(location: Location, detect: Callable[[Location], bool], depth: int) -> list[str]:
    """Return the folders of a checkpoint that has several models; empty if it has one."""
    if not depth or detect(location):
        return []
    names = [
        name
        for name in _FOLDERS
        if name in location.folders
        and find_checkpoint(location.folders[name], None, detect, depth - 1)
    ]
    return names if len(names) > 1 else []


def _find_model(
    location: Location, name: str, detect: Callable[[Location], bool], depth: int
) -> Location | None:
    """Return the checkpoint in a folder of a numbered directory, or in the directory itself."""
    if not name:
        return find_checkpoint(location, None, detect, depth)
    folder = location.folders.get(name)
    return find_checkpoint(folder, None, detect, depth - 1) if folder else None


def parse_number(name: str) -> int | None:
    """Return the number in a checkpoint's name.

    >>> parse_number("ep0-ba20"), parse_number("model_2")
    (20, None)
    """
    match = _NUMBERED.fullmatch(name)
    return int(match[1] or match[2]) if match else None


def _find_pointed(location: Location, detect: Callable[[Location], bool]) -> Location | None:
    pointer = location.find_first(_POINTERS)
    if pointer is None:
        _refuse_broken_link(location, lambda name: name in _POINTERS or _LINK.fullmatch(name))
        return _find_linked(location, detect)
    named = _read_pointer(pointer)
    found = _find_tagged(location, named)
    if found is None:
        raise UnrecognisedError(
            pointer,
            f"names {named[:_LONGEST]!r}, which does not exist",
            _advise_others(location, named),
        )
    return found


def _read_pointer(pointer: Path) -> str:
    return read_small_file(pointer, MAX_POINTER).decode(errors="replace").strip()


def describe_lost_pointer(location: Location) -> str:
    """Return which checkpoint the pointer of a run names, if it does not exist; else ""."""
    pointer = location.find_first(_POINTERS)
    if pointer is None or _find_tagged(location, named := _read_pointer(pointer)):
        return ""
    return f"{pointer} names {named[:_LONGEST]!r}, which does not exist"


def _refuse_broken_link(location: Location, names_checkpoint: Callable[[str], object]) -> None:
    for name, link in location.broken_links.items():
        if names_checkpoint(name) and re.search(r"\d", link.readlink().name):
            refuse_broken_link(link, _advise_others(location, name))


def _find_linked(location: Location, detect: Callable[[Location], bool]) -> Location | None:
    """Return where a symlink such as ``latest`` points; None if there are several."""
    links = {
        name: folder
        for name, folder in location.folders.items()
        if _LINK.fullmatch(name) and folder.path.is_symlink()
    }
    targets = {folder.path.resolve() for folder in links.values()}
    if len(targets) != 1:
        return None
    # The checkpoint itself may be a symlink to another disk.
    for name, folder in location.folders.items():
        if name not in links and folder.path.resolve() in targets:
            return folder
    elsewhere = next(iter(links.values()))
    return elsewhere if find_checkpoint(elsewhere, None, detect, 1) else None


def _find_newest(location: Location, detect: Callable[[Location], bool]) -> Location | None:
    # The highest number may be an interrupted save. `find_checkpoint` refuses it, because an older
    # checkpoint is not what the user expects.
    numbers = list_numbered(location)
    highest = max(numbers, default=-1)
    _refuse_broken_link(
        location, lambda name: (number := parse_number(name)) is not None and number > highest
    )
    if any(find_checkpoint(folder, None, detect, 1) for folder in numbers.values()):
        return numbers[max(numbers)]
    return None
