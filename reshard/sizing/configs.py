"""Configuration files and commands for a chosen strategy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from shlex import quote
from typing import Any

from reshard.errors import UsageError
from reshard.sizing.model import ModelSizes
from reshard.sizing.setup import Cluster, Training, count_accumulation
from reshard.sizing.strategies import BUCKET_ELEMENTS, LIVE_ELEMENTS
from reshard.sizing.strategy_choice import Choice
from reshard.system.paths import as_path

SUFFIXES = (".json", ".yaml", ".yml", ".sh")


def format_config(
    suffix: str,
    choice: Choice,
    model: ModelSizes,
    cluster: Cluster,
    training: Training,
    *,
    optimizer: Mapping[str, Any] | None,
    resume: str,
) -> str:
    """Return the text of a file for the chosen strategy; its suffix says for which program.

    ``.json``: a ds_config.json of DeepSpeed, or the arguments of HF Trainer for FSDP; ``.yaml``:
    the configuration of ``accelerate launch``; ``.sh``: the command of ``python -m trainer``.

    Args:
        suffix: one of `SUFFIXES`.
        optimizer: hyperparameters of the run that is continued, for DeepSpeed.
        resume: the run that the trainer continues.
    """
    if suffix == ".json":
        if choice.row.strategy.framework == "deepspeed":
            content = build_deepspeed(choice, cluster, training, optimizer)
        else:
            content = build_trainer_arguments(choice, model, cluster, training)
        return json.dumps(content, indent=2) + "\n"
    if suffix in (".yaml", ".yml"):
        return format_yaml(build_accelerate(choice, model, cluster, training))
    return format_command(choice, model, cluster, training, resume=resume)


def build_deepspeed(
    choice: Choice,
    cluster: Cluster,
    training: Training,
    optimizer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a configuration that ``deepspeed.initialize`` accepts."""
    _refuse_grid(training, "a ds_config.json", allows_ep=True)
    strategy = choice.row.strategy
    zero: dict[str, Any] = {
        "stage": strategy.stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
    }
    if strategy.stage == 3:
        zero |= {
            "stage3_max_live_parameters": LIVE_ELEMENTS,
            "stage3_max_reuse_distance": LIVE_ELEMENTS,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if strategy.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if strategy.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": count_accumulation(cluster, training),
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
    if training.precision != "fp32":
        config[training.precision] = {"enabled": True}
    if optimizer:
        config["optimizer"] = {"type": "AdamW", "params": dict(optimizer)}
    return config


def build_trainer_arguments(
    choice: Choice, model: ModelSizes, cluster: Cluster, training: Training
) -> dict[str, Any]:
    """Return arguments of transformers' TrainingArguments for DDP or FSDP."""
    _refuse_grid(training, "HF Trainer's arguments")
    strategy = choice.row.strategy
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": training.micro_batch,
        "gradient_accumulation_steps": count_accumulation(cluster, training),
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
    }
    if strategy.stage == 0:
        return arguments | ({"gradient_checkpointing": True} if choice.checkpointing else {})
    sharding = "hybrid_shard" if strategy.within_node else "full_shard"
    settings: dict[str, Any] = {
        "version": 1 if strategy.within_node else 2,
        "activation_checkpointing": choice.checkpointing,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    if model.block_class:
        settings["transformer_layer_cls_to_wrap"] = [model.block_class]
    return {**arguments, "fsdp": f"{sharding} auto_wrap", "fsdp_config": settings}


def build_accelerate(
    choice: Choice, model: ModelSizes, cluster: Cluster, training: Training
) -> dict[str, Any]:
    """Return the configuration of ``accelerate launch``."""
    _refuse_grid(training, "an accelerate configuration")
    strategy = choice.row.strategy
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no" if training.precision == "fp32" else training.precision,
        "num_machines": cluster.nodes,
        "num_processes": cluster.world,
        "use_cpu": False,
    }
    if strategy.framework == "deepspeed":
        section = {
            "deepspeed_multinode_launcher": "standard",
            "gradient_accumulation_steps": count_accumulation(cluster, training),
            "gradient_clipping": 1.0,
            "offload_optimizer_device": "cpu" if strategy.offload_optimizer else "none",
            "offload_param_device": "cpu" if strategy.offload_param else "none",
            "zero3_init_flag": strategy.stage == 3,
            "zero3_save_16bit_model": strategy.stage == 3,
            "zero_stage": strategy.stage,
        }
        return {**config, "distributed_type": "DEEPSPEED", "deepspeed_config": section}
    if strategy.stage == 0:
        return {**config, "distributed_type": "MULTI_GPU" if cluster.world > 1 else "NO"}
    section = {
        "fsdp_activation_checkpointing": choice.checkpointing,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 1 if strategy.within_node else 2,
    }
    if strategy.within_node:
        section["fsdp_sharding_strategy"] = "HYBRID_SHARD"
        section["fsdp_sync_module_states"] = True  # cpu_ram_efficient_loading needs it
    else:
        section["fsdp_reshard_after_forward"] = True
    if model.block_class:
        section["fsdp_transformer_layer_cls_to_wrap"] = model.block_class
    return {**config, "distributed_type": "FSDP", "fsdp_config": section}


