"""Whether parts of a training checkpoint lie in a directory, told by their names."""

from __future__ import annotations

import re

from reshard.containers.torch_detect import is_torch_file
from reshard.formats.dcp import names as dcp
from reshard.formats.pytorch import names
from reshard.location import Location

NAME = "torch"
_FOLDER = re.compile(r"(pytorch_)?(model|optim(izer)?s?)(_fsdp)?(_\d+)?")


def detect(location: Location) -> bool:
    """Whether a sharded training checkpoint's parts lie at a place."""
    if location.chosen:
        return is_rank_file(location.chosen)
    return (
        dcp.detect(location)
        or any(map(dcp.is_hf_shard, location.files))
        or any(map(names.is_part, location.files))
        or any(is_dcp_part(name, folder) for name, folder in location.folders.items())
    )


def detect_loosely(location: Location) -> bool:
    """Whether any ``torch.save`` file lies at a place that nothing else recognises.

    Raises:
        CorruptError: a file that is by its name a part of the checkpoint is none.
    """
    if location.chosen:
        return is_torch_file(location.path)
    return bool(names.torch_files(location))


def is_rank_file(name: str) -> bool:
    """Whether a file's name says that it is one rank's, or one of DCP's."""
    return dcp.is_part(name) or dcp.is_hf_shard(name) or names.is_of_rank(name)


def is_dcp_part(name: str, folder: Location) -> bool:
    """Whether a folder holds a part that DCP wrote."""
    return _FOLDER.fullmatch(name) is not None and dcp.detect(folder)
