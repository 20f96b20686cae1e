"""Read a DeepSpeed ``ds_config.json``: what each field of DeepSpeed 0.19 means here.

Every field that DeepSpeed knows is a setting, or has no effect here (and is named in a note), or
is refused because it would change the training. ``auto`` becomes the value of a flag, else our
default. A field that is left out gets DeepSpeed's default, unless a flag sets it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.config.choices import Choice, Choices, make_contradiction
from trainer.config.rules import (
    OFF,
    Into,
    Only,
    Table,
    Walk,
    boolean,
    integer,
    into,
    number,
    one_of,
    positive,
    read_text,
    refused,
    section,
    text,
    without_effect,
)
from trainer.errors import SettingsError
from trainer.settings import ZERO


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("two numbers")
    return number(value[0]), number(value[1])


def _optimizer(value: Any) -> str:
    """Return the name in lower case, as DeepSpeed compares the names of its own optimizers."""
    if not isinstance(value, str) or value.lower() not in ("adam", "adamw"):
        raise ValueError('"Adam" or "AdamW", the only supported optimizers')
    return value.lower()


_WARMUP = {"warmup_num_steps", "warmup_type", "last_batch_iteration"}
_SCHEDULE_FIELDS = {
    "WarmupLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr"},
    "WarmupDecayLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr", "total_num_steps"},
    "WarmupCosineLR": _WARMUP | {"warmup_min_ratio", "cos_min_ratio", "total_num_steps"},
}
_DTYPE = one_of(
    {
        **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
        **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
        **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    }
)
_STAGE = one_of(dict(enumerate(ZERO)))
DEVICE = one_of(("none", "cpu", "nvme"))
_TRUE_OR_UNSET = (True, None, "auto")
_16_BIT_STATE = "masters and moments are always fp32 here"
_QUANTIZED = "quantization is not supported"
_REMOVED = "DeepSpeed removed the field, and it would change the training"
_PARALLEL = "only data parallelism is supported"

_OFFLOAD = without_effect("buffer_count pin_memory")

_ZERO_OPTIMIZATION: Table = {
    "stage": into("strategy", _STAGE),
    "reduce_bucket_size": into("reduce_bucket_size", positive),
    "sub_group_size": into("sub_group_size", integer),
    **dict.fromkeys(
        ("stage3_param_persistence_threshold", "param_persistence_threshold"),
        into("persistence_threshold", integer),
    ),
    **dict.fromkeys(
        (
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",  # deprecated
        ),
        into("save_16bit_model", boolean),
    ),
    "offload_optimizer": {
        "device": into("offload_optimizer", DEVICE),
        "nvme_path": into("nvme_path", text),
        **_OFFLOAD,
        **without_effect(
            "pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc"
        ),
    },
    "offload_param": {
        "device": into("offload_param", DEVICE),
        "nvme_path": into("nvme_path", text),
        **_OFFLOAD,
        **without_effect("buffer_size max_in_cpu"),
    },
    # Deprecated spellings of the two devices
    "cpu_offload": into("offload_optimizer", lambda on: "cpu" if boolean(on) else "none"),
    "cpu_offload_param": into("offload_param", lambda on: "cpu" if boolean(on) else "none"),
    "load_from_fp32_weights": Only("masters are always read in fp32", _TRUE_OR_UNSET),
    "zero_hpz_partition_size": Only("secondary partitions are not supported", (*OFF, 1)),
    **refused(
        _QUANTIZED,
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
    ),
    **refused("delayed updates are not supported", "zenflow"),
    **refused("old checkpoint layouts are not supported", "legacy_stage1 elastic_checkpoint"),
    **refused(_REMOVED, "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param"),
    **without_effect(
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions"
        " allgather_bucket_size overlap_comm compute_grad_norm cpu_offload_use_pin_memory"
        " prefetch_bucket_size stage3_prefetch_bucket_size"
        " model_persistence_threshold stage3_model_persistence_threshold"
        " max_live_parameters stage3_max_live_parameters"
        " max_reuse_distance stage3_max_reuse_distance"
        " module_granularity_threshold stage3_module_granularity_threshold"
        " use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params"
        " allgather_sequential stage3_allgather_sequential"
        " ignore_unused_parameters round_robin_gradients parameter_alignment"
        " memory_efficient_linear pipeline_loading_checkpoint override_module_apply"
        " log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory"
    ),
    "leaf_module": section("classes names name_suffixes"),
}

_BF16: Table = {
    "enabled": Into(boolean),
    **refused(_16_BIT_STATE, "bf16_master_weights_and_grads bf16_optimizer_states"),
    **without_effect("immediate_grad_update check_grad_overflow check_overflow"),
}

_FP16: Table = {
    "enabled": Into(boolean),
    "loss_scale": into("loss_scale", number),
    "initial_scale_power": into("initial_scale_power", integer),
    "loss_scale_window": into("loss_scale_window", positive),
    "hysteresis": into("hysteresis", positive),
    "min_loss_scale": into("min_loss_scale", number),
    **refused("hysteresis is reset only when the scale doubles", "consecutive_hysteresis"),
    **refused(_16_BIT_STATE, "fp16_master_weights_and_grads"),
    # It casts floating-point inputs, and the inputs here are token numbers.
    **without_effect("auto_cast"),
}

_OPTIMIZER: Table = {
    "type": Into(_optimizer),
    "params": {
        "lr": into("lr", number),
        "betas": into("beta1 beta2", _betas),
        "eps": into("eps", number),
        "weight_decay": into("weight_decay", number),
        **dict.fromkeys(("torch_adam", "adam_w_mode"), Into(boolean)),
        "bias_correction": Only("bias correction is always on", _TRUE_OR_UNSET),
        "fp32_optimizer_states": Only(_16_BIT_STATE, _TRUE_OR_UNSET),
        **refused("this variant of AdamW is not supported", "amsgrad maximize"),
        **refused("use gradient_clipping instead", "max_grad_norm"),
        **without_effect("foreach fused capturable differentiable set_grad_none"),
    },
    **without_effect("legacy_fusion"),
}

_SCHEDULER: Table = {
    "type": into("schedule", one_of(tuple(_SCHEDULE_FIELDS))),
    "params": {
        "warmup_min_lr": into("warmup_min_lr", number),
        "warmup_max_lr": into("lr", number),
        "warmup_num_steps": into("warmup_steps", positive),
        "warmup_type": into("warmup_type", one_of(("log", "linear"))),
        "total_num_steps": into("schedule_steps", positive),
        "warmup_min_ratio": into("warmup_min_ratio", number),
        "cos_min_ratio": into("cos_min_ratio", number),
        "last_batch_iteration": Only("the position comes from the checkpoint", (-1, None, "auto")),
    },
}

TABLE: Table = {
    "train_batch_size": into("global_batch", positive),
    "train_micro_batch_size_per_gpu": into("micro_batch", positive),
    "gradient_accumulation_steps": into("accumulation", positive),
    "gradient_clipping": into("clip", number),
    "wall_clock_breakdown": into("wall_clock_breakdown", boolean),
    "zero_optimization": _ZERO_OPTIMIZATION,
    "bf16": _BF16,
    "fp16": _FP16,
    "optimizer": _OPTIMIZER,
    "scheduler": _SCHEDULER,
    "data_types": {
        "grad_accum_dtype": into("grad_dtype", _DTYPE),
        "param_dtype": into("precision", _DTYPE),  # must repeat the precision in DeepSpeed
        **without_effect("buffer_dtype keep_in_fp32_modules"),
    },
    "checkpoint": {
        **refused("universal checkpoints are not supported", "load_universal"),
        **without_effect("tag_validation use_node_local_storage checkpoint_serialization"),
        "parallel_write": section("pipeline_stage"),
        "writer": section(
            "type decoupled io_buffer_size io_buffer_double show_statistics data_parallel"
            " io_multiplier"
        ),
    },
    # The section only prepares deepspeed.checkpointing.checkpoint, which a model must call itself;
    # neither DeepSpeed nor Transformers switches recomputation on by it.
    "activation_checkpointing": section(
        "partition_activations number_checkpoints contiguous_memory_optimization"
        " synchronize_checkpoint_boundary profile cpu_checkpointing"
    ),
    "aio": section(
        "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds"
    ),
    "tensorboard": section("enabled output_path job_name"),
    "wandb": section("enabled group team project"),
    "csv_monitor": section("enabled output_path job_name"),
    "comet": section(
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key"
        " online mode"
    ),
    "comms_logger": section("enabled prof_all prof_ops verbose debug"),
    "flops_profiler": section(
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"
    ),
    "timers": section("throughput"),
    "compile": section(
        "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation"
        " offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log"
        " offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather"
        " sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
    ),
    "hybrid_engine": section(
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters"
        " tp_gather_partition_size enable_cuda_graph"
    ),
    "tensor_parallel": {
        "autotp_size": Only(_PARALLEL, (*OFF, 1)),
        **without_effect(
            "dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend"
            " tensor_parallel tp injection_policy_tuple partition_config preset_model"
            " keep_module_on_host replace_with_kernel_inject kernel_inject"
        ),
    },
    "gradient_allreduce_op": Only("gradients are always averaged", (None, "mean", "MEAN", "auto")),
    "sequence_parallel_size": Only(_PARALLEL, (*OFF, 1)),
    **refused(_PARALLEL, "pipeline expert_parallel"),
    **refused("the seed determines the data order", "data_efficiency"),
    **refused("use fp16 or bf16: the whole model runs in one precision", "torch_autocast msamp"),
    **refused(_QUANTIZED, "weight_quantization"),
    **refused("a search for batch sizes is not supported", "autotuning"),
    **refused(
        _REMOVED,
        "amp compression_training quantize_training sparse_gradients eigenvalue sparse_attention"
        " elasticity graph_harvesting curriculum_learning progressive_layer_drop nebula",
    ),
    **without_effect(
        "steps_per_print dump_state disable_python_gc disable_allgather memory_breakdown log_level"
        " communication_data_type seq_parallel_communication_data_type prescale_gradients"
        " gradient_predivide_factor managed_gradient_accumulation dataloader_drop_last"
        " vocabulary_size zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
        " use_data_before_expert_parallelism datastates_ckpt allgather_size"
    ),
}


def read(file: Path, choices: Choices, *, ignore_unknown: bool = False) -> None:
    """Add the settings of ``file`` to ``choices``.

    Raises:
        SettingsError: the file cannot be read, has an unknown field, contradicts another source, or
            needs something that is not supported.
    """
    walk = Walk(file, choices, TABLE, ignore_unknown)
    document = _load(file)
    if not isinstance(document, dict):
        raise walk.wrong("the file", "an object of named fields", document)
    if isinstance(document.get("zero_optimization"), bool):  # deprecated
        document["zero_optimization"] = {"stage": int(document["zero_optimization"])}
    if "bfloat16" in document:  # deprecated
        document.setdefault("bf16", document.pop("bfloat16"))
    walk.fields(document, TABLE)
    for derive in (
        _derive_batches,
        _derive_precision,
        _derive_zero,
        _derive_adam,
        _derive_schedule,
    ):
        derive(document, walk)


def _derive_batches(document: dict[str, Any], walk: Walk) -> None:
    """Assume no accumulation if only the whole batch is given (runtime/config.py, 0.19.8)."""
    del document
    given = {name for name in _BATCHES if walk.choices.stated(name)}
    if given == {"global_batch"}:
        walk.choices.assume("accumulation", 1, f"train_batch_size alone in {walk.file.name}")


_BATCHES = ("global_batch", "micro_batch", "accumulation")


def _load(file: Path) -> Any:
    def check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SettingsError(
                f"{file.name}: the field {twice[0]} is twice in one object", "remove one of them"
            )
        return dict(pairs)

    try:
        return json.loads(read_text(file), object_pairs_hook=check_unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise SettingsError(f"{file} is not JSON: {error}", "correct the file") from None


def _get_section(document: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a section, empty if it is missing."""
    for name in names:
        document = document.get(name) or {}
    return document


