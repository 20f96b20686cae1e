"""Load any checkpoint with Accelerate's ``load_state``, without converting it.

    import reshard.accelerate

    with reshard.accelerate.open_checkpoint(accelerator, "run/") as checkpoint:
        accelerator.load_state(checkpoint)

The block yields a directory that has the names and the sizes of the files. Accelerate's own code
loads them, and reshard computes their content in memory: in one process, under DDP and under FSDP 1
and 2, at any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from reshard import formats
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.request import LiveTarget
from reshard.formats.target_options import FsdpVersion
from reshard.live.comparison import Loaded, compare_files
from reshard.live.files import describe_program
from reshard.live.memory import iterate_model, iterate_optimizer
from reshard.live.patched_loads import open_directory
from reshard.system.attributes import replace_attributes

_STATE_DICT_TYPES = {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded"}

__all__ = ["open_checkpoint"]


@contextmanager
def open_checkpoint(
    accelerator: Any, source: formats.Paths, *, workers: int | None = None, **options: Any
) -> Iterator[str]:
    """Open a checkpoint of any format for ``accelerator.load_state(...)``.

    Every process must enter the block, and call ``load_state`` in it, after ``prepare``. What is
    derived or dropped is in the log of the main process (logger ``reshard``).

    Args:
        accelerator: an ``accelerate.Accelerator`` with one prepared model.
        source: the checkpoint: a path as for `reshard.open`.
        workers: threads that read for this process.
        options: further options of `reshard.split` about the source.

    Yields:
        The path to pass to ``load_state``.

    Raises:
        ReshardError: on every process, if the source cannot be read, trusted or laid out; in
            ``load_state``, if a parameter or its optimizer state then differs from the source.
    """
    decided = {
        "to": "accelerate",
        "world_size": accelerator.num_processes,
        "state_dict_type": choose_state_dict_type(accelerator.state),
    }
    target = _describe_program(accelerator)
    with open_directory(source, decided=decided, given=options, target=target, workers=workers) as (
        folder,
        live,
    ):

        def load_state(input_dir: str | None = None, *args: Any, **keywords: Any) -> None:
            type(accelerator).load_state(accelerator, input_dir, *args, **keywords)
            if str(input_dir) == str(folder):
                compare_files(_iterate_loaded(accelerator), live)

        with replace_attributes(accelerator, load_state=load_state):
            yield str(folder)


def _iterate_loaded(accelerator: Any) -> Iterator[Loaded]:
    (model,) = accelerator._models  # noqa: SLF001 - no public name
    yield from iterate_model(model)
    for optimizer in accelerator._optimizers:  # noqa: SLF001
        yield from iterate_optimizer(model, optimizer.optimizer)


def choose_state_dict_type(state: Any) -> str:
    """Return the state dict type that Accelerate loads under the strategy of its state.

    Source: Accelerate 1.15 ``accelerator.py`` (``load_state``), ``utils/fsdp_utils.py``.

    Raises:
        UnsupportedError: Accelerate loads no separate tensors, or only at one number of ranks.
    """
    strategy = state.distributed_type.name
    if strategy == "DEEPSPEED":
        raise UnsupportedError(
            "DeepSpeed",
            "is loaded through its engine, not as separate tensors",
            "pass the prepared model to reshard.deepspeed.load_checkpoint",
        )
    if strategy != "FSDP":
        return "unsharded"
    kind = state.fsdp_plugin.state_dict_type.name
    if kind not in _STATE_DICT_TYPES:
        raise UnsupportedError(
            f"fsdp_state_dict_type {kind}",
            "cannot be loaded at another number of ranks",
            "set SHARDED_STATE_DICT or FULL_STATE_DICT",
        )
    return _STATE_DICT_TYPES[kind]


def find_fsdp_version(state: Any) -> FsdpVersion | None:
    """Return the version of FSDP that Accelerate's state names; None under other strategies."""
    if state.distributed_type.name != "FSDP":
        return None
    return 1 if state.fsdp_plugin.fsdp_version == 1 else 2


def _describe_program(accelerator: Any) -> LiveTarget:
    models = accelerator._models  # noqa: SLF001 - no public name
    if len(models) != 1:
        raise UsageError(
            "accelerator",
            f"has {len(models)} prepared models, but a checkpoint contains one",
            "call accelerator.prepare(model) first",
        )
    fsdp = find_fsdp_version(accelerator.state)
    if fsdp == 1:
        return LiveTarget(shapes=None, fsdp=fsdp)
    model = accelerator.unwrap_model(models[0])
    optimizers = accelerator._optimizers  # noqa: SLF001 - no public name
    groups = optimizers[0].param_groups if len(optimizers) == 1 else []
    return replace(describe_program(model, groups), fsdp=fsdp)
