"""The worker of real Trainers that start, save and resume: new ranks for every job.

Each but ``exact`` has dropout, so that its next losses tell whether the random states were resumed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)

import reshard.transformers
from tests.judges import hf_trainer, library_state, ranks
from tests.judges.library_cpu import pass_for_gpus
from tests.judges.models import llama_config

if TYPE_CHECKING:
    from transformers import Trainer

VOCABULARY, SEQUENCE = 96, 8
BATCH = 4  # of all ranks together
STEPS, SAVED = 5, 3
PRELOADED = (
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.stage3",
    "transformers.trainer",
    "transformers.integrations.deepspeed",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "torch._inductor.config",
)
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}


class Tell(TrainerCallback):
    """Keeps what the Trainer's objects hold when it has resumed, and when it saves."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.trainer: Trainer | None = None
        self.held: dict[str, Any] = {}
        self.samples: list[list[list[int]]] = []
        self._rows: list[list[int]] = []

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_rest: Any) -> None:
        """Record the state after a resume."""
        if state.global_step:
            self._look()

    def on_save(self, _args: Any, state: Any, _control: Any, **_rest: Any) -> None:
        """Record the state at the step that the others resume from."""
        if state.global_step == SAVED and not self.held:
            self._look()

    def on_step_end(self, _args: Any, state: Any, control: Any, **_rest: Any) -> Any:
        """Keep the Trainer from saving at the end of the run, too."""
        control.should_save = state.global_step == SAVED
        self.samples.append(self._rows)
        self._rows = []
        return control

    def gather_samples(self, world: int) -> list[list[list[int]]]:
        """Return the samples of all ranks in each step of this run."""
        of_ranks: list[Any] = [self.samples]
        if world > 1:
            of_ranks = [None] * world
            torch.distributed.all_gather_object(of_ranks, self.samples)
        return [
            sorted(row for rows in step for row in rows) for step in zip(*of_ranks, strict=True)
        ]

    def watch(self, trainer: Trainer) -> None:
        """Record the samples that a Trainer's model is given."""
        self.trainer = trainer
        trainer.model.register_forward_pre_hook(
            lambda _model, _args, given: self._rows.extend(given["input_ids"].tolist()),
            with_kwargs=True,
        )

    def _look(self) -> None:
        trainer = self.trainer
        assert trainer is not None
        if trainer.is_deepspeed_enabled:
            self.held = of_engine(trainer.model_wrapped)
            return
        fresh = model(self.family)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self.held = library_state.read_state(
            fresh, trainer.model_wrapped, optimizer, trainer.lr_scheduler, trainer.state.global_step
        )


def of_engine(engine: Any) -> library_state.State:
    """Return masters and moments of a DeepSpeed engine, and its step."""
    from tests.judges.deepspeed_state import snapshot

    found = snapshot(engine, ("exp_avg", "exp_avg_sq"))
    names = list(found.params)
    return {
        "params": found.params,
        "optimizer": {n: {slot: found.slots[slot][n] for slot in found.slots} for n in names},
        "steps": found.steps,
        "step": engine.global_steps,
    }


