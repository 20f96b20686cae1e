"""The options of targets: how a training state is laid out for its ranks.

One vocabulary for all targets; each target lists the names of the options that it uses
(`formats.base.Writer.options`), and an option that a target does not use is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from reshard.options import Options, option

StateDictType = Literal["full", "local", "sharded", "unsharded"]
FsdpVersion = Literal[1, 2]
CkptFormat = Literal["torch", "torch_dist"]
OptimSharding = Literal["fully_reshardable", "dp_reshardable"]
Adam = Literal["fused", "torch"]
TransformerImpl = Literal["local", "transformer_engine"]
ExtraState = Literal["keep", "drop"]
RngPolicy = Literal["keep", "derive", "drop"]

_AS_SOURCE = "same as the source"
_grid = partial(option, group="Grid of ranks")
_dtensor = partial(option, group="FSDP and DTensor")
_megatron = partial(option, group="Megatron")


@dataclass(frozen=True, kw_only=True)
class TargetOptions(Options):
    """The options that some targets use and others refuse; None leaves the choice to the source."""

    zero_stage: int | None = option(
        None,
        "ZeRO stage to write.",
        group="ZeRO",
        minimum=0,
        maximum=3,
        unset=_AS_SOURCE,
    )
    tp: int | None = _grid(None, "Tensor-parallel ranks.", minimum=1, unset=_AS_SOURCE)
    pp: int | None = _grid(None, "Pipeline-parallel ranks.", minimum=1, unset=_AS_SOURCE)
    ep: int | None = _grid(None, "Expert-parallel ranks.", minimum=1, unset=_AS_SOURCE)
    dp: int | None = _grid(
        None, "Data-parallel ranks.", minimum=1, unset="--world-size / (tp x pp x cp)"
    )
    cp: int | None = _grid(None, "Context-parallel ranks.", minimum=1, unset=_AS_SOURCE)
    etp: int | None = _grid(
        None,
        "Tensor-parallel ranks of each expert.",
        minimum=1,
        unset="1 if that of the source is 1, else --tp",
    )
    vpp: int | None = _grid(
        None,
        "Model chunks per pipeline rank (virtual pipeline).",
        minimum=1,
        unset=_AS_SOURCE,
    )
    stage_layers: str | None = _grid(
        None, "Number of layers of each pipeline stage.", metavar="N,N,...", unset="equal"
    )
    make_vocab_size_divisible_by: int | None = _grid(
        None,
        "Pad the vocabulary to a multiple of this times --tp.",
        minimum=1,
        unset="same as the source, else 128",
    )
    state_dict_type: StateDictType | None = _dtensor(
        None,
        "State dict type: FSDP's, or unsharded (DDP, one process).",
        unset="as in the source, else sharded",
    )
    rank_files: bool = _dtensor(False, "Write one file per rank instead of DCP, if sharded.")
    fsdp_version: FsdpVersion = _dtensor(
        2, "FSDP version of verl's files; 1 requires --model and --wrap."
    )
    use_orig_params: str | None = _dtensor(
        None,
        "Write FSDP 1 with use_orig_params; DTYPE is that of the forward pass.",
        metavar="DTYPE",
    )
    mesh: str | None = _dtensor(
        None,
        "Mesh axes of DTensor files, e.g. dp_shard=4,tp=2.",
        metavar="NAME=SIZE,...",
        unset="one axis of all ranks",
    )
    tp_plan: str | Path | None = _dtensor(
        None,
        "JSON, pattern -> colwise|rowwise|replicate|dim: cuts along the axis tp.",
        metavar="FILE",
        unset="the model's own plan",
    )
    device: str | None = _dtensor(
        None,
        "Device type of the mesh in DTensor files.",
        unset="same as the source, else cuda",
    )
    ckpt_format: CkptFormat | None = _megatron(
        None,
        "Write one folder per rank, or one DCP directory.",
        unset="as in the source, else torch",
    )
    distributed_optimizer: bool | None = _megatron(
        None, "Whether the new run uses it.", unset=_AS_SOURCE
    )
    optim_sharding: OptimSharding | None = _megatron(
        None,
        "Form of the distributed optimizer in torch_dist: for any grid, or for any --dp.",
        unset="fully_reshardable; flat ranges for cores up to 0.14",
    )
    adam: Adam | None = _megatron(
        None,
        "Adam of the new run: fused (Apex or Transformer Engine) or torch.",
        unset="same as the source, else fused",
    )
    transformer_impl: TransformerImpl | None = _megatron(
        None, "Layers of the new run.", unset="same as the source, else transformer_engine"
    )
    extra_state: ExtraState | None = _megatron(
        None, "Extra states of Transformer Engine.", unset="keep, if possible"
    )
