"""Every choice, once: its name, type, default and meaning.

The command line is made from these fields (``cli.py``); the configuration files of DeepSpeed and
Accelerate are read into them (``config/``). `resolve.resolve` makes the only Settings that a run
sees, without contradictions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from trainer.parallel.grid import Grid

ZERO = ("ddp", "zero1", "zero2", "zero3")
FSDP = ("fsdp", "fsdp2")


def _field(default: Any, meaning: str, *choices: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": meaning, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run does. Numbers of bytes, elements, steps and seconds say so in their help."""

    # The run
    steps: int = _field(20, "optimizer steps in all, those before a resume included")
    seed: int = _field(0, "of the initial weights, the data order and dropout")
    nproc: int = _field(1, "ranks; under torchrun or accelerate launch, the world size")
    device: str = _field("auto", "auto is cuda where there is one", "auto", "cpu", "cuda")
    threads: int = _field(1, "CPU threads a rank; the same results need the same number")
    timeout: int = _field(300, "seconds to wait for another rank before giving up")

    # The model and its data
    model: str = _field(
        "tiny-llama", "tiny-llama, tiny-mixtral, tiny-gpt2, a config.json or a model directory"
    )
    data: str | None = _field(None, "a text file (default: Python's own documentation topics)")
    seq_len: int = _field(64, "tokens a sample")
    dropout: float | None = _field(None, "every dropout probability of the model")
    tie_embeddings: bool | None = _field(None, "share input and output embeddings")
    freeze: tuple[str, ...] = _field((), "parameters whose name matches stay as they are (regex)")
    activation_checkpointing: bool = _field(False, "recompute layers in the backward pass")

    # Batches: global_batch = micro_batch x accumulation x data-parallel ranks
    micro_batch: int = _field(1, "samples in one forward pass of one rank")
    accumulation: int = _field(0, "micro batches that a rank adds up before a step (0: follows)")
    global_batch: int = _field(0, "samples a step, all ranks (0: follows)")

    # The optimizer
    lr: float = _field(1e-3, "peak learning rate")
    beta1: float = _field(0.9, "AdamW: decay of the first moment")
    beta2: float = _field(0.999, "AdamW: decay of the second moment")
    eps: float = _field(1e-8, "AdamW: added to the root of the second moment")
    weight_decay: float = _field(0.01, "AdamW: decoupled, per step, times lr")
    param_groups: str = _field(
        "decay", "decay: biases and norms are not decayed; single: one group", "decay", "single"
    )
    clip: float = _field(1.0, "largest global gradient norm (0: no clipping)")
    schedule: str = _field(
        "constant",
        "learning rate schedule, by its name in DeepSpeed",
        "constant",
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
    )
    warmup_steps: int = _field(10, "steps until the peak")
    warmup_min_lr: float = _field(0.0, "where the warmup starts")
    warmup_type: str = _field("log", "form of the warmup", "log", "linear")
    schedule_steps: int = _field(0, "steps of the whole schedule (0: steps)")
    cos_min_ratio: float = _field(1e-4, "WarmupCosineLR: last rate / peak rate")
    warmup_min_ratio: float = _field(0.0, "WarmupCosineLR: first rate / peak rate")

    # Numbers
    precision: str = _field("bf16", "of the forward and backward pass", "fp32", "bf16", "fp16")
    grad_dtype: str = _field(
        "fp32", "in which gradients are added up and kept", "fp32", "bf16", "fp16"
    )
    loss_scale: float = _field(0.0, "fp16: a fixed scale (0: dynamic)")
    initial_scale_power: int = _field(16, "fp16: dynamic scale starts at 2 to this power")
    loss_scale_window: int = _field(1000, "fp16: good steps before the scale doubles")
    hysteresis: int = _field(2, "fp16: overflows before the scale halves")
    min_loss_scale: float = _field(1.0, "fp16: never below this")
    on_nan: str = _field(
        "stop", "when the loss is not finite: stop, or skip the step", "stop", "skip"
    )

    # How the model is spread over the ranks
    strategy: str = _field("zero2", "what each rank holds", *ZERO, *FSDP)
    engine: str = _field("native", "native, or the real DeepSpeed", "native", "deepspeed")
    tp: int = _field(1, "ranks that cut each layer's matrices (ddp, fsdp2)")
    pp: int = _field(1, "pipeline stages of whole layers (ddp, fsdp2)")
    ep: int = _field(1, "ranks that cut each layer's experts (ddp, fsdp2)")
    pp_schedule: str = _field("1f1b", "of a pipeline's micro batches", "1f1b", "gpipe")
    reduction: str | None = _field(
        None,
        "canonical: the same bits at any number of ranks (default of ddp and ZeRO); fast: as the "
        "collective adds",
        "canonical",
        "fast",
    )
    reduce_bucket_size: int = _field(500_000_000, "ZeRO 2: elements reduced at a time")
    sub_group_size: int = _field(1_000_000_000, "ZeRO 3: elements of one optimizer step")
    persistence_threshold: int = _field(0, "ZeRO 3: parameters of fewer elements stay gathered")
    offload_optimizer: str = _field(
        "none", "ZeRO: where masters and moments live", "none", "cpu", "nvme"
    )
    offload_param: str = _field(
        "none", "ZeRO 3: where parameter shards live", "none", "cpu", "nvme"
    )
    nvme_path: str | None = _field(None, "directory for what is offloaded to disk")

    # FSDP, in the field's words
    fsdp_sharding_strategy: str = _field(
        "FULL_SHARD",
        "FSDP 1; FSDP 2 knows FULL_SHARD, SHARD_GRAD_OP and their hybrids",
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
    )
    fsdp_hybrid_size: int = _field(0, "HYBRID: ranks of one replica (0: half of them, or all)")
    fsdp_auto_wrap_policy: str = _field(
        "TRANSFORMER_BASED_WRAP",
        "what becomes one unit",
        "TRANSFORMER_BASED_WRAP",
        "SIZE_BASED_WRAP",
        "NO_WRAP",
    )
    fsdp_transformer_layer_cls_to_wrap: tuple[str, ...] = _field(
        (), "layer classes (default: the model's own _no_split_modules)"
    )
    fsdp_min_num_params: int = _field(100_000, "SIZE_BASED_WRAP: elements of a unit")
    fsdp_backward_prefetch: str = _field(
        "BACKWARD_PRE", "gather the next unit", "BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"
    )
    fsdp_forward_prefetch: bool = _field(False, "gather the next unit in the forward pass too")
    fsdp_use_orig_params: bool = _field(True, "FSDP 1: keep the parameters' names and groups")
    fsdp_sync_module_states: bool = _field(True, "rank 0's weights and buffers go to all")
    fsdp_cpu_ram_efficient_loading: bool = _field(False, "only rank 0 reads the weights")
    fsdp_offload_params: bool = _field(False, "parameters, gradients, optimizer on the CPU")
    fsdp_limit_all_gathers: bool = _field(True, "FSDP 1: at most two gathers in flight")

    # Checkpoints
    save: str | None = _field(None, "run directory (default: the first free run-N)")
    save_every: int = _field(0, "steps between checkpoints (0: only at the end)")
    keep: int = _field(0, "newest checkpoints to keep (0: all)")
    overwrite: bool = _field(False, "replace the checkpoints that are in the run directory")
    state_dict_type: str = _field(
        "sharded",
        "form of FSDP checkpoints; megatron: Megatron-LM's own directory",
        *("full", "local", "sharded", "megatron"),
    )
    sharded_files: str = _field(
        "dcp", "FSDP sharded: a DCP directory, or one pickled file a rank", "dcp", "rank"
    )
    save_16bit_model: bool = _field(False, "write model.safetensors in 16 bits at the end")
    resume: str | None = _field(None, "run directory or checkpoint to go on from")
    tag: str | None = _field(None, "checkpoint of the run directory (default: latest)")

    # What is told
    log: str | None = _field(None, "a JSON line a step goes here")
    progress: bool = _field(True, "progress bar, on a terminal")
    wall_clock_breakdown: bool = _field(False, "where the time of a step goes")
    parameter_hash: bool = _field(True, "SHA-256 of the final parameters")

    @property
    def microbatches(self) -> int:
        """Micro batches of one step, all ranks."""
        return self.accumulation * self.grid.dp

    @property
    def grid(self) -> Grid:
        """The ranks by what each axis divides; all of them are data parallel by default."""
        dp = self.nproc // (self.tp * self.pp * self.ep)
        return Grid(pp=self.pp, dp=dp, ep=self.ep, tp=self.tp)

    @property
    def layout(self) -> str:
        """Whose checkpoints are written: those of DeepSpeed or FSDP."""
        return "DeepSpeed" if self.strategy in ZERO and not self.grid.parallel else "FSDP"

    @property
    def zero_stage(self) -> int:
        """0 for ddp; ZeRO strategies only."""
        return ZERO.index(self.strategy)


def default_reduction(settings: Settings) -> str:
    """Canonical where it is offered."""
    ours = settings.engine == "native" and settings.layout == "DeepSpeed"
    return "canonical" if ours else "fast"
