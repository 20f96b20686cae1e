"""Engines of DeepSpeed as OpenRLHF and TRL make them: train and save, load and train on.

OpenRLHF's strategy trains a critic with a value head, or LoRA. The same LoRA, and a value head over
LoRA as TRL has it, are also trained with DeepSpeed, transformers and PEFT alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from tests.judges import deepspeed_state, deepspeed_train, deepspeed_worker, programs, ranks
from tests.judges.library_stubs import stand_in
from tests.judges.models import llama_config

PROGRAM = "openrlhf"
STUBS = (
    "bitsandbytes",
    "datasets",
    "flash_attn",
    "loralib",
    "optimum",
    "pylatexenc",
    "ray",
    "torchdata",
    "vllm",
)
STEPS, BATCH, WORDS = 3, 4, 64
LORA = {"lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}


class Headed(torch.nn.Module):
    """TRL's model with a value head: its state dict leaves out a model of PEFT (0.24)."""

    def __init__(self, pretrained_model: Any) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model
        self.v_head = torch.nn.Linear(pretrained_model.config.hidden_size, 1)

    def forward(self, **given: Any) -> torch.Tensor:
        """Return the loss of the values."""
        found = self.pretrained_model(**given, output_hidden_states=True)
        return self.v_head(found.hidden_states[-1]).square().mean()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the value head alone."""
        state = self.v_head.state_dict(*args, **kwargs)
        return {f"v_head.{name}": value for name, value in state.items()}


def _make_engine(told: dict[str, Any], base: str, world: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "zero_optimization": {"stage": told["stage"]},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    _init = HfDeepSpeedConfig(config)  # from_pretrained cuts the model while it lives
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=2, **LORA))
    model = Headed(model) if told["role"] == "headed" else model
    trained = [each for each in model.parameters() if each.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def _make_strategy(stage: int, world: int) -> Any:
    from openrlhf.utils.deepspeed import deepspeed as module

    args = SimpleNamespace(
        local_rank=-1,
        ds=SimpleNamespace(param_dtype="bf16", zero_stage=stage, tensor_parallel_size=1),
        train=SimpleNamespace(dynamic_batch_enable=False),
    )
    size = {"micro_train_batch_size": BATCH // world, "train_batch_size": BATCH}
    strategy = module.DeepspeedStrategy(zero_stage=stage, max_norm=1.0, args=args, **size)
    own, mesh = strategy.get_ds_train_config, module.init_device_mesh

    def configure(**given: Any) -> dict[str, Any]:
        config: dict[str, Any] = own(**given)
        config.get("optimizer", {"params": {}})["params"]["torch_adam"] = (
            True  # not DeepSpeed's own
        )
        return config

    strategy.get_ds_train_config = configure
    with (
        mock.patch.object(
            module, "init_device_mesh", lambda _, *at, **how: mesh("cpu", *at, **how)
        ),
        mock.patch.object(torch.cuda, "set_device"),
    ):
        strategy.setup_distributed()
    return strategy


def _prepare(strategy: Any, told: dict[str, Any], base: str) -> Any:
    from openrlhf.models import actor, get_llm_for_sequence_regression

    actor._patch_zero3_weight_mapping = lambda: None  # for transformers 5.15
    how = {
        "attn_implementation": "eager",
        "param_dtype": "bf16",
        "ds_config": strategy.get_ds_train_config(),
    }
    if told["role"] == "critic":
        model = get_llm_for_sequence_regression(base, "critic", init_value_head=True, **how)
    else:
        model = actor.Actor(base, lora_rank=2, **LORA, **how)
    adam = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    chosen = {"optim": "adam", "adam": adam, "scheduler_steps": 20, "lr_warmup_ratio": 0.1}
    prepared = strategy.prepare((model, chosen))[0]
    return prepared if told["role"] == "critic" else prepared.model


def work(job: ranks.Job, rank: int) -> None:
    """Train and save, or resume; rank 0 writes losses, and the state at the save."""
    told, base = job.told, str(job.out / f"base{rank}")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(WORDS)).save_pretrained(base)
    ranks.join_group(job, rank)
    deepspeed_train.start_rank()
    torch.cuda.synchronize = lambda *_: None
    resumed, is_own = told.get("resume"), bool(told["program"])
    strategy = _make_strategy(told["stage"], job.world) if is_own else None
    engine = _prepare(strategy, told, base) if is_own else _make_engine(told, base, job.world)
    found: dict[str, Any] = {"losses": []}
    if resumed and strategy:
        found["client"] = strategy.load_ckpt(engine, str(resumed))[1]["consumed_samples"]
    elif resumed:
        engine.load_checkpoint(str(resumed), load_module_strict=told["role"] != "headed")
    for step in range(STEPS if resumed else 0, 2 * STEPS):
        if step == STEPS:
            state = deepspeed_state.snapshot_once(engine, ("exp_avg", "exp_avg_sq"))
            found |= {"masters": state.params, **state.slots}
            if strategy and not resumed:
                client = {"consumed_samples": STEPS * BATCH}
                place = {"save_dir": str(job.out / "run"), "tag": f"global_step{step}"}
                strategy.save_ckpt(engine, **place, client_state=client)
            elif not resumed:
                engine.save_checkpoint(str(job.out / "run"))
        rows = torch.randint(WORDS, (BATCH, 8), generator=torch.Generator().manual_seed(step))
        own = rows.chunk(job.world)[rank]
        mask = torch.ones_like(own)
        if told["role"] == "critic":
            loss = (engine(own, mask[:, 1:], mask).float() - own[:, 1:] / WORDS).square().mean()
        else:
            loss = engine(input_ids=own, attention_mask=mask, labels=own)
            loss = loss if told["role"] == "headed" else loss.loss
        engine.backward(loss)
        engine.step()
        found["losses"].append(ranks.mean_over_ranks(loss, job.world))
    if rank == 0:
        torch.save(found, job.result)


def preload(jobs: list[ranks.Job]) -> dict[str, str]:
    """Import everything once. Return case -> why it cannot be made here."""
    deepspeed_worker.preload([])
    own, place = [job for job in jobs if job.told["program"]], programs.FOLDER / PROGRAM
    if not place.is_dir():
        return {job.case: f"{place} is missing: run ./dev install" for job in own}
    programs.enter(PROGRAM)
    with stand_in(STUBS):
        ranks.import_all(["openrlhf.utils.deepspeed.deepspeed"])
    return {}


if __name__ == "__main__":
    ranks.serve(work, preload)
