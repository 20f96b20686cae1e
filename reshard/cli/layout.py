"""The options of ``split`` and ``convert``: the state that is written, and how a target lies."""

from __future__ import annotations

import click

from reshard.cli import options
from reshard.cli.options import PATH, OneOf
from reshard.cli.sections import Option, section, together

_MEGATRON = "reshard.formats.megatron.words"

_target, _state, _names = section("Target"), section("State"), section("Names")
_grid = section("Grid of ranks (DeepSpeed, Megatron, Meta, nanotron)")
_torch = section("FSDP and DTensor (accelerate, fsdp, fsdp2, verl, hf-trainer)")
_megatron = section("Megatron")

_world_size = _target(
    "--world-size",
    "--num-shards",
    "world_size",
    type=click.IntRange(min=1),
    help="Ranks of the run to come.  [default: as the source]",
)

_what = together(
    _state(
        "--dtype",
        help="Of the module's parameters: bf16, fp16 or fp32.  [default: as trained]",
    ),
    _state("--weights-only", is_flag=True, help="Leave the optimizer out."),
    _state(
        "--init-optimizer",
        type=OneOf("reshard.formats.fresh_adam", "InitOptimizer"),
        help="Where SOURCE has no optimizer: none, or an Adam of zeros at step 0.",
    ),
    _state(
        "--param-groups",
        type=PATH,
        metavar="FILE",
        help="JSON: param groups and hyper-parameters.  [default: as is]",
    ),
    _state(
        "--rng",
        type=OneOf("reshard.formats.rng", "Policy"),
        help="Random states of ranks: kept, made anew or left out.  [default: keep, where they can"
        " be]",
    ),
    _names(
        "--names",
        type=click.Choice(["source", "hf"]),
        help="Whose names parameters get.  [default: the source's; Megatron's for --to megatron]",
    ),
    options.family,
    options.vocab_size,
)

_ranks = together(
    _target("--zero-stage", type=click.IntRange(0, 3), help="Of DeepSpeed.  [default: as is]"),
    *(
        _grid(f"--{name}", type=click.IntRange(min=1), help=what)
        for name, what in (
            ("tp", "Tensor-parallel ranks.  [default: as is]"),
            ("pp", "Pipeline-parallel ranks.  [default: as is]"),
            ("ep", "Ranks that share a layer's experts.  [default: as is]"),
            ("dp", "Ranks that see different data.  [default: --world-size / (tp x pp)]"),
            ("vpp", "Model chunks of a pipeline rank (virtual pipeline).  [default: as is]"),
        )
    ),
    _grid(
        "--stage-layers",
        metavar="N,N,...",
        help="Layers of each pipeline stage.  [default: as many each]",
    ),
)

_pytorch = together(
    _torch(
        "--state-dict-type",
        type=OneOf("reshard.formats.targets.request", "STATE_DICT_TYPES"),
        help="FSDP's, or unsharded: DDP, one process.  [default: as is, else sharded]",
    ),
    _torch("--rank-files", is_flag=True, help="Sharded as a file a rank, not as DCP."),
    _torch(
        "--fsdp-version",
        type=click.IntRange(1, 2),
        default=2,
        show_default=True,
        help="Of verl's files; 1 needs --model and --wrap.",
    ),
    _torch(
        "--use-orig-params",
        metavar="DTYPE",
        help="FSDP 1 with the original parameters; DTYPE of its forward pass.",
    ),
    _torch(
        "--mesh",
        metavar="NAME=SIZE,...",
        help="Axes of DTensor files: dp_shard=4,tp=2.  [default: one axis of all ranks]",
    ),
    _torch(
        "--tp-plan",
        type=PATH,
        metavar="FILE",
        help="JSON, pattern -> colwise|rowwise|replicate|dim: how the axis tp cuts.  [default: the"
        " model's own plan]",
    ),
    _torch(
        "--device",
        default="cuda",
        show_default=True,
        help="Of the mesh in DTensor files: that of the run to come.",
    ),
)

_of_megatron = together(
    _megatron(
        "--ckpt-format",
        type=OneOf(_MEGATRON, "Form"),
        help="A folder a rank, or one DCP directory.  [default: as is, else torch]",
    ),
    _megatron(
        "--distributed-optimizer/--no-distributed-optimizer",
        default=None,
        help="Whether the run to come has it.  [default: as is]",
    ),
    _megatron(
        "--adam",
        type=OneOf(_MEGATRON, "Adam"),
        help="Whose the run to come has: Apex's or Transformer Engine's, or torch's.  [default: as"
        " is, else fused]",
    ),
    _megatron(
        "--transformer-impl",
        type=OneOf(_MEGATRON, "Impl"),
        help="Whose layers the run to come has.  [default: as is, else transformer_engine]",
    ),
    _megatron(
        "--extra-state",
        type=OneOf(_MEGATRON, "ExtraState"),
        help="Transformer Engine's own states.  [default: keep, where they can be]",
    ),
    _megatron(
        "--make-vocab-size-divisible-by",
        type=click.IntRange(min=1),
        help="Times --tp: to what Megatron pads the vocabulary.  [default: as is, else 128]",
    ),
)

# How a target is laid out, but for its name and its number of ranks.
layout = together(_ranks, _what, _pytorch, _of_megatron)


def to(*, required: bool = False) -> Option:
    """``--to`` of a command that writes one layout."""
    default = "" if required else "  [default: as the source]"
    return _target("--to", type=options.TARGET, required=required, help=f"Layout.{default}")


def resharding(target: Option) -> Option:
    """All that split and convert take; they differ in whether ``--to`` must be given."""
    written = together(target, _world_size, layout, options.output)
    return together(options.sources, options.destination, written, options.source)
