"""The options of ``split`` and ``convert``: the parts of the state to write, and their layout."""

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
    help="Number of ranks in the new run.  [default: same as the source]",
)

_what = together(
    _state(
        "--dtype",
        help="Dtype of the module's parameters: bf16, fp16 or fp32.  [default: as trained]",
    ),
    _state("--weights-only", is_flag=True, help="Write no optimizer state."),
    _state(
        "--init-optimizer",
        type=OneOf("reshard.training.fresh_adam", "InitOptimizer"),
        help="Optimizer to write if SOURCE has none: none, or zeros for a new Adam at step 0.",
    ),
    _state(
        "--param-groups",
        type=PATH,
        metavar="FILE",
        help="JSON file of param groups and hyperparameters.  [default: same as the source]",
    ),
    _state(
        "--rng",
        type=OneOf("reshard.training.rng", "Policy"),
        help="Random states of ranks: keep, create new ones or leave out.  [default: keep, if"
        " possible]",
    ),
    _names(
        "--names",
        type=click.Choice(["source", "hf"]),
        help="Naming scheme of the parameters.  [default: source; Megatron's for --to megatron]",
    ),
    options.family,
    options.vocab_size,
)

_ranks = together(
    _target(
        "--zero-stage",
        type=click.IntRange(0, 3),
        help="ZeRO stage to write (DeepSpeed).  [default: same as the source]",
    ),
    *(
        _grid(f"--{name}", type=click.IntRange(min=1), help=what)
        for name, what in (
            ("tp", "Tensor-parallel ranks.  [default: same as the source]"),
            ("pp", "Pipeline-parallel ranks.  [default: same as the source]"),
            ("ep", "Expert-parallel ranks.  [default: same as the source]"),
            ("dp", "Data-parallel ranks.  [default: --world-size / (tp x pp)]"),
            (
                "vpp",
                "Model chunks per pipeline rank (virtual pipeline).  [default: same as the source]",
            ),
        )
    ),
    _grid(
        "--stage-layers",
        metavar="N,N,...",
        help="Number of layers of each pipeline stage.  [default: equal]",
    ),
)

_pytorch = together(
    _torch(
        "--state-dict-type",
        type=OneOf("reshard.formats.targets.request", "STATE_DICT_TYPES"),
        help="State dict type: FSDP's, or unsharded (DDP, one process).  [default: as in the"
        " source, else sharded]",
    ),
    _torch(
        "--rank-files", is_flag=True, help="Write one file per rank instead of DCP, if sharded."
    ),
    _torch(
        "--fsdp-version",
        type=click.IntRange(1, 2),
        default=2,
        show_default=True,
        help="FSDP version of verl's files; 1 requires --model and --wrap.",
    ),
    _torch(
        "--use-orig-params",
        metavar="DTYPE",
        help="Write FSDP 1 with use_orig_params; DTYPE is that of the forward pass.",
    ),
    _torch(
        "--mesh",
        metavar="NAME=SIZE,...",
        help="Mesh axes of DTensor files, e.g. dp_shard=4,tp=2.  [default: one axis of all ranks]",
    ),
    _torch(
        "--tp-plan",
        type=PATH,
        metavar="FILE",
        help="JSON, pattern -> colwise|rowwise|replicate|dim: cuts along the axis tp.  [default:"
        " the model's own plan]",
    ),
    _torch(
        "--device",
        default="cuda",
        show_default=True,
        help="Device type of the mesh in DTensor files.",
    ),
)

_of_megatron = together(
    _megatron(
        "--ckpt-format",
        type=OneOf(_MEGATRON, "Form"),
        help="Write one folder per rank, or one DCP directory.  [default: as in the source, else"
        " torch]",
    ),
    _megatron(
        "--distributed-optimizer/--no-distributed-optimizer",
        default=None,
        help="Whether the new run uses it.  [default: same as the source]",
    ),
    _megatron(
        "--adam",
        type=OneOf(_MEGATRON, "Adam"),
        help="Adam of the new run: fused (Apex or Transformer Engine) or torch.  [default: same as"
        " the source, else fused]",
    ),
    _megatron(
        "--transformer-impl",
        type=OneOf(_MEGATRON, "Impl"),
        help="Layers of the new run.  [default: same as the source, else transformer_engine]",
    ),
    _megatron(
        "--extra-state",
        type=OneOf(_MEGATRON, "ExtraState"),
        help="Extra states of Transformer Engine.  [default: keep, if possible]",
    ),
    _megatron(
        "--make-vocab-size-divisible-by",
        type=click.IntRange(min=1),
        help="Pad the vocabulary to a multiple of this times --tp.  [default: same as the source,"
        " else 128]",
    ),
)

# Layout options of a target, without its name and its number of ranks.
layout = together(_ranks, _what, _pytorch, _of_megatron)


def to(*, required: bool = False) -> Option:
    """Return ``--to`` for a command that writes one layout."""
    default = "" if required else "  [default: same as the source]"
    return _target(
        "--to", type=options.TARGET, required=required, help=f"Layout to write.{default}"
    )


def resharding(target: Option) -> Option:
    """Combine all options of split and convert, which differ in whether ``--to`` is required."""
    written = together(target, _world_size, layout, options.output)
    return together(options.sources, options.destination, written, options.source)
