"""Directories of torch.distributed.checkpoint (DCP), with the checks that PyTorch does not make.

PyTorch checks neither that a tensor is complete nor of which class an object is.
"""

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

from trainer.core.errors import CheckpointError, LayoutError, TrainingError
from trainer.core.ranks import Ranks

READ = "read the checkpoint"
_RESUME_OTHER = "the checkpoint is damaged; resume from another --tag"
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
"""Errors that a damaged pickle raises."""


def save(state: dict[str, Any], directory: Path, ranks: Ranks) -> None:
    """Write each rank's shards, and one copy of what several ranks hold. Collective.

    Raises:
        TrainingError: a rank could not write.
    """
    try:
        writer = FileSystemWriter(directory)  # it calls fsync itself
        torch_save(state, storage_writer=writer, process_group=ranks.group)
    except CheckpointException as error:
        raise TrainingError(
            f"could not write {directory.name}: {_get_reason(error)}",
            "earlier checkpoints are intact; remove the cause and resume",
        ) from error


def load(state: dict[str, Any], directory: Path, ranks: Ranks) -> None:
    """Fill the live state, under ``model`` or ``optimizer``, from any sharding. Collective.

    Raises:
        CheckpointError: bytes or tensors are missing, or do not fit this run; LayoutError if only
            the param groups do not fit.
    """
    (top,) = state
    groups = [{*group["params"]} for group in state[top].get("param_groups", ())]
    names = ranks.all_gather_objects([*state[top]] if top == "model" else [])
    with ranks.raise_on_all(READ):
        if ranks.is_first:
            _check(directory, {f"{top}.{name}" for own in names for name in own}, groups)
    try:
        torch_load(state, storage_reader=FileSystemReader(directory), planner=_DataOnly())
    except (CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{directory}: {_get_reason(error)}",
            "resume with the model, --param-groups and --freeze of the run that saved it",
        ) from error
    with ranks.raise_on_all(READ):
        saved = [{*group["params"]} for group in state[top].get("param_groups", ())]
        if not all(map(set.issubset, groups, saved)):
            raise LayoutError(
                f"{directory} has param groups of {[*map(len, saved)]} parameters, and this run "
                f"has groups of {[*map(len, groups)]}",
                "resume with the --param-groups and --freeze of the run that saved it",
            )


def _check(directory: Path, names: set[str], groups: list[set[str]]) -> None:
    """Refuse a directory that lacks bytes, or has what this run does not have.

    Args:
        directory: a directory of DCP.
        names: the names of the model's tensors on all ranks, as the directory has them; or none.
        groups: the param groups of the run; or none.
    """
    metadata = _read_metadata(directory)
    _check_coverage(metadata, directory)
    _check_files(metadata, directory)
    saved = set(metadata.state_dict_metadata)
    if names and (unknown := saved - names):
        raise CheckpointError(
            f"{directory} has {min(unknown)}, which this run's model does not have",
            "resume with the model of the run that saved it",
        )
    # The keys after the prefix are numbers; in a flat state dict, names.
    prefix = "optimizer.param_groups."
    numbers = {name.split(".")[2] for name in saved if name.startswith(prefix)}
    if groups and numbers != {str(number) for number in range(len(groups))}:
        raise LayoutError(
            f"the number of param groups is {len(numbers)} in {directory}, and {len(groups)} in "
            "this run",
            "resume with the --param-groups of the run that saved it",
        )


class _DataOnly(DefaultLoadPlanner):
    """Refuses objects that are more than data, which torch would unpickle without a check."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read the object twice: the first time with the allow-list."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def _read_metadata(directory: Path) -> Metadata:
    path = directory / ".metadata"
    try:
        # A plain pickle that torch reads with its own unpickler: it is trusted as much as by torch.
        return FileSystemReader(directory).read_metadata()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", _RESUME_OTHER) from error
    except _UNREADABLE as error:
        raise CheckpointError(f"cannot read {path}: {error}", _RESUME_OTHER) from error


def _check_coverage(metadata: Metadata, directory: Path) -> None:
    """Refuse tensors with elements in no chunk, which would keep their values in memory."""
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            in_chunks = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if in_chunks != math.prod(entry.size):
                raise CheckpointError(
                    f"{directory / '.metadata'}: {name} has {math.prod(entry.size)} elements, "
                    f"and its chunks have {in_chunks}",
                    _RESUME_OTHER,
                )


def _check_files(metadata: Metadata, directory: Path) -> None:
    ends: dict[str, int] = {}
    for location in (metadata.storage_data or {}).values():
        end, name = location.offset + location.length, location.relative_path
        ends[name] = max(end, ends.get(name, 0))
    for name, end in sorted(ends.items()):
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            state = "is missing" if size is None else f"has {size} bytes, expected {end}"
            raise CheckpointError(f"{path} {state}", _RESUME_OTHER)


def _get_reason(error: BaseException) -> str:
    """Return the cause that the first failing rank gives."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {cause}"
    return str(error)
