"""Save and resume: the files of the engine, and beside them what a run needs to continue."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainer import tokenizer
from trainer.checkpoint import any_format, directory, files, state
from trainer.checkpoint.contents import Content, write_all
from trainer.checkpoint.directory import RunDirectory
from trainer.core.engine import Engine
from trainer.core.errors import LayoutError, TrainerError
from trainer.core.loop import Progress
from trainer.core.model_config import load_model_config
from trainer.core.ranks import Ranks
from trainer.settings import AUTO, Settings

Collect = Callable[[Any, dict[str, Any]], Iterable[Content]]
"""(engine, progress): yield what this rank writes into the directory that all ranks share."""
Read = Callable[[Path, Any], dict[str, Any] | None]
"""(directory, engine) -> the progress that the files record, or None; fill the engine."""


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a resumed run takes over beside the state of its engine.

    Attributes:
        progress: how far the run had come.
        text: SHA-256 of its corpus; empty if it is not recorded.
        dropped: the parts of another program's checkpoint that this run does not use, for the user.
    """

    progress: Progress
    text: str = ""
    dropped: tuple[str, ...] = ()


def choose_format(settings: Settings) -> tuple[Collect, Read]:
    """Return the functions that collect and read the files of this run's engine."""
    if settings.layout == "DeepSpeed":
        from trainer.checkpoint import deepspeed, deepspeed_read

        return deepspeed.collect, deepspeed_read.read
    from trainer.checkpoint import fsdp

    return fsdp.collect, fsdp.read


@dataclasses.dataclass(frozen=True)
class Unwritten:
    """A checkpoint before it is written.

    Attributes:
        step: how many steps the run has done.
        contents: what this rank writes.
        document: the content of ``trainer_state.json``.
    """

    step: int
    contents: Iterable[Content]
    document: dict[str, Any]


def collect(settings: Settings, engine: Engine, progress: Progress, text: str) -> Unwritten:
    """Collect a checkpoint of the engine as it is now, with the SHA-256 of the corpus. Collective.

    The contents are collected when they are iterated, and refer to the engine's own tensors.
    """
    collect_contents, _ = choose_format(settings)
    contents = collect_contents(engine, dataclasses.asdict(progress))
    document = state.make_document(settings, progress, engine.scaler, text)
    return Unwritten(progress.step, contents, document)


def write(run: RunDirectory, settings: Settings, ranks: Ranks, unwritten: Unwritten) -> None:
    """Write a checkpoint; on return it is complete and has its name, on every rank.

    Raises:
        TrainingError: a rank could not write; only the checkpoint before remains.
    """
    try:
        _write(run, settings, ranks, unwritten)
    except TrainerError:
        # All ranks have this error, so none of them still writes.
        if ranks.is_first:
            with contextlib.suppress(OSError):  # else the next save removes it
                run.remove_unfinished()
        raise


def _write(run: RunDirectory, settings: Settings, ranks: Ranks, unwritten: Unwritten) -> None:
    step, document = unwritten.step, unwritten.document
    with ranks.raise_on_all("make the checkpoint directory"):
        if ranks.is_first:
            run.prepare(step)
    partial = run.partial_path(step)
    write_all(partial, unwritten.contents, ranks)
    with ranks.raise_on_all("write its part of the checkpoint"):
        if ranks.is_first:
            load_model_config(settings).save_pretrained(partial)
            tokenizer.save(partial)
            files.write_json(partial / directory.STATE, document)
    with ranks.raise_on_all("give the checkpoint its name"):
        if ranks.is_first:
            run.publish(step)


def find_source(settings: Settings, ranks: Ranks) -> Path | None:
    """Return the checkpoint of any format to resume from; None starts a new run. Collective.

    With ``--resume auto``, the previous run may still be writing its last save, which is awaited.

    Raises:
        CheckpointError: there is none.
        SettingsError: another run is still writing.
    """
    if not settings.resume:
        return None
    path = Path(settings.resume)
    if settings.resume == AUTO:
        path = Path(settings.save or "")
        with ranks.raise_on_all("use the run directory"):
            if ranks.is_first:
                directory.wait_until_free(path)
        if not ranks.broadcast_object(directory.has_checkpoint(path)):
            return None
    try:
        found = directory.find_checkpoint(path, settings.tag)
    except LayoutError:
        return path
    return Path(ranks.broadcast_object(str(found)))


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
    if not layout:
        directory.find_checkpoint(checkpoint, None)  # it says what was expected there
    if layout != settings.layout:
        raise LayoutError(
            f"{checkpoint} has {f'the layout of {layout}' if layout else 'no known layout'}, and "
            f"--strategy {settings.strategy} reads the layout of {settings.layout}"
        )
