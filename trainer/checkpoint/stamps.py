"""Stamps: each file records its save, rank, step and name.

The stamp of a file that was swapped with another one, or left from another save, contradicts its
directory or name; ``reshard`` compares the stamps of a checkpoint before it converts it. The form
is that of ``reshard.core.stamps``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

KEY = "reshard_stamp"


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What all files have in common that one rank writes in one save."""

    save_id: str
    rank: int
    world_size: int
    step: int


_active: list[Stamp] = []
"""The stamp of the save that is being written; empty between saves."""


@contextmanager
def stamp_files(stamp: Stamp) -> Iterator[None]:
    """Stamp every file that this rank saves during the block."""
    _active.append(stamp)
    try:
        yield
    finally:
        _active.pop()


def make_save_id(facts: Mapping[str, Any]) -> str:
    """Return the id of a save: a digest of what determines the run up to it.

    Training is deterministic, so two saves with one id hold the same state, and a run that is
    repeated writes the same bytes.
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def add_stamp(value: Any, file: str) -> Any:
    """Return the root object of a file with the stamp of the current save as one of its keys.

    Some roots must not get a key: ``load_state_dict`` refuses unknown ones, and DeepSpeed's
    ``load_checkpoint`` returns those of its model states to the user as ``client_state``. There the
    stamp becomes an attribute, and the root an ``OrderedDict``.
    """
    if not _active or not isinstance(value, dict):
        return value
    stamp = {**dataclasses.asdict(_active[-1]), "file": file}
    if not _refuses_keys(value):
        return {**value, KEY: stamp}
    root = OrderedDict(value)
    root.__dict__.update(getattr(value, "__dict__", {}), **{KEY: stamp})
    return root


def remove_stamp(value: Any) -> Any:
    """Return the root object of a file that was read, without the key of the stamp."""
    if isinstance(value, dict) and KEY in value:
        del value[KEY]
    return value


def _refuses_keys(root: dict[Any, Any]) -> bool:
    """Return whether it is a state dict of a module, or the model states of DeepSpeed."""
    if "ds_version" in root and "module" in root:
        return True
    return isinstance(root, OrderedDict) or all(isinstance(v, Tensor) for v in root.values())
