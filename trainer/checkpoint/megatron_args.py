"""Arguments, schedule and random states in a Megatron-LM checkpoint.

Names and meanings: megatron/training/arguments.py and checkpointing.py, core 0.16. A real file has
some 660 arguments; these determine how the model is built and cut, and how it is trained.
"""

from __future__ import annotations

import math
import random
from argparse import Namespace
from typing import Any

import numpy as np
import torch

from trainer.checkpoint import foreign
from trainer.core.engine import DTYPES
from trainer.parallel.grid import Grid
from trainer.settings import Settings

DIVISOR = 128
"""The default of --make-vocab-size-divisible-by."""
_DECAY = {"constant": "constant", "WarmupLR": "constant", "WarmupDecayLR": "linear"}


def pad_vocabulary(vocab: int, tp: int) -> int:
    """Return the rows of the embeddings: for each tensor rank the same multiple of ``DIVISOR``.

    >>> pad_vocabulary(257, 2)
    512
    """
    return math.ceil(vocab / (DIVISOR * tp)) * DIVISOR * tp


def make_arguments(
    settings: Settings, config: Any, progress: dict[str, Any], rank: int
) -> Namespace:
    """Return the ``args`` of one rank's file.

    Args:
        settings: the settings of the run.
        config: the model's configuration in transformers.
        progress: the fields of `Progress`.
        rank: this rank's number among all ranks.
    """
    return Namespace(
        **_describe_grid(settings.grid, rank),
        **_describe_model(config, settings.grid.tp),
        **_describe_training(settings, progress),
    )


def _describe_grid(grid: Grid, rank: int) -> dict[str, Any]:
    """Return how the model is cut."""
    return {
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.tp,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "data_parallel_size": grid.dp * grid.ep,
        "world_size": grid.world,
        "rank": rank,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "pipeline_model_parallel_layout": None,
        "use_distributed_optimizer": False,
        "use_tp_pp_dp_mapping": False,
    }


def _describe_model(config: Any, tp: int) -> dict[str, Any]:
    """Return how the model is built."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    experts = getattr(config, "num_local_experts", None)
    return {
        "model_type": foreign.ModelType(1),
        "transformer_impl": "local",
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "swiglu": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": bool(
            getattr(config, "attention_bias", False) or config.model_type == "qwen2"
        ),
        "position_embedding_type": "rope",
        "rotary_base": int(config.rope_parameters["rope_theta"]),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "max_position_embeddings": config.max_position_embeddings,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": pad_vocabulary(config.vocab_size, tp),
        "make_vocab_size_divisible_by": DIVISOR,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_experts": experts,
        "moe_layer_freq": 1,
        "moe_router_topk": getattr(config, "num_experts_per_tok", 2),
        "moe_ffn_hidden_size": config.intermediate_size if experts else None,
        "moe_grouped_gemm": False,
    }


def _describe_training(settings: Settings, progress: dict[str, Any]) -> dict[str, Any]:
    """Return how the model is trained, and how far."""
    scheduled = settings.schedule != "constant"
    return {
        "params_dtype": DTYPES[settings.precision],
        "fp16": settings.precision == "fp16",
        "bf16": settings.precision == "bf16",
        "seq_length": settings.seq_len,
        "micro_batch_size": settings.micro_batch,
        "global_batch_size": settings.global_batch,
        "train_iters": settings.steps,
        "iteration": progress["step"],
        "consumed_train_samples": progress["samples"],
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.warmup_min_lr if scheduled else settings.lr,
        "lr_decay_style": _decay_style(settings),
        "adam_beta1": settings.beta1,
        "adam_beta2": settings.beta2,
        "adam_eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "clip_grad": settings.clip,
        "seed": settings.seed,
        "ckpt_format": "torch",
    }


def _decay_style(settings: Settings) -> str:
    return _DECAY.get(settings.schedule, "cosine")


def make_scheduler(settings: Settings, updates: int) -> dict[str, Any]:
    """Return ``opt_param_scheduler``, in samples (megatron/core/optimizer_param_scheduler.py)."""
    batch = settings.global_batch
    scheduled = settings.schedule != "constant"
    return {
        "max_lr": settings.lr,
        "lr_warmup_steps": settings.warmup_steps * batch if scheduled else 0,
        "num_steps": updates * batch,
        "lr_decay_style": _decay_style(settings),
        "lr_decay_steps": settings.schedule_steps * batch,
        "min_lr": settings.warmup_min_lr if scheduled else settings.lr,
        "start_wd": settings.weight_decay,
        "end_wd": settings.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": settings.steps * batch,
    }


def get_random_states() -> list[dict[str, Any]]:
    """Return ``rng_state``, which Megatron-LM requires; the trainer itself does not use it."""
    state = torch.get_rng_state()
    trackers = ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")
    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),  # noqa: NPY002 (the one that Megatron-LM saves)
            "torch_rng_state": state,
            "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else state,
            "rng_tracker_states": {name: state.clone() for name in trackers},
        }
    ]
