"""The 16-bit model at the end of a run, which ``transformers`` loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from trainer import tokenizer
from trainer.checkpoint import directory, files
from trainer.config.huggingface import load_model_config
from trainer.core.engine import Engine
from trainer.core.ranks import Ranks
from trainer.errors import translate_rust_errors
from trainer.settings import Settings


def save_16bit_model(engine: Engine, settings: Settings, ranks: Ranks, target: Path) -> Path:
    """Write model.safetensors, config.json and the tokenizer into ``target``, whole or not at all.

    Rank 0 keeps the whole 16-bit model in memory. fp16 runs give float16, all others bfloat16.
    """
    dtype = torch.float16 if settings.precision == "fp16" else torch.bfloat16
    tensors = {}
    for name, value in engine.parameters():
        if ranks.is_first:
            tensors[name] = value.to(dtype)
    with ranks.raise_on_all("write the 16-bit model"):
        if ranks.is_first:
            partial = target.with_name(f".{target.name}.partial")
            aside = target.with_name(f".{target.name}.old")
            for leftover in (partial, aside):
                shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                _write(partial, tensors, settings, dtype)
                directory.replace(partial, target, aside)
                files.sync(target.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(aside, ignore_errors=True)
    return target


def _write(
    folder: Path, tensors: dict[str, torch.Tensor], settings: Settings, dtype: torch.dtype
) -> None:
    from safetensors.torch import save_file

    with translate_rust_errors():
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = load_model_config(settings)
    config.dtype = dtype
    config.save_pretrained(folder)
    tokenizer.save(folder)
    for path in (*folder.rglob("*"), folder):
        files.sync(path)
