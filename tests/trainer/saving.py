"""Checkpoints saved as the trainer saves them, and looked at as one who goes on from them."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.checkpoint import directory, files
from trainer.checkpoint.directory import RunDirectory


def save(path: str, steps: list[int], keep: int) -> None:
    """Save after each step; a step lower than the one before is of a run that went back."""
    run = RunDirectory(Path(path), continues=_newest(Path(path)), overwrite=False, keep=keep)
    run.claim()
    for step in steps:
        partial = run.prepare(step)
        files.save({"step": step, "w": torch.full((64,), float(step))}, partial / "model.pt")
        (partial / "config.json").write_text(f"{step}")  # as libraries write it: without fsync
        files.write_json(partial / directory.STATE, {"step": step})
        run.publish(step)
    run.close()


def _newest(path: Path) -> Path | None:
    return directory.find_checkpoint(path, None) if directory.list_tags(path) else None


def check(path: Path) -> str:
    """Check that every checkpoint is whole, and that ``latest`` names one of them, if any."""
    for tag in directory.list_tags(path):
        step = int(tag.removeprefix("global_step"))
        content = files.load(path / tag / "model.pt")
        assert content["step"] == step
        assert bool((content["w"] == step).all())
        assert (path / tag / "config.json").read_text() == f"{step}"
    newest = _newest(path)
    return newest.name if newest else ""
