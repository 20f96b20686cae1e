"""The options of ``plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard import units
from reshard.commands.options import ReportOptions
from reshard.options import option
from reshard.sizing.setup import Optimizer, Precision
from reshard.sizing.strategies import NAMES

DEFAULT_SEQ_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ReportOptions):
    """The options of ``plan``."""

    gpus: str = option(
        "1x80GB",
        "GPUs of a node and the memory of each, e.g. 8x80GB.",
        group="Cluster",
        is_common=True,
    )
    nodes: int = option(1, "Number of nodes.", group="Cluster", minimum=1, is_common=True)
    host_memory_bytes: int | None = option(
        None,
        "Memory of a node, e.g. 512GB.",
        group="Cluster",
        flags=("--host-memory",),
        parse=lambda text: units.parse_bytes(text, "--host-memory"),
        unset="not compared",
    )
    params: str | None = option(
        None,
        "Number of parameters instead of a model, e.g. 7B.",
        group="Training",
        is_common=True,
    )
    seq_len: int | None = option(
        None,
        "Tokens of a sample.",
        group="Training",
        minimum=1,
        unset=f"as SOURCE states, else {DEFAULT_SEQ_LEN} or the most that the model supports",
        is_common=True,
    )
    micro_batch: int | None = option(
        None,
        "Samples of a forward pass on one GPU.",
        group="Training",
        minimum=1,
        unset="as SOURCE states, or the largest below that divides the global batch; else 1",
    )
    global_batch: int | None = option(
        None,
        "Samples of a step on all GPUs.",
        group="Training",
        minimum=1,
        unset="as SOURCE states, else one micro batch on each data-parallel rank",
        is_common=True,
    )
    optimizer: Optimizer | None = option(
        None,
        "Optimizer of the training.",
        group="Training",
        unset="as SOURCE states, else adamw",
        is_common=True,
    )
    precision: Precision | None = option(
        None,
        "Precision of the forward and backward pass.",
        group="Training",
        unset="as SOURCE states, else bf16",
        is_common=True,
    )
    lora_rank: int = option(
        0, "Train LoRA adapters of this rank; 0: train the model.", group="Training", minimum=0
    )
    lora_targets: Sequence[str] = option(
        (),
        "Name of the modules that get adapters, e.g. q_proj; repeatable.",
        group="Training",
        unset="all matrices of the layers except routers and routed experts",
    )
    freeze: str | None = option(
        None,
        "Regular expression that matches the names of parameters that are not trained.",
        group="Training",
    )
    tp: int = option(1, "Tensor-parallel ranks.", group="Training", minimum=1)
    pp: int = option(1, "Pipeline stages.", group="Training", minimum=1)
    ep: int = option(
        1,
        "Expert-parallel ranks, which divide the data-parallel ranks as in DeepSpeed.",
        group="Training",
        minimum=1,
    )
    strategy: str | None = option(
        None,
        "Strategy for --write and for the advice.",
        group="Output",
        choices=NAMES,
        unset="the recommended one",
        is_common=True,
    )
    write: str | Path | None = option(
        None,
        "Write the configuration of the chosen strategy: .json for DeepSpeed (or HF Trainer's"
        " arguments for FSDP), .yaml for accelerate, .sh for python -m trainer.",
        group="Output",
        metavar="FILE",
        shapes_output=False,
        is_common=True,
    )
