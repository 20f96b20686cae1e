"""Which files are parts of a checkpoint, told by their names.

Libraries number the files of ranks in ways of their own; what they have in common is told here.
"""

from __future__ import annotations

import re
from pathlib import Path

from reshard.containers.torch_detect import SUFFIXES, is_torch_file
from reshard.errors import CorruptError
from reshard.location import Location

# Between these words and the suffix stands the rank.
_SUFFIX = "|".join(map(re.escape, SUFFIXES))
RANK = re.compile(
    rf"^(.*?(?:rank|shard|rng_state|random_states)[-_]?)(\d+)((?:\.\w+)*(?:{_SUFFIX}))$"
)
_STRONG = re.compile(  # beside a model, these make a directory a training checkpoint
    r"optim(izer)?(_\d+)?\.(bin|pt|pth)|scheduler(_\d+)?\.(bin|pt)|trainer_state\.json"
    r"|pytorch_model_fsdp(_\d+)?\.bin|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|scaler\.pt"
)
_HF_SHARD = re.compile(r"-\d+-of-\d+\.bin$")
_ARGUMENTS = "training_args"


def is_of_rank(name: str) -> bool:
    """Whether a file's name says which rank's it is."""
    return RANK.fullmatch(name) is not None


def is_part(name: str) -> bool:
    """Whether a file's name says that it is a part of a training checkpoint."""
    return _STRONG.fullmatch(name) is not None or is_of_rank(name)


def torch_files(location: Location) -> dict[str, Path]:
    """The ``torch.save`` files, but for shards of an index and the trainer's arguments.

    Raises:
        CorruptError: one that is by its name a part of the checkpoint is none.
    """
    found = {}
    for name, path in location.files.items():
        if path.suffix not in SUFFIXES or _HF_SHARD.search(name) or path.stem == _ARGUMENTS:
            continue
        if is_torch_file(path):
            found[name] = path
        elif is_part(name):
            size = path.stat().st_size
            raise CorruptError(
                path,
                f"is no file of torch.save ({size} bytes)" if size else "is empty",
                "fetch it again; a node-local disk may still hold it",
            )
    return found
