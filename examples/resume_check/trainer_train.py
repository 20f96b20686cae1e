"""A transformers Trainer script with DeepSpeed that `reshard resume-check` can run.

torchrun --nproc-per-node 2 trainer_train.py --steps 8 --save run --save-after 4 --losses log
reshard resume-check run/checkpoint-4 --world-size 1 --world-size 2 --unbroken log --control
    --command "torchrun --nproc-per-node {world_size} trainer_train.py --resume {checkpoint}
    --steps {steps} --losses {log} --zero-stage {zero_stage}"
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from common import GLOBAL_BATCH, LENGTH, VOCABULARY, Log, arguments, samples
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

ROWS = 64  # steps


class Samples(Dataset[dict[str, Tensor]]):
    """Hold the samples of all steps; each sample is its own label."""

    def __init__(self) -> None:
        self._rows = torch.cat([samples(step) for step in range(ROWS)])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class LogSteps(TrainerCallback):
    """Write the losses that the Trainer logs."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def on_log(self, _args: Any, state: Any, _control: Any, **told: Any) -> None:
        """Log a finished step; transformers 5 gives its loss unrounded, older ones do not."""
        logs = told["logs"]
        if "loss" in logs and state.is_world_process_zero:
            self._log.step(state.global_step, logs["loss"], logs.get("grad_norm"))


def main() -> None:
    """Train from the checkpoint, or from the start."""
    chosen = arguments()
    if not torch.cuda.is_available():  # what accelerate launch does, for the one backend of CPUs
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    done = 0
    if chosen.resume:
        done = json.loads(Path(chosen.resume, "trainer_state.json").read_text())["global_step"]
    settings = TrainingArguments(
        output_dir=chosen.save or str(chosen.losses.parent / "out"),
        max_steps=done + chosen.steps,
        save_strategy="steps" if chosen.save else "no",
        save_steps=chosen.save_after or 1,
        logging_steps=1,
        per_device_train_batch_size=GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": chosen.zero_stage},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        },
        accelerator_config={"use_configured_state": not torch.cuda.is_available()},
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=settings,
        train_dataset=Samples(),
        callbacks=[LogSteps(Log(chosen.losses))],
    )
    trainer.train(resume_from_checkpoint=chosen.resume)


if __name__ == "__main__":
    main()
