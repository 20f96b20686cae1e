"""Resuming the transformers Trainer from any checkpoint, without converting it.

    import reshard.transformers

    with reshard.transformers.open_checkpoint(trainer, "run/") as checkpoint:
        trainer.train(resume_from_checkpoint=checkpoint)

The checkpoint is a directory of names; the Trainer's own code loads the content from memory, under
the strategy that it has (one process, DDP, FSDP 1 and 2, DeepSpeed) and at its number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from reshard import formats
from reshard.accelerate import choose_state_dict_type
from reshard.formats.request import LiveTarget
from reshard.live.directory import open_directory
from reshard.model import shapes_of

__all__ = ["open_checkpoint"]


@contextmanager
def open_checkpoint(
    trainer: Any, source: formats.Paths, *, workers: int | None = None, **options: Any
) -> Iterator[str]:
    """Open a checkpoint of any format for ``trainer.train(resume_from_checkpoint=...)``.

    Every rank must enter the block, and call ``train`` in it. What is derived or dropped is in the
    log of rank 0 (logger ``reshard``).

    Args:
        trainer: a ``transformers.Trainer`` that has not trained yet.
        source: the checkpoint: a path as for `reshard.open`.
        workers: threads that read for this rank.
        options: further options of `reshard.split` about the source.

    Yields:
        The path to pass as ``resume_from_checkpoint``.

    Raises:
        ReshardError: on every rank, if the source cannot be read, trusted or written so.
    """
    decided, config = _describe_strategy(trainer)
    target = LiveTarget(shapes=shapes_of(trainer.model), config=config)
    with open_directory(
        source, decided=decided, given=options, target=target, workers=workers
    ) as folder:
        (checkpoint,) = folder.glob("checkpoint-*")
        yield str(checkpoint)


def _describe_strategy(trainer: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the options that the Trainer's strategy decides, and DeepSpeed's configuration.

    Source: transformers 5.23 ``trainer.py`` (``is_deepspeed_enabled``, ``is_fsdp_enabled``).

    Raises:
        UnsupportedError: the Trainer loads no such checkpoint.
    """
    decided: dict[str, Any] = {"to": "hf-trainer", "world_size": trainer.args.world_size}
    state = trainer.accelerator.state
    if trainer.is_deepspeed_enabled:
        plugin = state.deepspeed_plugin
        precision = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else "fp32"
        decided |= {"zero_stage": plugin.zero_stage, "dtype": precision}
        return decided, plugin.deepspeed_config
    return {**decided, "state_dict_type": choose_state_dict_type(state)}, None
