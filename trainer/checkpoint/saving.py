"""Saving and resuming: the engine's own files, and beside them what a run needs to go on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trainer import tokenizer
from trainer.checkpoint import directory, files, stamps, state
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.state import Progress
from trainer.engines.base import Engine
from trainer.errors import CheckpointError
from trainer.model import configuration
from trainer.ranks import Ranks
from trainer.settings import Settings

_READERS = {"DeepSpeed": "zero2", "FSDP": "fsdp2", "Megatron-LM": "fsdp2"}
"""A strategy that reads each layout."""


def save(
    run: RunDirectory,
    settings: Settings,
    ranks: Ranks,
    engine: Engine,
    progress: Progress,
    text: str,
) -> Path:
    """Write a checkpoint; it has its name when this returns, on every rank.

    Args:
        text: SHA-256 of the corpus.

    Raises:
        TrainingError: a rank could not write; the checkpoint before is still there.
    """
    with ranks.together("make the checkpoint directory"):
        if ranks.first:
            run.prepare(progress.step)
    partial = run.partial(progress.step)
    document = state.document(settings, progress, engine.scaler, text)
    save_id = ranks.share(stamps.save_id(state.deciding(document)))
    stamp = stamps.Stamp(save_id, ranks.rank, ranks.world, progress.step)
    with ranks.together("write its part of the checkpoint"):
        with stamps.stamping(stamp):
            engine.save(partial, dataclasses.asdict(progress))
        if ranks.first:
            configuration(settings).save_pretrained(partial)
            tokenizer.save(partial)
            files.write_json(partial / directory.STATE, document)
    with ranks.together("give the checkpoint its name"):
        if ranks.first:
            run.publish(progress.step, files.sync, files.write_text)
    return run.path / directory.tag_of(progress.step)


def resume(checkpoint: Path, settings: Settings, engine: Engine) -> tuple[Progress, str]:
    """Load a checkpoint into the engine.

    Returns:
        How far its run had come, and the SHA-256 of its corpus (empty when it does not tell).

    Raises:
        CheckpointError: it does not fit; the message says how.
    """
    found = directory.layout(checkpoint)
    wanted = settings.layout
    taken = {wanted, "Megatron-LM"} if settings.layout == "FSDP" else {wanted}
    if found and found not in taken:
        to = f"--to {wanted.lower()} --world-size {settings.nproc}"
        split = f", or change the layout: reshard split {checkpoint} OUT {to}"
        raise CheckpointError(
            f"{checkpoint} has the layout of {found}, and --strategy {settings.strategy} reads "
            f"that of {wanted}",
            f"resume with --strategy {_READERS[found]}{split if found != 'Megatron-LM' else ''}",
        )
    told = engine.load(checkpoint)
    document = state.read(checkpoint)
    if document is not None:
        if settings.precision == "fp16" and engine.scaler.dynamic:
            for name, value in document["scaler"].items():
                setattr(engine.scaler, name, value)
        return Progress(**document["progress"]), str(document.get("text", ""))
    return Progress(**(told or {})), ""
