"""The settings that determine training: each is declared once, with its default and help text.

``trainer.settings`` adds those of a call of the program: its ranks, checkpoints and output.
``trainer.resolve`` fills in what is derived here (0) or depends on the strategy (None). A setting
of a later file is explained there; a first reading needs only their groups.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

ZERO = ("ddp", "zero1", "zero2", "zero3")
FSDP = ("fsdp", "fsdp2")


def declare(default: Any, help_text: str, *choices: str) -> Any:
    """Declare a setting with the values that it may have; without ``choices``, any of its type."""
    return dataclasses.field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """What the model, its training and its distribution are. The help of a number has its unit."""

    # The run
    steps: int = declare(20, "number of optimizer steps, including those before a resume")
    seed: int = declare(0, "random seed of the initial weights, the data order and dropout")

    # The model and its data
    model: str = declare(
        "tiny-llama", "tiny-llama, tiny-mixtral, tiny-gpt2, a config.json or a model directory"
    )
    seq_len: int = declare(64, "tokens per sample")
    dropout: float | None = declare(None, "set every dropout probability of the model")
    tie_embeddings: bool | None = declare(None, "share input and output embeddings")
    freeze: tuple[str, ...] = declare(
        (), "do not train parameters whose name matches this regular expression"
    )
    activation_checkpointing: bool = declare(False, "recompute layers in the backward pass")

    # Batches: accumulation = ceil(global_batch / (micro_batch x ranks))
    micro_batch: int = declare(1, "samples per forward pass of a rank")
    accumulation: int = declare(0, "micro batches per step of a rank (0: derived)")
    global_batch: int = declare(0, "samples per step of all ranks (0: derived)")

    # The optimizer
    lr: float = declare(1e-3, "peak learning rate")
    beta1: float = declare(0.9, "AdamW: decay of the first moment")
    beta2: float = declare(0.999, "AdamW: decay of the second moment")
    eps: float = declare(1e-8, "AdamW: added to the square root of the second moment")
    weight_decay: float = declare(0.01, "AdamW: decoupled weight decay, times lr per step")
    param_groups: str = declare(
        "decay", "decay: no weight decay for biases and norms; single: one group", "decay", "single"
    )
    clip: float = declare(1.0, "largest global gradient norm (0: no clipping)")
    schedule: str = declare(
        "constant",
        "learning rate schedule, named as in DeepSpeed",
        "constant",
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
    )
    warmup_steps: int = declare(10, "steps until the peak learning rate")
    warmup_min_lr: float = declare(0.0, "learning rate at the start of the warmup")
    warmup_type: str = declare("log", "shape of the warmup", "log", "linear")
    schedule_steps: int = declare(0, "length of the whole schedule (0: --steps)")
    cos_min_ratio: float = declare(1e-4, "WarmupCosineLR: last rate / peak rate")
    warmup_min_ratio: float = declare(0.0, "WarmupCosineLR: first rate / peak rate")

    # Precision
    precision: str = declare(
        "bf16", "precision of the forward and backward pass", "fp32", "bf16", "fp16"
    )
    grad_dtype: str = declare(
        "fp32", "dtype in which gradients are summed and stored", "fp32", "bf16", "fp16"
    )
    loss_scale: float = declare(0.0, "fp16: fixed loss scale (0: dynamic)")
    initial_scale_power: int = declare(16, "fp16: initial dynamic scale is 2 to this power")
    loss_scale_window: int = declare(1000, "fp16: steps without overflow before the scale doubles")
    hysteresis: int = declare(2, "fp16: overflows before the scale halves")
    min_loss_scale: float = declare(1.0, "fp16: smallest loss scale")

    # How the model is distributed over the ranks
    strategy: str = declare(
        "zero2", "how parameters, gradients and optimizer are distributed", *ZERO, *FSDP
    )
    reduction: str | None = declare(
        None,
        "canonical: bitwise equal at any number of ranks (default of ddp and ZeRO); fast: sums in "
        "the order of the collective",
        "canonical",
        "fast",
    )
    reduce_bucket_size: int = declare(500_000_000, "ZeRO 2: elements that are reduced at a time")
    sub_group_size: int = declare(1_000_000_000, "ZeRO 3: elements that are updated at a time")
    offload_optimizer: str = declare(
        "none", "ZeRO: where masters and moments are kept", "none", "cpu"
    )
    offload_param: str = declare("none", "ZeRO 3: where parameter shards are kept", "none", "cpu")

    # FSDP, with the options of Accelerate
    fsdp_sharding_strategy: str = declare(
        "FULL_SHARD",
        "FSDP 2 supports FULL_SHARD, SHARD_GRAD_OP and their hybrids",
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
    )
    fsdp_hybrid_size: int = declare(0, "HYBRID: ranks per replica (0: half of them, or all)")
    fsdp_auto_wrap_policy: str = declare(
        "TRANSFORMER_BASED_WRAP",
        "which modules become units",
        "TRANSFORMER_BASED_WRAP",
        "SIZE_BASED_WRAP",
        "NO_WRAP",
    )
    fsdp_transformer_layer_cls_to_wrap: tuple[str, ...] = declare(
        (), "layer classes (default: the model's own _no_split_modules)"
    )
    fsdp_min_num_params: int = declare(100_000, "SIZE_BASED_WRAP: smallest unit, in elements")
    fsdp_use_orig_params: bool = declare(True, "FSDP 1: keep names and groups of the parameters")
    fsdp_offload_params: bool = declare(False, "keep shards and optimizer on the CPU")

    # The files of an FSDP checkpoint, on which FSDP 1 depends, too
    state_dict_type: str = declare("sharded", "kind of FSDP checkpoint", "full", "local", "sharded")
    sharded_files: str = declare(
        "dcp", "FSDP sharded: a DCP directory, or a pickled file per rank", "dcp", "rank"
    )

    @property
    def zero_stage(self) -> int:
        """The stage of a ZeRO strategy; 0 for ddp."""
        return ZERO.index(self.strategy)

    @property
    def microbatches(self) -> int:
        """Micro batches per step of all ranks."""
        return self.global_batch // self.micro_batch