def model(family: str = "llama") -> PreTrainedModel:
    """Build a model whose loss depends on the random states, which are left unchanged."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return FAMILIES[family]()


def _llama() -> PreTrainedModel:
    config = llama_config(VOCABULARY)
    config.attention_dropout = 0.2
    return LlamaForCausalLM(config)


def _experts(**settings: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "attention_dropout": 0.2,
        "use_cache": False,
        **settings,
    }


def _qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_experts(num_experts=4, moe_intermediate_size=24)))


def _mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**_experts(num_local_experts=4)))


def _lora(adapter: str = "default", base: PreTrainedModel | None = None, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.2, **settings)
    adapted = get_peft_model(base or _llama(), config, adapter_name=adapter)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero at first: a run that lost it would look the same
                parameter.normal_(std=0.02)
    return adapted


def resized() -> PreTrainedModel:
    """Build a model that uses its embedding as its head, with rows for more tokens."""
    model = LlamaForCausalLM(llama_config(VOCABULARY, tied=True))
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    return model


def _lora_resized() -> PreTrainedModel:
    saved = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    return _lora(base=resized(), **saved)


def mamba() -> PreTrainedModel:
    """Build a model whose decayed vectors (``D``) have the shape of its biases."""
    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        state_size=4,
        time_step_rank=4,
        use_cache=False,
    )
    return MambaForCausalLM(config)


def frozen_mamba() -> PreTrainedModel:
    """Build a model whose first block is frozen."""
    model = mamba()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".layers.0." not in name
    return model


FAMILIES = {
    "exact": lambda: LlamaForCausalLM(llama_config(VOCABULARY)),
    "frozen mamba": frozen_mamba,
    "llama": _llama,
    "lora": _lora,
    "lora of resized embeddings": _lora_resized,
    "lora of a name": lambda: _lora("polite", modules_to_save=["lm_head"]),
    "mamba": mamba,
    "lora and embeddings": lambda: _lora(modules_to_save=["embed_tokens", "lm_head"]),
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
LAYERS = {"mixtral": "MixtralDecoderLayer", "qwen3_moe": "Qwen3MoeDecoderLayer"}


def settings(job: ranks.Job) -> dict[str, Any]:
    """Return arguments of the way in which the job trains."""
    kind = job.told["kind"]
    if kind == "deepspeed":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        from accelerate import PartialState

        assert PartialState(backend="gloo").num_processes == job.world
        config = {**DEEPSPEED, "zero_optimization": {"stage": job.told["stage"]}}
        if job.told.get("scheduler") == "trainer":  # not DeepSpeed's: the Trainer makes its own
            del config["scheduler"]
        if job.told.get("optimizer") == "trainer":
            del config["optimizer"]
        return {"deepspeed": config, "accelerator_config": {"use_configured_state": True}}
    if kind.startswith("fsdp"):
        pass_for_gpus()
        return {
            "fsdp": True,
            "fsdp_config": {
                "version": int(kind.removeprefix("fsdp")),
                "use_orig_params": True,
                "sync_module_states": False,
                "state_dict_type": job.told["type"],
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": [
                    LAYERS.get(job.told.get("family", "llama"), "LlamaDecoderLayer")
                ],
            },
            "accelerator_config": {"use_configured_state": True},
        }
    return {"use_cpu": True, **({"ddp_backend": "gloo"} if job.world > 1 else {})}


def work(job: ranks.Job, rank: int) -> None:
    """Train to the end, from the beginning or from a checkpoint; rank 0 writes what it saw."""
    if job.world > 1 or job.told["kind"] == "deepspeed":
        ranks.join_group(job, rank)
    else:
        torch.set_num_threads(1)
    if job.told["kind"] == "deepspeed":
        from tests.judges.deepspeed_train import start_rank

        start_rank()
    chosen = hf_trainer.arguments(
        job.out / "run",
        STEPS,
        save_steps=SAVED,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=2,
        optim=job.told.get("optim", "adamw_torch"),
        **{"per_device_train_batch_size": BATCH // job.world, **job.told.get("arguments", {})},
        **settings(job),
    )
    chance = torch.Generator().manual_seed(11)
    count = STEPS * job.told.get("global_batch", BATCH)
    rows = torch.randint(0, VOCABULARY, (count, SEQUENCE), generator=chance)
    family = job.told.get("family", "llama")
    tell = Tell(family)
    trainer = hf_trainer.prepared(model(family), chosen, rows, [tell])
    tell.watch(trainer)
    resume, live = job.told.get("resume"), job.told.get("live")
    warnings = ranks.record_warnings()
    if live is None:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    else:
        with reshard.transformers.open_checkpoint(trainer, resume, **live) as checkpoint:
            trainer.train(resume_from_checkpoint=checkpoint)
    entries = trainer.state.log_history
    logged = {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}
    samples = tell.gather_samples(job.world)[SAVED - STEPS :]
    if rank == 0:
        losses = [logged[step] for step in range(SAVED + 1, STEPS + 1)]
        found = {"losses": losses, "samples": samples, "warnings": warnings}
        torch.save(tell.held | found, job.result)


if __name__ == "__main__":
    ranks.serve(work, PRELOADED)
