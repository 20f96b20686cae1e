"""The 16-bit model at the end of a run, as ``transformers`` loads it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from trainer import tokenizer
from trainer.checkpoint import directory, files
from trainer.engines.base import Engine
from trainer.model import configuration
from trainer.ranks import Ranks
from trainer.settings import Settings


def save_16bit(engine: Engine, settings: Settings, ranks: Ranks, target: Path) -> Path:
    """Write model.safetensors, config.json and the tokenizer into ``target``, whole or not at all.

    Rank 0 holds the 16-bit model for it: 2 bytes a parameter. fp16 runs give float16, all others
    bfloat16.
    """
    dtype = torch.float16 if settings.precision == "fp16" else torch.bfloat16
    tensors = {}
    for name, value in engine.parameters():
        if ranks.first:
            tensors[name] = value.to(dtype)
    with ranks.together("write the 16-bit model"):
        if ranks.first:
            partial = target.with_name(f".{target.name}.partial")
            aside = target.with_name(f".{target.name}.old")
            for left_over in (partial, aside):
                shutil.rmtree(left_over, ignore_errors=True)
            partial.mkdir(parents=True)
            _write(partial, tensors, settings, dtype)
            directory.replace(partial, target, aside)
            files.sync(target.parent)
            shutil.rmtree(aside, ignore_errors=True)
    return target


def _write(
    place: Path, tensors: dict[str, torch.Tensor], settings: Settings, dtype: torch.dtype
) -> None:
    from safetensors.torch import save_file

    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    config = configuration(settings)
    config.dtype = dtype
    config.save_pretrained(place)
    tokenizer.save(place)
    for path in (*place.rglob("*"), place):
        files.sync(path)
