"""The program that resumes in `resume-check`: the user's, or our trainer."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.commands import programs
from reshard.commands.split.report import SplitReport
from reshard.core.chunks import Chunk
from reshard.core.manifest import MASTER, PARAM, Manifest
from reshard.errors import UnsupportedError, UsageError
from reshard.formats import registry
from reshard.training import trainer_run


@dataclass(frozen=True, slots=True)
class Program:
    """A command with placeholders.

    Args:
        step: the step of the source; None if its files do not state one.
        layout_flags: returns further words of the command for a layout.
    """

    words: Sequence[str]
    step: int | None
    layout_flags: Callable[[SplitReport], Sequence[str]]

    def build_command(
        self, checkpoint: Path, folder: Path, *, ranks: int, steps: int, zero_stage: int | None
    ) -> list[str]:
        """Return the command that resumes from one checkpoint and writes ``folder/log.jsonl``."""
        values: dict[str, object] = {
            "checkpoint": checkpoint,
            "world_size": ranks,
            "steps": steps,
            "log": locate_log(folder),
            "out": folder / "out",
        }
        if self.step is not None:
            values["until"] = self.step + steps
        if zero_stage is not None:
            values["zero_stage"] = zero_stage
        return programs.fill_placeholders(self.words, values)


def locate_log(folder: Path) -> Path:
    """Return the path of the log of a run."""
    return folder / "log.jsonl"


def choose_program(manifest: Manifest, command: str | None) -> Program:
    """Return the user's program, or our trainer if there is none.

    Raises:
        UsageError: no program is given, and the source is not a checkpoint of our trainer.
    """
    if command is None:
        return _use_trainer(manifest)
    words = programs.split_command(command, ["checkpoint", "log"])
    train = manifest.train
    known = [*train.optimizer_step.values()] if train.step is None else [train.step]
    step = int(max(known)) if known else None
    if step is None and "{until}" in command:
        raise UsageError("--command {until}", "the checkpoint states no step", "use {steps}")
    if not any(name in command for name in ("{steps}", "{until}")):
        raise UsageError(
            "--command",
            "contains neither {steps} nor {until}",
            "add one of them: the program must know when to stop",
        )
    return Program(words, step, lambda _written: ())


def _use_trainer(manifest: Manifest) -> Program:
    run = trainer_run.read(manifest.train.trainer_state, manifest.origin.path)
    if run is None:
        raise UsageError(
            manifest.origin.path,
            "not a checkpoint of python -m trainer, so the program that resumes is unknown",
            'pass the command of your program: --command "torchrun --nproc-per-node {world_size}'
            ' train.py --resume {checkpoint} --steps {steps} --losses {log}"',
        )
    words = "-m trainer --resume {checkpoint} --nproc {world_size} --steps {until} --step-log {log}"
    return Program(
        [sys.executable, *words.split(), "--save", "{out}", "--no-progress"],
        run.progress["step"],
        lambda planned: _choose_flags(planned, run.settings["strategy"]),
    )


def _choose_flags(planned: SplitReport, strategy: str) -> list[str]:
    names = {file["name"].partition("/")[0] for file in planned.files}
    flags = trainer_run.choose_flags(names, planned.zero_stage, strategy)
    if flags is None:
        raise UsageError(
            f"--to {planned.target}",
            "python -m trainer does not load this layout",
            "choose deepspeed, fsdp or accelerate, or pass your own --command",
        )
    return flags


def copy_loadable(manifest: Manifest, folder: Path) -> tuple[Path, Manifest]:
    """Copy the source into ``folder``; return the path that its framework loads, and its manifest.

    Raises:
        UnsupportedError: files of the source are elsewhere.
    """
    path, latest = Path(manifest.origin.path).resolve(), registry.describe_source(manifest).pointer
    target = folder / (path.parent.name if latest else "checkpoint")
    copied = target / path.name if latest or path.is_file() else target
    if path.is_dir():
        shutil.copytree(path, copied)
    else:
        target.mkdir()
        shutil.copy2(path, copied)
    if latest:
        for file in path.parent.iterdir():
            if file.is_file():
                shutil.copy2(file, target)
        (target / latest).write_text(path.name)

    def replace_path(chunk: Chunk) -> Chunk:
        below = Path(chunk.file).resolve().relative_to(path)
        return replace(chunk, file=str(copied / below))

    try:
        entries = [
            replace(entry, chunks=tuple(map(replace_path, entry.chunks)))
            for entry in manifest.entries.values()
            if entry.kind in (PARAM, MASTER)
        ]
    except ValueError as error:
        raise UnsupportedError(path, f"has files elsewhere: {error}") from error
    return target if path.is_dir() else copied, manifest.with_entries(entries)


def make_loadable(manifest: Manifest, folder: Path) -> Path:
    """Return the path of the source that its framework loads.

    DeepSpeed loads the parent directory with its file ``latest``. If that file is missing or names
    another checkpoint, a directory with a link to the source is created in ``folder``.
    """
    path = Path(manifest.origin.path).resolve()
    latest = registry.describe_source(manifest).pointer
    if not latest:
        return path
    named = path.parent / latest
    if named.is_file() and named.read_text().strip() == path.name:
        return path.parent
    linked = folder / "checkpoint"
    linked.mkdir()
    (linked / path.name).symlink_to(path)
    (linked / latest).write_text(path.name)
    return linked
