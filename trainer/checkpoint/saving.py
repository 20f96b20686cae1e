"""Save and resume: the files of the engine, and beside them what a run needs to continue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer import tokenizer
from trainer.checkpoint import directory, files, stamps, state
from trainer.checkpoint.directory import RunDirectory
from trainer.config.huggingface import load_model_config
from trainer.core.engine import Engine
from trainer.core.loop import Progress
from trainer.core.ranks import Ranks
from trainer.errors import CheckpointError
from trainer.settings import Settings

_READERS = {"DeepSpeed": "zero2", "FSDP": "fsdp2", "Megatron-LM": "fsdp2"}
"""A strategy that reads each layout."""
Write = Callable[[Path, Any, dict[str, Any]], None]
"""(directory, engine, progress): write this rank's files into an existing, shared directory."""
Read = Callable[[Path, Any], dict[str, Any] | None]
"""(directory, engine) -> the progress that the files record, or None; fill the engine."""


def choose_format(settings: Settings) -> tuple[Write, Read]:
    """Return the functions that write and read the files of this run's engine. Collective ones."""
    if settings.engine == "deepspeed":
        from trainer.engines import deepspeed_files

        return deepspeed_files.write, deepspeed_files.read
    if settings.layout == "DeepSpeed":
        from trainer.checkpoint import deepspeed, deepspeed_read

        return deepspeed.write, deepspeed_read.read
    from trainer.checkpoint import fsdp

    return fsdp.write, fsdp.read


def save(
    run: RunDirectory,
    settings: Settings,
    ranks: Ranks,
    engine: Engine,
    progress: Progress,
    text: str,
) -> Path:
    """Write a checkpoint; on return it is complete and has its name, on every rank.

    Args:
        run: the directory that the checkpoint goes into.
        settings: of the run.
        ranks: all of them.
        engine: the model and its optimizer.
        progress: how far the run has come.
        text: SHA-256 of the corpus.

    Raises:
        TrainingError: a rank could not write; the checkpoint before is intact.
    """
    with ranks.raise_on_all("make the checkpoint directory"):
        if ranks.is_first:
            run.prepare(progress.step)
    partial = run.partial_path(progress.step)
    document = state.make_document(settings, progress, engine.scaler, text)
    save_id = ranks.broadcast_object(stamps.make_save_id(state.select_deciding(document)))
    stamp = stamps.Stamp(save_id, ranks.rank, ranks.world, progress.step)
    write, _ = choose_format(settings)
    with ranks.raise_on_all("write its part of the checkpoint"):
        with stamps.stamp_files(stamp):
            write(partial, engine, dataclasses.asdict(progress))
        if ranks.is_first:
            load_model_config(settings).save_pretrained(partial)
            tokenizer.save(partial)
            files.write_json(partial / directory.STATE, document)
    with ranks.raise_on_all("give the checkpoint its name"):
        if ranks.is_first:
            run.publish(progress.step, files.sync, files.write_text)
    return run.path / directory.make_tag(progress.step)


def resume(checkpoint: Path, settings: Settings, engine: Engine) -> tuple[Progress, str]:
    """Load a checkpoint into the engine.

    Returns:
        How far its run had come, and the SHA-256 of its corpus (empty if it is not recorded).

    Raises:
        CheckpointError: the checkpoint does not fit this run.
    """
    layout = directory.detect_layout(checkpoint)
    own = settings.layout
    readable = {own, "Megatron-LM"} if own == "FSDP" else {own}
    if layout and layout not in readable:
        split = f"reshard split {checkpoint} OUT --to {own.lower()} --world-size {settings.nproc}"
        convert = f", or convert it: {split}" if layout != "Megatron-LM" else ""
        raise CheckpointError(
            f"{checkpoint} has the layout of {layout}, and --strategy {settings.strategy} reads "
            f"the layout of {own}",
            f"resume with --strategy {_READERS[layout]}{convert}",
        )
    _, read = choose_format(settings)
    recorded = read(checkpoint, engine)
    document = state.read(checkpoint)
    if document is not None:
        if settings.precision == "fp16" and engine.scaler.dynamic:
            for name, value in document["scaler"].items():
                setattr(engine.scaler, name, value)
        return Progress(**document["progress"]), str(document.get("text", ""))
    return Progress(**(recorded or {})), ""
