"""The Trainer of transformers 4.40 over DeepSpeed 0.16: train and save, or load and train on."""

from __future__ import annotations

import os
import sys

from tests.judges import programs, ranks

PROGRAM, DEEPSPEED = "transformers-4.40.2", "deepspeed-0.16.0"
PRELOADED = (
    "deepspeed.runtime.zero.stage3",
    "transformers.integrations.deepspeed",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)
STEPS, BATCH, WORDS = 2, 6, 16


def work(job: ranks.Job, rank: int) -> None:
    """Save the losses after step 2; the checkpoint of this step is in ``run``."""
    import torch
    from accelerate import PartialState
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.judges import hf_trainer

    ranks.join_group(job, rank)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")  # accelerate looks for another one beside DeepSpeed
    settings = hf_trainer.arguments(
        job.out / "run",
        2 * STEPS,
        save_steps=STEPS,
        learning_rate=1e-2,
        per_device_train_batch_size=BATCH // job.world,
        deepspeed={
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
        },
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads))
    rows = torch.randint(WORDS, (2 * STEPS * BATCH, 8), generator=torch.Generator().manual_seed(1))
    trainer = hf_trainer.prepared(model, settings, rows)
    trainer.train(resume_from_checkpoint=job.told.get("resume"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if rank == 0:
        torch.save(losses[-STEPS:], job.result)


def preload(_jobs: list[ranks.Job]) -> dict[str, str]:
    """Import the older libraries once, in the place of those that are installed."""
    sys.path[:0] = [str(programs.FOLDER / name) for name in (PROGRAM, DEEPSPEED)]
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # its random states are numpy's
    import transformers.utils.import_utils

    transformers.utils.import_utils._peft_available = False  # PEFT needs a later accelerate
    ranks.import_all(PRELOADED)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return {}


if __name__ == "__main__":
    ranks.serve(work, preload)