def format_yaml(document: Mapping[str, Any], indent: str = "") -> str:
    """Return YAML of nested mappings of plain words, numbers and booleans."""
    lines = []
    for key, value in document.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{format_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")  # JSON's values are YAML's
    return "".join(lines)


def format_command(
    choice: Choice, model: ModelSizes, cluster: Cluster, training: Training, *, resume: str
) -> str:
    """Return the command that starts ``python -m trainer``.

    Raises:
        UsageError: the trainer does not support this grid or this fine-tuning, or cannot build the
            model.
    """
    strategy = choice.row.strategy
    if not resume and not as_path(model.source).exists():
        raise UsageError(
            model.source,
            "is not a model that python -m trainer can build",
            "pass --model config.json, or write .json or .yaml",
        )
    if training.lora_rank:
        raise UsageError("--lora-rank", "is not supported by python -m trainer", "write .json")
    _refuse_grid(training, "a command of python -m trainer")
    name = "fsdp2" if strategy.stage == 3 and strategy.framework == "torch" else strategy.name
    flags = {
        "--strategy": name.partition("-")[0],
        "--precision": training.precision,
        "--seq-len": training.seq_len,
        "--micro-batch": training.micro_batch,
        "--global-batch": training.global_batch or None,
        "--model": None if model.source == resume else model.source,  # a run may state its model
        "--fsdp-sharding-strategy": "HYBRID_SHARD" if strategy.within_node else None,
        "--fsdp-hybrid-size": cluster.gpus if strategy.within_node else None,
        "--offload-optimizer": "cpu" if strategy.offload_optimizer else None,
        "--offload-param": "cpu" if strategy.offload_param else None,
        "--freeze": training.freeze or None,
        "--resume": resume or None,
    }
    words = [word for pair in flags.items() if pair[1] is not None for word in map(str, pair)]
    if choice.checkpointing:
        words.append("--activation-checkpointing")
    return f"{_format_launcher(cluster)} {' '.join(map(quote, words))}\n"


def _format_launcher(cluster: Cluster) -> str:
    if cluster.nodes == 1:
        return f"python -m trainer --nproc {cluster.world}"
    return (
        f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.gpus}"
        ' --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:29500" -m trainer'
    )


def _refuse_grid(training: Training, what: str, *, allows_ep: bool = False) -> None:
    for axis in ("tp", "pp", *(() if allows_ep else ("ep",))):
        if getattr(training, axis) > 1:
            raise UsageError(
                f"--{axis}", f"cannot be stated in {what}", f"leave out --write or --{axis}"
            )
