"""Define what the three scripts share: a tiny model, batches by step, and the log of losses."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GLOBAL_BATCH, LENGTH, VOCABULARY, WIDTH = 12, 16, 61, 32


def arguments() -> argparse.Namespace:
    """Read the options that `reshard resume-check --command` fills in, and where to save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True, help="number of steps to run")
    parser.add_argument(
        "--losses", type=Path, required=True, help="file for the log, one JSON line per step"
    )
    parser.add_argument("--resume", help="checkpoint to continue from")
    parser.add_argument("--save", help="directory for a checkpoint")
    parser.add_argument("--save-after", type=int, help="step after which to save")
    parser.add_argument("--zero-stage", type=int, default=2)
    return parser.parse_args()


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape: (batch, length, WIDTH)."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predict the next token from one token; return the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss, a scalar, of int64 tokens of shape (batch, LENGTH)."""
        logits = self.head(self.blocks(self.embed(tokens[:, :-1])))
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def samples(step: int, rank: int = 0, world: int = 1) -> Tensor:
    """Return a rank's part of a step's batch, (GLOBAL_BATCH / world, LENGTH) of int64.

    The whole batch is a function of the step alone: every number of ranks sees the same samples.
    """
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(VOCABULARY, (GLOBAL_BATCH, 1), generator=generator)
    return ((starts + 7 * torch.arange(LENGTH)) % VOCABULARY)[rank::world]


class Log:
    """Write one JSON line per step, on rank 0; ``float.hex`` keeps every bit."""

    def __init__(self, path: Path) -> None:
        self._path = path if int(os.environ.get("RANK", "0")) == 0 else None

    def step(self, step: int, loss: float, grad_norm: float | None = None) -> None:
        """Log a finished step, with the loss over all ranks.

        Args:
            step: number of steps done, including this one and those before the checkpoint.
        """
        line: dict[str, Any] = {"step": step, "loss": loss, "loss_hex": loss.hex()}
        if grad_norm is not None:
            line |= {"grad_norm": grad_norm, "grad_norm_hex": grad_norm.hex()}
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
