"""Runs of the transformers Trainer, with DeepSpeed or without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class Rows(Dataset[dict[str, Tensor]]):
    """Fixed samples with themselves as labels, in order."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        """Return the number of samples of all steps."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample."""
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def arguments(out: Path, steps: int, **settings: Any) -> TrainingArguments:
    """Return arguments that log every loss; DeepSpeed needs them before the model exists."""
    return TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )


def train(model: nn.Module, args: TrainingArguments, rows: Tensor) -> Trainer:
    """Return the Trainer after its run."""
    trainer = prepared(model, args, rows)
    trainer.train()
    return trainer


def prepared(
    model: nn.Module,
    args: TrainingArguments,
    rows: Tensor,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """Return the Trainer before its run."""
    return Trainer(model=model, args=args, train_dataset=Rows(rows), callbacks=list(callbacks))
