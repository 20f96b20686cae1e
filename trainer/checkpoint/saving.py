"""Save and resume: the files of the engine, and beside them what a run needs to continue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer import tokenizer
from trainer.checkpoint import any_format, directory, files, stamps, state
from trainer.checkpoint.directory import RunDirectory
from trainer.config.huggingface import load_model_config
from trainer.core.engine import Engine
from trainer.core.loop import Progress
from trainer.core.ranks import Ranks
from trainer.errors import LayoutError
from trainer.settings import Settings

Write = Callable[[Path, Any, dict[str, Any]], None]
"""(directory, engine, progress): write this rank's files into an existing, shared directory."""
Read = Callable[[Path, Any], dict[str, Any] | None]
"""(directory, engine) -> the progress that the files record, or None; fill the engine."""


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a resumed run takes over beside the state of its engine.

    Attributes:
        progress: how far the run had come.
        text: SHA-256 of its corpus; empty if it is not recorded.
        dropped: what of another program's checkpoint this run does not use, for the user.
    """

    progress: Progress
    text: str = ""
    dropped: tuple[str, ...] = ()


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


def find_source(path: Path, tag: str | None) -> Path:
    """Return the checkpoint that ``--resume path --tag tag`` means, of any format.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return directory.find_checkpoint(path, tag)
    except LayoutError:
        return path


def resume(checkpoint: Path, settings: Settings, engine: Engine) -> Resumed:
    """Load a checkpoint of any format and any number of ranks into the engine.

    Raises:
        CheckpointError: the checkpoint does not fit this run.
    """
    _, read = choose_format(settings)
    dropped: tuple[str, ...] = ()
    try:
        _check_layout(checkpoint, settings)
        recorded = read(checkpoint, engine)
    except LayoutError as unread:
        with any_format.open_converted(checkpoint, settings, unread) as converted:
            recorded = read(converted.folder, engine) or converted.progress
            dropped = converted.dropped
    document = state.read(checkpoint)
    if document is not None:
        if settings.precision == "fp16" and engine.scaler.dynamic:
            for name, value in document["scaler"].items():
                setattr(engine.scaler, name, value)
        return Resumed(Progress(**document["progress"]), document.get("text", ""), dropped)
    recorded = recorded or state.read_hf_trainer(checkpoint, settings.global_batch)
    return Resumed(Progress(**recorded), "", dropped)


def _check_layout(checkpoint: Path, settings: Settings) -> None:
    """Raise LayoutError if the run's own reader is for another layout than the checkpoint's."""
    layout = directory.detect_layout(checkpoint) if checkpoint.is_dir() else ""
    readable = {settings.layout, "Megatron-LM"} if settings.layout == "FSDP" else {settings.layout}
    if layout not in readable:
        raise LayoutError(
            f"{checkpoint} has {f'the layout of {layout}' if layout else 'no known layout'}, and "
            f"--strategy {settings.strategy} reads the layout of {settings.layout}"
        )
