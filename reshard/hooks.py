"""Functions for training scripts, which mark each saved file with its save, rank and step.

    torch.save(reshard.stamp(state, step=step), path)     # FSDP, DDP, any dict
    reshard.stamp_engine(engine)                          # DeepSpeed: once, before it saves

Only these functions run inside a user's training. They import torch, and no other framework.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from typing import Any

from reshard.core.stamps import KEY, Save, Stamp
from reshard.errors import UsageError

_RUN = "reshard/run"  # key in the store of the process group
_ID = 32  # characters of a save's id
_known_run: list[tuple[Any, str]] = []  # the store that was used last, and the run's id in it


def stamp(
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    save_id: str | None = None,
    file: str = "",
) -> dict[str, Any]:
    """Return ``state`` with a stamp, to be saved in its place; ``state`` itself is not changed.

    The stamp is the key ``reshard_stamp``. In a module's state dict it is an attribute of that
    name, because ``load_state_dict`` refuses unknown keys. Loaders ignore both.

    No rank waits for another, so a full state dict can be stamped on rank 0 alone.

    Args:
        step: the optimizer step. Files of one run with the same step belong to one save.
        rank, world_size: by default, those of torch.distributed, or 0 and 1 if it is not
            initialized.
        save_id: a text that is equal in all files of one save and different in every other save;
            None derives it from the run and the step.
        file: the name of the file, if the caller knows it.

    Raises:
        UsageError: neither a step nor a save id is given.
    """
    if save_id is None and step is None:
        raise UsageError("reshard.stamp", "needs step=N, or save_id=TEXT where there are no steps")
    here, ranks = _find_rank()
    new = Stamp(
        save_id=_make_save_id(step) if save_id is None else save_id,
        rank=here if rank is None else rank,
        world_size=ranks if world_size is None else world_size,
        step=step,
        file=file,
    )
    stamped: dict[str, Any] = _add_stamp(state, new)
    return stamped


def stamp_engine(engine: Any) -> None:
    """Make a DeepSpeed engine stamp every file that it saves from now on.

    DeepSpeed writes all files of a checkpoint through the ``save`` of its checkpoint engine (0.19.8
    ``runtime/engine.py``), which this function wraps. ``client_state`` would reach the model states
    only.

    Args:
        engine: the first value that ``deepspeed.initialize`` returns.
    """
    files = engine.checkpoint_engine
    if hasattr(files.save, KEY):  # an earlier call has wrapped it
        return
    save = files.save

    def stamped(state_dict: Any, path: Any, *args: Any, **named: Any) -> Any:
        step = int(engine.global_steps)
        new = Save(_make_save_id(step), step).stamp(str(path), *_find_rank())
        return save(_add_stamp(state_dict, new), path, *args, **named)

    setattr(stamped, KEY, True)
    files.save = stamped


def _add_stamp(state: Any, new: Stamp) -> Any:
    if not isinstance(state, Mapping):
        return state
    if not _is_strict(state):
        return {**state, KEY: new.as_dict()}
    stamped = OrderedDict(state)
    stamped.__dict__.update(getattr(state, "__dict__", {}))  # _metadata: versions of modules
    setattr(stamped, KEY, new.as_dict())
    return stamped


def _is_strict(state: Mapping[str, Any]) -> bool:
    # A module refuses additional keys. DeepSpeed returns the unknown keys of a model states file as
    # ``client_state``, and a resumed run would write them into its next save.
    import torch

    if "ds_version" in state and "module" in state:
        return True
    return isinstance(state, OrderedDict) or all(
        isinstance(value, torch.Tensor) for value in state.values()
    )


def _find_rank() -> tuple[int, int]:
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _make_save_id(step: int | None) -> str:
    return hashlib.sha256(f"{_find_run_id()} {step}".encode()).hexdigest()[:_ID]


def _find_run_id() -> str:
    # ``compare_set`` keeps the text of the first rank that calls it, so no rank waits. Each rank
    # calls it once: the store ends with rank 0, and another rank may save after that.
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return _make_own_id()
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    if not _known_run or _known_run[0][0] is not store:
        _known_run[:] = [(store, bytes(store.compare_set(_RUN, "", _make_own_id())).decode())]
    return _known_run[0][1]


@cache
def _make_own_id() -> str:
    return uuid.uuid4().hex
