"""The stamp of a file: which save it belongs to, of which rank, at which step, under which name.

A rank's file that was swapped with another one, or left from another save, then contradicts its
place; ``reshard`` compares the stamps of a checkpoint before it writes anything from it. The form
is that of ``reshard.stamps``.
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
    """What the files that one rank writes in one save have in common."""

    save_id: str
    rank: int
    world_size: int
    step: int


_now: list[Stamp] = []


@contextmanager
def stamping(stamp: Stamp) -> Iterator[None]:
    """Stamp every file that this rank saves meanwhile."""
    _now.append(stamp)
    try:
        yield
    finally:
        _now.pop()


def save_id(facts: Mapping[str, Any]) -> str:
    """Return the id of a save: a digest of what determines the run up to it.

    Training is deterministic, so two saves with one id hold the same state, and a run that is
    repeated writes the same bytes.
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stamped(value: Any, file: str) -> Any:
    """Return the root of a file with its stamp, which is a key of it.

    Where keys are not for us, the stamp is an attribute of the root, which is an ``OrderedDict``
    then: ``load_state_dict`` refuses unknown keys, and DeepSpeed's ``load_checkpoint`` hands those
    of its model states to the user as ``client_state``.
    """
    if not _now or not isinstance(value, dict):
        return value
    stamp = {**dataclasses.asdict(_now[-1]), "file": file}
    if not _is_strict(value):
        return {**value, KEY: stamp}
    root = OrderedDict(value)
    root.__dict__.update(getattr(value, "__dict__", {}), **{KEY: stamp})
    return root


def without(value: Any) -> Any:
    """Return the root of a file that was read without the key of a stamp."""
    if isinstance(value, dict) and KEY in value:
        del value[KEY]
    return value


def _is_strict(root: dict[Any, Any]) -> bool:
    """Whether it is a module's state dict, or the model states of DeepSpeed."""
    if "ds_version" in root and "module" in root:
        return True
    return isinstance(root, OrderedDict) or all(isinstance(v, Tensor) for v in root.values())
