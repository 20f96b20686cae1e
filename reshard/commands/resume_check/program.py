"""What goes on from a checkpoint in `resume-check`: the user's program, or our trainer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.commands import programs
from reshard.commands.split.report import SplitReport
from reshard.errors import UsageError
from reshard.manifest import Manifest

KNOWN = ("checkpoint", "world_size", "steps", "until", "log", "out", "zero_stage")
LATEST = {"deepspeed": "latest", "deepspeed-universal": "latest_universal"}

_STAGE = re.compile(r"stage (\d)$")
_TRAINER_STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class Program:
    """A command with placeholders.

    Args:
        step: of the source; None where it tells none.
        added: the words that a layout needs beside.
    """

    words: Sequence[str]
    step: int | None
    added: Callable[[SplitReport], Sequence[str]]

    def command(
        self, checkpoint: Path, folder: Path, *, ranks: int, steps: int, form: str
    ) -> list[str]:
        """The command that goes on from one checkpoint; its log is ``folder/log.jsonl``.

        Args:
            form: the checkpoint's, which may name a ZeRO stage.

        Raises:
            UsageError: a placeholder has no value.
        """
        values: dict[str, object] = {
            "checkpoint": checkpoint,
            "world_size": ranks,
            "steps": steps,
            "log": log_in(folder),
            "out": folder / "out",
        }
        if self.step is not None:
            values["until"] = self.step + steps
        if stage := _STAGE.search(form):
            values["zero_stage"] = stage[1]
        return programs.filled(self.words, values)


def log_in(folder: Path) -> Path:
    """Where a run's log lies."""
    return folder / "log.jsonl"


def program_of(manifest: Manifest, command: str | None) -> Program:
    """The user's program, else our trainer.

    Raises:
        UsageError: there is neither.
    """
    if command is None:
        return _trainer(manifest)
    words = programs.words(command, KNOWN, ["checkpoint", "log"])
    train = manifest.train
    known = [*train.optimizer_step.values()] if train.step is None else [train.step]
    step = int(max(known)) if known else None
    if step is None and "{until}" in command:
        raise UsageError("--command {until}", "the checkpoint tells no step", "take {steps}")
    if not any(name in command for name in ("{steps}", "{until}")):
        raise UsageError("--command", "has no {steps}", "the program must know when to stop")
    return Program(words, step, lambda _written: ())


def _trainer(manifest: Manifest) -> Program:
    """``python -m trainer`` with the settings that lie in the checkpoint."""
    path = Path(manifest.origin.path) / _TRAINER_STATE
    try:
        document = json.loads(path.read_text()) if path.is_file() else {}
        strategy, step = document["settings"]["strategy"], int(document["progress"]["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            manifest.origin.path,
            "is no checkpoint of python -m trainer, so nothing says what goes on from it",
            'say how your program does: --command "torchrun --nproc-per-node {world_size} train.py'
            ' --resume {checkpoint} --steps {steps} --losses {log}"',
        ) from error
    words = "-m trainer --resume {checkpoint} --nproc {world_size} --steps {until} --log {log}"
    return Program(
        [sys.executable, *words.split(), "--save", "{out}", "--no-progress"],
        step,
        lambda planned: _trainer_flags(planned, strategy),
    )


def _trainer_flags(planned: SplitReport, strategy: str) -> list[str]:
    """The strategy of the trainer that loads a layout.

    Raises:
        UsageError: none does.
    """
    stage = planned.target.removeprefix("deepspeed stage ")
    if stage.isdecimal():
        return ["--strategy", f"zero{stage}" if stage != "0" else "ddp"]
    names = {file["name"].partition("/")[0] for file in planned.files}
    for name, strategies, flags in _FSDP_FORMS:
        if name in names:
            chosen = strategy if strategy in strategies else strategies[0]
            return ["--strategy", chosen, "--engine", "native", *flags.split()]
    raise UsageError(
        f"--to {planned.target}",
        "is no layout that python -m trainer loads",
        "choose deepspeed, fsdp or accelerate; or give your own --command",
    )


_FSDP_FORMS = (  # a file of the form, the trainer's strategies that load it, how they are told
    ("pytorch_model_fsdp_0", ("fsdp2", "fsdp"), "--state-dict-type sharded --sharded-files dcp"),
    (
        "pytorch_model_fsdp_0_rank0.bin",
        ("fsdp2",),
        "--state-dict-type sharded --sharded-files rank",
    ),
    ("pytorch_model_fsdp.bin", ("fsdp", "fsdp2"), "--state-dict-type full --sharded-files dcp"),
    (
        "pytorch_model_fsdp_rank0.bin",
        ("fsdp",),
        "--state-dict-type local --sharded-files dcp --no-fsdp-use-orig-params",
    ),
)


def loadable(manifest: Manifest, folder: Path) -> Path:
    """The source as its framework takes it: DeepSpeed wants the directory above, with ``latest``.

    Where that names another checkpoint or is not there, a directory of links stands for it.
    """
    place = Path(manifest.origin.path).resolve()
    latest = LATEST.get(manifest.origin.format)
    if latest is None:
        return place
    named = place.parent / latest
    if named.is_file() and named.read_text().strip() == place.name:
        return place.parent
    linked = folder / "checkpoint"
    linked.mkdir()
    (linked / place.name).symlink_to(place)
    (linked / latest).write_text(place.name)
    return linked
