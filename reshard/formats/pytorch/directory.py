"""Recognize the files and folders of a training checkpoint by their names.

Libraries number the files of ranks in different ways; the patterns here cover what they share.
"""

from __future__ import annotations

import re
from pathlib import Path

from reshard.containers.torch_detect import SUFFIXES, is_torch_file
from reshard.core.location import Location
from reshard.errors import CorruptError
from reshard.formats import huggingface
from reshard.formats.dcp import directory as dcp

NAME = "torch"
_FOLDER = re.compile(r"(pytorch_)?(model|optim(izer)?s?)(_fsdp)?(_\d+)?")
# NeMo RL 0.4 ``native_checkpoint.py``; elsewhere, a folder ``weights`` is a whole checkpoint.
_WEIGHTS, _OPTIMIZER = "weights", "optimizer"
# The rank is between one of these words and the suffix.
_SUFFIX = "|".join(map(re.escape, SUFFIXES))
OF_WORLD = r"(?:[-_.]?(?:of|world_size)[-_.]?\d+)?"  # behind the number of a rank
RANK = re.compile(
    rf"^(.*?(?:rank|shard|rng_state|random_states)[-_]?)(\d+){OF_WORLD}((?:\.\w+)*(?:{_SUFFIX}))$"
)
_RANK_FIRST = re.compile(rf"^(rank[-_]?\d+)[-_.](\w+)({_SUFFIX})$")
_STRONG = re.compile(  # a directory with one of these is a training checkpoint, not only a model
    r"optim(izer)?(_\d+)?\.(bin|pt|pth)|scheduler(_\d+)?\.(bin|pt)|trainer_state\.json"
    r"|pytorch_model_fsdp(_\d+)?\.bin|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|scaler\.pt"
)
_HF_SHARD = re.compile(r"-\d+-of-(\d+)\.bin$")
_ARGUMENTS = "training_args"


def detect(location: Location) -> bool:
    """Return whether a sharded training checkpoint has files here."""
    if location.chosen:
        return is_rank_file(location.chosen)
    return (
        dcp.detect(location)
        or any(map(dcp.is_hf_shard, location.files))
        or any(map(is_part, location.files))
        or bool(find_dcp_parts(location))
    )


def detect_loosely(location: Location) -> bool:
    """Return whether any ``torch.save`` file is here that no other format recognizes.

    Raises:
        CorruptError: a file has the name of a part of the checkpoint but is not one.
    """
    if location.chosen:
        return is_torch_file(location.path)
    return bool(find_torch_files(location))


def is_rank_file(name: str) -> bool:
    """Return whether a file's name is one rank's, or one of DCP's."""
    return dcp.is_part(name) or dcp.is_hf_shard(name) or is_of_rank(name)


def find_dcp_parts(location: Location) -> dict[str, Location]:
    """Return the folders that DCP wrote, as items or as shards for Hugging Face."""
    parts = {
        name: folder
        for name, folder in location.folders.items()
        if _FOLDER.fullmatch(name) and _is_of_dcp(folder)
    }
    weights = location.folders.get(_WEIGHTS)
    if weights and _OPTIMIZER in parts and _is_of_dcp(weights):
        parts[_WEIGHTS] = weights
    return parts


def find_whole(location: Location) -> Location | None:
    """Return the checkpoint whose model or optimizer is the folder that the user passed.

    None is returned for other folders, and where the checkpoint has several models to choose from.
    """
    if location.chosen or len(location.directories) > 1 or not _FOLDER.fullmatch(location.name):
        return None
    folder = location.path if location.path.name else location.path.resolve()
    above = Location([folder.parent])
    parts = find_dcp_parts(above)
    optimizers = [name for name in parts if name.startswith("optim")]
    is_pair = location.name in parts and (len(parts), len(optimizers)) == (2, 1)
    return above if is_pair else None


def _is_of_dcp(folder: Location) -> bool:
    return dcp.detect(folder) or any(map(dcp.is_hf_shard, folder.files))


def is_of_rank(name: str) -> bool:
    """Return whether a file's name has the number of a rank."""
    return match_rank(name) is not None


def match_rank(name: str) -> re.Match[str] | None:
    """Return the match of a file's name with `RANK`, also if the rank is its first word."""
    return RANK.fullmatch(_RANK_FIRST.sub(r"\2_\1\3", name))


def is_part(name: str) -> bool:
    """Return whether a file's name is that of a part of a training checkpoint."""
    return _STRONG.fullmatch(name) is not None or is_of_rank(name)


def find_torch_files(location: Location) -> dict[str, Path]:
    """Return the ``torch.save`` files, except shards of an index and the trainer's arguments.

    Raises:
        CorruptError: a file has the name of a part of the checkpoint but is not one.
    """
    torch_files = {}
    indexed = huggingface.find_index(location) is not None
    for name, path in location.files.items():
        if path.suffix not in SUFFIXES or path.stem == _ARGUMENTS:
            continue
        shard = _HF_SHARD.search(name)
        # torchtune 0.4 to 0.6 names a whole model like a shard: ``model-00001-of-00001.bin``.
        if shard and (indexed or int(shard[1]) != 1):
            continue
        if is_torch_file(path):
            torch_files[name] = path
        elif is_part(name):
            size = path.stat().st_size
            raise CorruptError(
                path,
                f"is not a torch.save file ({size} bytes)" if size else "is empty",
                "fetch it again; a node-local disk may still have it",
            )
    return torch_files