def _derive_precision(document: dict[str, Any], walk: Walk) -> None:
    """Set the precision of the section that is enabled; without one, DeepSpeed trains in fp32."""
    enabled = {name: _get_section(document, name).get("enabled") for name in ("fp16", "bf16")}
    on = [name for name, value in enabled.items() if value is True]
    if len(on) > 1:
        raise SettingsError(
            f"{walk.file.name}: fp16 and bf16 are both enabled",
            "set enabled to false in one of them",
        )
    for name in on:
        walk.choices.state("precision", name, walk.origin(f"{name}.enabled"))
    known = walk.choices.stated("precision")
    if known and enabled.get(known.value) is False:
        disabled = Choice(f"not {known.value}", walk.origin(f"{known.value}.enabled"))
        raise make_contradiction("precision", known, disabled)
    if not on and "auto" not in enabled.values():
        walk.choices.assume("precision", "fp32", f"neither fp16 nor bf16 in {walk.file.name}")


def _derive_zero(document: dict[str, Any], walk: Walk) -> None:
    walk.choices.limit("strategy", ZERO, walk.file.name)
    if "stage" not in _get_section(document, "zero_optimization"):
        walk.choices.assume("strategy", "ddp", f"no zero_optimization.stage in {walk.file.name}")


def _derive_adam(document: dict[str, Any], walk: Walk) -> None:
    """Refuse Adam without decoupled decay; assume the weight decay of DeepSpeed's own Adam, 0."""
    kind = _get_section(document, "optimizer").get("type")
    if kind is None:
        return
    params = _get_section(document, "optimizer", "params")
    if kind.lower() == "adam" and params.get("adam_w_mode") is False:
        raise walk.refusal("optimizer.params.adam_w_mode", False, "only AdamW is supported")
    if "weight_decay" not in params and params.get("torch_adam") is not True:
        walk.choices.assume(
            "weight_decay", 0.0, f"no optimizer.params.weight_decay in {walk.file.name}"
        )


def _derive_schedule(document: dict[str, Any], walk: Walk) -> None:
    """Assume DeepSpeed's defaults, and refuse parameters of another schedule."""
    kind = _get_section(document, "scheduler").get("type")
    if kind is None:
        return
    params = _get_section(document, "scheduler", "params")
    for name in params:
        if name in _SCHEDULER_PARAMS and name not in _SCHEDULE_FIELDS[kind]:
            takes = ", ".join(sorted(_SCHEDULE_FIELDS[kind]))
            raise SettingsError(
                f"{walk.file.name}: scheduler.params.{name} is not a parameter of {kind}",
                f"its parameters are {takes}",
            )
    if "warmup_num_steps" not in params:
        walk.choices.assume(
            "warmup_steps", 1000, f"no scheduler.params.warmup_num_steps in {walk.file.name}"
        )
    if kind == "WarmupDecayLR" and "warmup_max_lr" not in params:
        # DeepSpeed then warms up to 0.001, whatever the optimizer's lr is; another lr is an error.
        origin = walk.origin("scheduler.params.warmup_max_lr (its default)")
        walk.choices.state("lr", 0.001, origin)


_SCHEDULER_PARAMS = set().union(*_SCHEDULE_FIELDS.values())
