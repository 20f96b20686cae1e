"""What a split for Megatron is to write: the user's choices, and the source's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard import dtypes
from reshard.commands.naming import Naming
from reshard.commands.split.options import SplitOptions
from reshard.errors import UsageError
from reshard.formats.megatron.write.choice import Wanted
from reshard.formats.target_options import CkptFormat, TransformerImpl
from reshard.manifest import Manifest
from reshard.model_parallel import vocabulary
from reshard.model_parallel.sizes import Sizes

_DIVISIBLE = 128  # Megatron-LM's default of --make-vocab-size-divisible-by


def wanted(manifest: Manifest, options: SplitOptions, sizes: Sizes, world: int) -> Wanted:
    """The directory that is to be written.

    Args:
        sizes: of the grid to come; ``world``: all its ranks.

    Raises:
        UsageError: stages of no number of layers.
    """
    args = _args(manifest)
    virtual = options.vpp
    if virtual is None:
        stays = args.get("pipeline_model_parallel_size") == sizes.pipeline
        virtual = (args.get("virtual_pipeline_model_parallel_size") if stays else None) or 1
    form: CkptFormat = "torch_dist" if manifest.origin.detail.startswith("torch_dist") else "torch"
    impl: TransformerImpl = (
        "local" if args.get("transformer_impl") == "local" else "transformer_engine"
    )
    distributed = options.distributed_optimizer
    if distributed is None:
        distributed = args.get("use_distributed_optimizer") is True
    return Wanted(
        sizes=Sizes(
            tensor=sizes.tensor, pipeline=sizes.pipeline, expert=sizes.expert, virtual=virtual
        ),
        form=options.ckpt_format or form,
        data=world // sizes.model,
        stage_layers=stage_layers(options),
        distributed=distributed,
        adam=options.adam,
        impl=options.transformer_impl or impl,
        divisible=(
            options.make_vocab_size_divisible_by
            or args.get("make_vocab_size_divisible_by")
            or _DIVISIBLE
        ),
        dtype=dtypes.parse(options.dtype) if options.dtype else None,
        weights_only=options.without_optimizer,
    )


def stage_layers(options: SplitOptions) -> tuple[int, ...] | None:
    """How many layers each pipeline stage has, where somebody says so.

    Raises:
        UsageError: that is no list of numbers.
    """
    if options.stage_layers is None:
        return None
    parts = options.stage_layers.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--stage-layers {options.stage_layers}", "write numbers: 3,4,4,3")
    return tuple(map(int, parts))


def _args(manifest: Manifest) -> Mapping[str, Any]:
    """The run's own args, of a source that is Megatron's."""
    config = manifest.train.config
    return config if manifest.origin.format == "megatron" and isinstance(config, dict) else {}


def fitted(named: Naming, wanted: Wanted) -> Naming:
    """A state with no more padding of the vocabulary than there will be."""
    known = named.described
    if known is None or known.architecture.vocab is None:
        return named
    words, layers = known.architecture.vocab, known.architecture.layers
    rows = vocabulary.padded(words, wanted.divisible * wanted.sizes.tensor)
    constants = {"layers": layers} if layers else {}
    manifest, taken = vocabulary.cut_to(named.manifest, known.table, constants, rows)
    said = f"{taken} rows of padding taken off the vocabulary: {words} are words"
    return replace(named, manifest=manifest, notes=(*named.notes, *([said] * bool(taken))))
