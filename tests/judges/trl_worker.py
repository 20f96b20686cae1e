"""TRL's trainers over DeepSpeed: train and save, load and train on.

`train_...` are jobs for `worlds.run_in_turn`, in a process that called `enter`.
"""

from __future__ import annotations

import os

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.judges import hf_trainer, programs
from tests.judges.library_stubs import stand_in

PROGRAM = "trl"
MISSING = ("datasets", "pandas", "pyarrow")
STEPS, BATCH, WORDS = 2, 6, 16


def enter():
    """Import TRL and DeepSpeed once."""
    import deepspeed.runtime.zero.stage3
    import transformers.trainer

    os.environ["CI"] = "true"  # or it sends telemetry
    programs.enter(PROGRAM)
    with stand_in(MISSING):
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.reward_trainer import RewardTrainer
        from trl.trainer.sft_trainer import SFTTrainer

    for kind in (SFTTrainer, RewardTrainer, GRPOTrainer):
        kind.create_model_card = lambda *_args, **_options: None  # it states datasets' version
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    transformers.trainer.is_datasets_available = lambda: False


def train_sft(group, out, resumed=None):
    """Return the losses after step 2, whose checkpoint is in the directory ``out``."""
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import Dataset, SFTTrainer

    class Rows(hf_trainer.Rows, Dataset):
        column_names = ("input_ids", "labels")

    settings = _settings(SFTConfig, group, out, dataset_kwargs={"skip_prepare_dataset": True})
    rows = {"train_dataset": Rows(_tokens())}
    trainer = SFTTrainer(_model(LlamaForCausalLM), settings, processing_class=_tokenizer(), **rows)
    return _losses(trainer, resumed)


def train_reward(group, out, resumed=None):
    """Train a LoRA of a model that scores, with pairs of samples; the base is not saved."""
    from peft import LoraConfig, TaskType
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import Dataset, RewardTrainer

    class Pairs(hf_trainer.Rows, Dataset):
        column_names = ("chosen_ids", "rejected_ids")

        def __getitem__(self, index):
            chosen, rejected = self.rows[index].chunk(2)
            return {"chosen_ids": chosen, "rejected_ids": rejected}

    settings = _settings(RewardConfig, group, out, max_length=None)
    model = _model(LlamaForSequenceClassification, num_labels=1)
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["q_proj", "v_proj"])
    rows = {"train_dataset": Pairs(_tokens())}
    trainer = RewardTrainer(
        model, settings, processing_class=_tokenizer(), peft_config=lora, **rows
    )
    return _losses(trainer, resumed)


def train_grpo(group, out, resumed=None):
    """Train with rewards of what the model generates, drawn as on one rank.

    Return norms of gradients: the loss, before an update, does not depend on the weights.
    """
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import Dataset, GRPOTrainer

    class Prompts(hf_trainer.Rows, Dataset):
        column_names = ("prompt",)

        def __getitem__(self, index):
            return {"prompt": " ".join(f"w{token or 1}" for token in self.rows[index].tolist())}

    def draw(chances, num_samples):
        assert num_samples == 1
        noise = torch.rand(BATCH, WORDS, generator=torch.Generator().manual_seed(2))
        return (chances / -noise.chunk(group.world)[group.rank].log()).argmax(-1, keepdim=True)

    def count_low(completion_ids, **_others):
        return [float(sum(token < WORDS // 2 for token in tokens)) for tokens in completion_ids]

    torch.multinomial = draw
    lengths = {"num_generations": 3, "max_completion_length": 4}
    settings = _settings(GRPOConfig, group, out, shuffle_dataset=False, **lengths)
    rows = {"train_dataset": Prompts(_tokens())}
    model, tokenizer = _model(LlamaForCausalLM), _tokenizer()
    trainer = GRPOTrainer(model, count_low, settings, processing_class=tokenizer, **rows)
    return _losses(trainer, resumed, "grad_norm")


def _settings(kind, group, out, **more):
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")  # accelerate looks for another one beside DeepSpeed
    return kind(
        output_dir=str(out),
        max_steps=2 * STEPS,
        save_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        per_device_train_batch_size=BATCH // group.world,
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        accelerator_config={"use_configured_state": True},
        deepspeed={
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
        },
        **more,
    )


def _model(kind, **more):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return kind(LlamaConfig(vocab_size=WORDS, **sizes, **heads, **more))


def _tokens():
    return torch.randint(WORDS, (2 * STEPS * BATCH, 8), generator=torch.Generator().manual_seed(1))


def _losses(trainer, resumed, key="loss"):
    trainer.train(resume_from_checkpoint=resumed and str(resumed))
    return [entry[key] for entry in trainer.state.log_history if key in entry][-STEPS:]


def _tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<eos>": 0, **{f"w{number}": number for number in range(1, WORDS)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
