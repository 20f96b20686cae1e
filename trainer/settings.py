"""Every setting, declared once: its name, type, default and help text.

The command line is built from these fields (``cli.py``), and the configuration files of DeepSpeed
and Accelerate are read into them (``config/``). `resolve.resolve` returns the Settings of a run,
which have no contradictions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

ZERO = ("ddp", "zero1", "zero2", "zero3")
FSDP = ("fsdp", "fsdp2")
AUTO = "auto"
"""The value of ``resume`` that means the run in ``save``, if there is one yet."""


def _field(default: Any, help_text: str, *choices: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run. The help text of a number states its unit."""

    # The run
    steps: int = _field(20, "number of optimizer steps, including those before a resume")
    seed: int = _field(0, "random seed of the initial weights, the data order and dropout")
    nproc: int = _field(1, "number of ranks; a launcher (torchrun, accelerate launch) sets it")
    device: str = _field("auto", "auto: cuda if there is a GPU", "auto", "cpu", "cuda")
    threads: int = _field(1, "CPU threads per rank; bitwise equal results need the same number")
    timeout: int = _field(300, "seconds to wait for another rank before giving up")

    # The model and its data
    model: str = _field(
        "tiny-llama", "tiny-llama, tiny-mixtral, tiny-gpt2, a config.json or a model directory"
    )
    data: str | None = _field(
        None, "training text, a file (default: Python's own documentation topics)"
    )
    seq_len: int = _field(64, "tokens per sample")
    dropout: float | None = _field(None, "set every dropout probability of the model")
    tie_embeddings: bool | None = _field(None, "share input and output embeddings")
    freeze: tuple[str, ...] = _field(
        (), "do not train parameters whose name matches this regular expression"
    )
    activation_checkpointing: bool = _field(False, "recompute layers in the backward pass")

    # Batches: global_batch = micro_batch x accumulation x ranks
    micro_batch: int = _field(1, "samples per forward pass of a rank")
    accumulation: int = _field(0, "micro batches per step of a rank (0: derived)")
    global_batch: int = _field(0, "samples per step of all ranks (0: derived)")

    # The optimizer
    lr: float = _field(1e-3, "peak learning rate")
    beta1: float = _field(0.9, "AdamW: decay of the first moment")
    beta2: float = _field(0.999, "AdamW: decay of the second moment")
    eps: float = _field(1e-8, "AdamW: added to the square root of the second moment")
    weight_decay: float = _field(0.01, "AdamW: decoupled weight decay, times lr per step")
    param_groups: str = _field(
        "decay", "decay: no weight decay for biases and norms; single: one group", "decay", "single"
    )
    clip: float = _field(1.0, "largest global gradient norm (0: no clipping)")
    schedule: str = _field(
        "constant",
        "learning rate schedule, named as in DeepSpeed",
        "constant",
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
    )
    warmup_steps: int = _field(10, "steps until the peak learning rate")
    warmup_min_lr: float = _field(0.0, "learning rate at the start of the warmup")
    warmup_type: str = _field("log", "shape of the warmup", "log", "linear")
    schedule_steps: int = _field(0, "length of the whole schedule (0: --steps)")
    cos_min_ratio: float = _field(1e-4, "WarmupCosineLR: last rate / peak rate")
    warmup_min_ratio: float = _field(0.0, "WarmupCosineLR: first rate / peak rate")

    # Precision
    precision: str = _field(
        "bf16", "precision of the forward and backward pass", "fp32", "bf16", "fp16"
    )
    grad_dtype: str = _field(
        "fp32", "dtype in which gradients are summed and stored", "fp32", "bf16", "fp16"
    )
    loss_scale: float = _field(0.0, "fp16: fixed loss scale (0: dynamic)")
    initial_scale_power: int = _field(16, "fp16: initial dynamic scale is 2 to this power")
    loss_scale_window: int = _field(1000, "fp16: steps without overflow before the scale doubles")
    hysteresis: int = _field(2, "fp16: overflows before the scale halves")
    min_loss_scale: float = _field(1.0, "fp16: smallest loss scale")
    on_nan: str = _field(
        "stop", "if the loss is not finite: stop, or skip the step", "stop", "skip"
    )

    # How the model is distributed over the ranks
    strategy: str = _field(
        "zero2", "how parameters, gradients and optimizer are distributed", *ZERO, *FSDP
    )
    reduction: str | None = _field(
        None,
        "canonical: bitwise equal at any number of ranks (default of ddp and ZeRO); fast: sums in "
        "the order of the collective",
        "canonical",
        "fast",
    )
    reduce_bucket_size: int = _field(500_000_000, "ZeRO 2: elements that are reduced at a time")
    sub_group_size: int = _field(1_000_000_000, "ZeRO 3: elements that are updated at a time")
    persistence_threshold: int = _field(0, "ZeRO 3: parameters with fewer elements stay gathered")
    offload_optimizer: str = _field(
        "none", "ZeRO: where masters and moments are kept", "none", "cpu", "nvme"
    )
    offload_param: str = _field(
        "none", "ZeRO 3: where parameter shards are kept", "none", "cpu", "nvme"
    )
    nvme_path: str | None = _field(None, "directory for nvme offload")

    # FSDP, with the options of Accelerate
    fsdp_sharding_strategy: str = _field(
        "FULL_SHARD",
        "FSDP 2 supports FULL_SHARD, SHARD_GRAD_OP and their hybrids",
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
    )
    fsdp_hybrid_size: int = _field(0, "HYBRID: ranks per replica (0: half of them, or all)")
    fsdp_auto_wrap_policy: str = _field(
        "TRANSFORMER_BASED_WRAP",
        "which modules become units",
        "TRANSFORMER_BASED_WRAP",
        "SIZE_BASED_WRAP",
        "NO_WRAP",
    )
    fsdp_transformer_layer_cls_to_wrap: tuple[str, ...] = _field(
        (), "layer classes (default: the model's own _no_split_modules)"
    )
    fsdp_min_num_params: int = _field(100_000, "SIZE_BASED_WRAP: smallest unit, in elements")
    fsdp_backward_prefetch: str = _field(
        "BACKWARD_PRE",
        "when the next unit is gathered",
        "BACKWARD_PRE",
        "BACKWARD_POST",
        "NO_PREFETCH",
    )
    fsdp_forward_prefetch: bool = _field(
        False, "gather the next unit ahead in the forward pass too"
    )
    fsdp_use_orig_params: bool = _field(True, "FSDP 1: keep the names and groups of the parameters")
    fsdp_sync_module_states: bool = _field(True, "broadcast rank 0's weights and buffers")
    fsdp_cpu_ram_efficient_loading: bool = _field(False, "only rank 0 reads the weights")
    fsdp_offload_params: bool = _field(False, "keep parameters, gradients and optimizer on the CPU")
    fsdp_limit_all_gathers: bool = _field(True, "FSDP 1: at most two gathers in flight")

    # Checkpoints
    save: str | None = _field(None, "run directory to write (default: the first free run-N)")
    save_every: int = _field(0, "steps between checkpoints (0: one at the end)")
    async_save: bool = _field(
        False, "write checkpoints in the background, from a copy in host memory"
    )
    keep: int = _field(0, "number of newest checkpoints to keep (0: all)")
    overwrite: bool = _field(False, "replace checkpoints of another run in the run directory")
    state_dict_type: str = _field("sharded", "kind of FSDP checkpoint", "full", "local", "sharded")
    sharded_files: str = _field(
        "dcp", "FSDP sharded: a DCP directory, or a pickled file per rank", "dcp", "rank"
    )
    save_16bit_model: bool = _field(False, "write model.safetensors in 16 bits at the end")
    resume: str | None = _field(
        None, "run directory or checkpoint to continue from; auto: --save, if it has one"
    )
    tag: str | None = _field(None, "checkpoint of the run directory (default: latest)")

    # Output
    log: str | None = _field(None, "file for a JSON line per step")
    progress: bool = _field(True, "progress bar on a terminal, else lines")
    wall_clock_breakdown: bool = _field(False, "report the time of each part of a step")
    parameter_hash: bool = _field(True, "report the SHA-256 of the final parameters")

    @property
    def microbatches(self) -> int:
        """Micro batches per step of all ranks."""
        return self.global_batch // self.micro_batch

    def count_active_ranks(self, *, last: bool) -> int:
        """Return the number of ranks whose micro batch counts, the first ones.

        Args:
            last: whether it is the last micro batch of the step, which some ranks may not have.
        """
        earlier = (self.accumulation - 1) * self.nproc
        return self.microbatches - earlier if last else self.nproc

    @property
    def layout(self) -> str:
        """The layout of the checkpoints: DeepSpeed or FSDP."""
        return "DeepSpeed" if self.strategy in ZERO else "FSDP"

    @property
    def zero_stage(self) -> int:
        """The stage of a ZeRO strategy; 0 for ddp."""
        return ZERO.index(self.strategy)


def get_default_reduction(settings: Settings) -> str:
    """Return "canonical" for ddp and ZeRO, and "fast" for FSDP."""
    return "canonical" if settings.strategy in ZERO else "fast"


def supports_canonical(settings: Settings) -> bool:
    """Return whether the run can add gradients in micro batch order."""
    sharded = settings.fsdp_sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    return settings.strategy in ZERO or sharded
