"""DCP directories. PyTorch checks neither that a tensor is complete nor what an object is."""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from trainer.errors import CheckpointError, TrainingError

ELSEWHERE = "resume from another checkpoint"
_UNREADABLE = (
    OSError,
    EOFError,
    ImportError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""What a damaged pickle ends in."""


def save(state: dict[str, Any], directory: Path) -> None:
    """Write each rank's shards, one copy of what several ranks hold. Collective.

    Raises:
        TrainingError: a rank could not.
    """
    try:
        torch_save(state, storage_writer=FileSystemWriter(directory))  # it calls fsync itself
    except CheckpointException as error:
        raise TrainingError(
            f"could not write {directory.name}: {_reason(error)}",
            "nothing was replaced; free the cause and resume",
        ) from error


def load(state: dict[str, Any], directory: Path) -> None:
    """Fill ``state`` at its own cut, whatever the checkpoint's was. Collective.

    Raises:
        CheckpointError: a tensor is missing or of another shape.
    """
    try:
        torch_load(state, storage_reader=FileSystemReader(directory), planner=_DataOnly())
    except (CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{directory}: {_reason(error)}",
            "resume with the run's own model, --param-groups and --freeze",
        ) from error


def is_flat(directory: Path) -> bool:
    """Whether an optimizer's hyper-parameters are under each parameter's name.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    return not all(group.isdigit() for group in _groups(_metadata(directory)))


def _groups(metadata: Metadata) -> set[str]:
    """What comes after ``optimizer.param_groups``: numbers, or first parts of names."""
    beginning = "optimizer.param_groups."
    names = metadata.state_dict_metadata
    return {name.split(".")[2] for name in names if name.startswith(beginning)}


def check(state: dict[str, Any], names: set[str], directory: Path) -> None:
    """Refuse a directory that lacks bytes, or holds tensors that no rank has a place for.

    Args:
        names: of the model's tensors on all ranks, as the directory has them; empty for others.

    Raises:
        CheckpointError: what it lacks, by name.
    """
    metadata = _metadata(directory)
    _check_coverage(metadata, directory)
    _check_files(metadata, directory)
    saved = set(metadata.state_dict_metadata)
    if "model" in state and (unknown := saved - names):
        raise CheckpointError(
            f"{directory} holds {min(unknown)}, which this model has not",
            "resume with the run's own model",
        )
    groups = _groups(metadata)
    grouped = state.get("optimizer", {}).get("param_groups", ())  # or flat: by name
    if grouped and len(groups) != len(grouped):
        raise CheckpointError(
            f"{directory}: {len(groups)} param groups, this run has {len(grouped)}",
            "resume with the run's own --param-groups",
        )


class _DataOnly(DefaultLoadPlanner):
    """Refuses objects that are more than data before torch unpickles them without a question."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read the object twice: the first time with the allow-list."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def _metadata(directory: Path) -> Metadata:
    path = directory / ".metadata"
    try:
        # A bare pickle that torch reads with its own unpickler: it is trusted as torch trusts it.
        return FileSystemReader(directory).read_metadata()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", ELSEWHERE) from error
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {error}", ELSEWHERE) from error


def _check_coverage(metadata: Metadata, directory: Path) -> None:
    """Rows that no chunk holds would be left as they are in memory."""
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if held != math.prod(entry.size):
                raise CheckpointError(
                    f"{directory / '.metadata'}: {name} has {math.prod(entry.size)} elements, its "
                    f"chunks hold {held}",
                    ELSEWHERE,
                )


def _check_files(metadata: Metadata, directory: Path) -> None:
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in sorted(ends.items()):
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            state = "is missing" if size is None else f"has {size} bytes, expected {end}"
            raise CheckpointError(f"{path} {state}", ELSEWHERE)


def _reason(error: BaseException) -> str:
    """The first rank's own words."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {cause}"
    return str(error)
