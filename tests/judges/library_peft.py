"""LoRA checkpoints: of one process, of DeepSpeed's ZeRO 3, and of FSDP 2.

Beside each of the sharded ones lie ``base``, the model without adapters, and ``saved``, what PEFT
itself makes of the gathered values, with the logits of the live one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft import (
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from torch import nn

from tests.judges import hf_trainer, library_state, library_trainer
from tests.judges import library_models as models
from tests.judges.library_cpu import pass_for_gpus

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftModel
    from torch import Tensor

    from tests.judges.library_cases import Case

STEPS = 2
_CAUSAL = {"task_type": "CAUSAL_LM"}
CONFIGS = {
    "single": {"default": {"r": 3, "target_modules": ["q_proj", "v_proj"]}},
    "zero3": {
        "default": {
            "r": 3,
            "rank_pattern": {"layers.0.self_attn.q_proj": 2},
            "target_modules": ["q_proj", "v_proj"],
            "modules_to_save": ["lm_head"],
            "use_dora": True,
        }
    },
    "fsdp2": {
        "default": {
            "r": 4,
            "target_modules": ["q_proj", "embed_tokens"],
            "bias": "lora_only",
            "use_rslora": True,
        },
        "other": {"r": 2, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    },
}
"""Kind of run -> name of an adapter -> its configuration."""
METHODS = {
    "ia3": IA3Config(
        target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], **_CAUSAL
    ),
    "vera": VeraConfig(r=4, target_modules=["q_proj", "o_proj"], **_CAUSAL),
    "prefix": PrefixTuningConfig(num_virtual_tokens=5, **_CAUSAL),
}
"""Adapters other than LoRA, each trained by itself after the two of "fsdp2"."""


def make(case: Case, ckpt: Path) -> library_state.State:
    """Train two steps or four, and return the live state."""
    return {"single": _single, "zero3": _zero3, "fsdp2": _fsdp2}[case.how["kind"]](case, ckpt)


def _adapted(case: Case, ckpt: Path, model: nn.Module) -> PeftModel:
    """Return the model with its adapters; ``lora_B`` begins at zero, as everywhere."""
    if dist.is_initialized() and dist.get_rank() == 0:
        model.save_pretrained(ckpt.parent / "base")
    (first, config), *others = CONFIGS[case.how["kind"]].items()
    torch.manual_seed(5)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config), first)
    for name, each in others:
        adapted.add_adapter(name, LoraConfig(task_type="CAUSAL_LM", **each))
    return adapted


def _single(case: Case, ckpt: Path) -> library_state.State:
    """Return the adapters under PEFT's names in files; live names contain ``.default``."""
    model = _adapted(case, ckpt, models.build(case.factory))
    trainer = library_trainer.train(case, model, ckpt)
    found = library_trainer.tell(trainer, model, model)
    adapters = get_peft_model_state_dict(model)
    short = {name: name.replace(".default.", ".") for name in found["optimizer"]}
    if set(short.values()) != set(adapters):
        raise AssertionError("the optimizer does not hold the adapters alone")
    groups = [{**g, "params": [short[name] for name in g["params"]]} for g in found["groups"]]
    return {
        **found,
        "params": {name: library_state.whole(value) for name, value in adapters.items()},
        "buffers": {},
        "tied": {},
        "frozen": [],
        "optimizer": {short[name]: slots for name, slots in found["optimizer"].items()},
        "steps": {short[name]: step for name, step in found["steps"].items()},
        "groups": groups,
    }


def _zero3(case: Case, ckpt: Path) -> library_state.State:
    """Save a Trainer's run under ZeRO 3, which cuts every parameter; return the live state.

    ``hollow`` is the result of a script that itself calls ``save_pretrained`` on the partitions.
    """
    import deepspeed

    from tests.judges import deepspeed_train, deepspeed_trainers

    deepspeed_train.leave_out_shared_memory()
    deepspeed_train.start_rank()
    deepspeed_trainers.configure_accelerate()
    arguments = hf_trainer.arguments(
        ckpt,
        STEPS,
        accelerator_config={"use_configured_state": True},
        deepspeed={
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8},
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
            },
            "train_micro_batch_size_per_gpu": "auto",
        },
        fp16=True,
        save_steps=STEPS,
        learning_rate=1e-2,
        per_device_train_batch_size=models.BATCH // case.world,
    )
    model = _adapted(case, ckpt, models.build(case.factory))
    trainer = hf_trainer.train(model, arguments, models.tokens(STEPS * models.BATCH))
    adapted = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    adapted.save_pretrained(ckpt / "hollow", is_main_process=dist.get_rank() == 0)
    logits = _logits(trainer.model_wrapped)
    with deepspeed.zero.GatheredParameters(list(adapted.parameters())):
        state = {name: library_state.whole(value) for name, value in adapted.state_dict().items()}
    return _saved(adapted, state, ckpt, {"default": logits})


def _fsdp2(case: Case, ckpt: Path) -> library_state.State:
    """Save two adapters with Accelerate's ``save_state``, and the active one as Trainer does."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model

    pass_for_gpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = _adapted(case, ckpt, models.build(case.factory))
    names = list(CONFIGS["fsdp2"])
    for name in names:
        model.set_requires_grad(name, requires_grad=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    rows = models.tokens(STEPS * models.BATCH)
    for step in range(STEPS):
        batch = rows[step * models.BATCH :][dist.get_rank() : models.BATCH : case.world]
        for name in names:
            model.set_adapter(name)
            for each in names:
                model.set_requires_grad(each, requires_grad=True)
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(ckpt / "whole"))
    (ckpt / "alone").mkdir(exist_ok=True)
    logits = {}
    for name in names:
        model.set_adapter(name)
        logits[name] = _logits(model)
    save_fsdp_model(plugin, accelerator, model, str(ckpt / "alone"), adapter_only=True)
    state = {name: library_state.whole(value) for name, value in model.state_dict().items()}
    for name, config in METHODS.items():
        _train_method(accelerator, case, config, ckpt / name, ckpt.parent / "methods" / name)
    return _saved(model, state, ckpt, logits)


def _train_method(accelerator: Any, case: Case, config: Any, ckpt: Path, saved: Path) -> None:
    """Train a step with an adapter of another method, and save its shards and PEFT's own files."""
    from accelerate.utils.fsdp_utils import save_fsdp_model

    torch.manual_seed(5)
    model = get_peft_model(models.build(case.factory), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    rows = models.tokens(models.BATCH)
    accelerator.backward(model(input_ids=rows, labels=rows).loss)
    optimizer.step()
    ckpt.mkdir(exist_ok=True)
    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(ckpt))
    state = {name: library_state.whole(value) for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        gathered = get_peft_model(models.build(case.factory), config)
        gathered.load_state_dict(state)
        gathered.save_pretrained(saved)


def _logits(model: nn.Module) -> Tensor:
    """Return the logits of two fixed rows; every rank must call it."""
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=models.tokens(2)).logits
    return found.clone()


def _saved(model: Any, state: dict[str, Tensor], ckpt: Path, logits: dict[str, Tensor]) -> Any:
    """Save the gathered values with PEFT itself; return the logits."""
    if dist.get_rank() == 0:
        model.save_pretrained(
            ckpt.parent / "saved", state_dict=state, selected_adapters=list(logits)
        )
    return {"logits": logits}
