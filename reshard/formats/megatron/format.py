"""Megatron's checkpoints as one format: torch, torch_dist, and fsdp_dtensor, which is only read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from reshard.core.dtypes import BFLOAT16, FLOAT16, DType
from reshard.core.location import Location
from reshard.core.manifest import PARAM, Entry, Manifest, UnnamedOptimizer
from reshard.errors import UnsupportedError
from reshard.formats.base import Format, ReadHints, Source, Writer
from reshard.formats.megatron.directory import (
    FSDP_DTENSOR,
    NAME,
    detect,
    find_checkpoint,
    find_unread_optimizer,
    is_dist,
    is_fsdp,
    is_local,
    is_run,
    is_zarr,
    list_parts,
)
from reshard.model.adapter_names import LORA
from reshard.naming.options import ModelNames, NameOptions, Naming
from reshard.units import round_up

if TYPE_CHECKING:
    from reshard.containers.skeletons import LaidOut
    from reshard.formats.base import S, StateConversion
    from reshard.formats.megatron.write.resolved import MegatronTarget
    from reshard.formats.request import Request
    from reshard.formats.target_options import TargetOptions
    from reshard.layouts.model_parallel.traits import Traits
    from reshard.training.state import WritableState

_OF_DCP = ("torch_dist", FSDP_DTENSOR)  # forms of a source that become torch_dist
_PRECISIONS = {"bf16": BFLOAT16, "fp16": FLOAT16}  # by Megatron's arguments
_DIVISIBLE = 128  # Megatron-LM's default of --make-vocab-size-divisible-by


def _read(location: Location, hints: ReadHints) -> Manifest:
    # Imports are inside functions, because every format is loaded to detect a directory, and only
    # one of them reads it.
    from reshard.formats import adjacent_files
    from reshard.formats.megatron import dist, fsdp, legacy
    from reshard.formats.megatron.write.args import PRECISION_AWARE
    from reshard.layouts.model_parallel.rules import add_user_rules, load_whole_table
    from reshard.quantised import remainders

    if is_local(location):
        raise UnsupportedError(
            location,
            "is a local checkpoint (--non-persistent-ckpt-type local), of which each rank keeps its"
            " own part, and reshard does not read these",
            "continue the run from it, and save with --ckpt-format torch_dist",
        )
    found = find_checkpoint(location)
    if is_zarr(found):
        raise UnsupportedError(
            found,
            "is in the zarr format, which Megatron-core 0.16 no longer has and reshard does not"
            " read",
            "load it with the version that saved it, and save it with --ckpt-format torch_dist"
            " (older: --dist-ckpt-format torch_dist)",
        )
    if is_fsdp(found):
        read = fsdp.read
    else:
        read = dist.read if is_dist(found) or list_parts(found) else legacy.read
    table = add_user_rules(load_whole_table(NAME), hints.rules)
    manifest = read(found, table)
    args = _read_args(manifest)
    manifest = remainders.complete_masters(
        manifest, may_be_float=not args or args.get(PRECISION_AWARE) is True
    )
    return adjacent_files.add_run_document(_leave_out_unread(manifest, found), location)


def _leave_out_unread(manifest: Manifest, location: Location) -> Manifest:
    folder = find_unread_optimizer(location)
    if folder is None:
        return manifest
    reason = f"{folder} is of mcore_adapter (ROLL), whose optimizers reshard does not read"
    unnamed = UnnamedOptimizer(reason, advice="read only the weights: --weights-only")
    warnings = (*manifest.warnings, f"the optimizer is left out: {reason}")
    return replace(manifest, unnamed_optimizers=(folder.name,), unnamed=unnamed, warnings=warnings)


def _read_args(manifest: Manifest) -> Mapping[str, Any]:
    config = manifest.train.config
    return config if manifest.origin.format == NAME and isinstance(config, dict) else {}


def _describe_model(manifest: Manifest) -> Traits | None:
    from reshard.layouts.model_parallel.megatron_traits import parse_args

    args = _read_args(manifest)
    # Megatron-SWIFT (ms-swift 4.6) keeps the model's arguments in its config alone.
    return parse_args(args, manifest.origin.path) if args.get("hidden_size") else None


def _describe_adapter(manifest: Manifest) -> dict[str, Any] | None:
    # Sources: Megatron-Bridge 0.6.2 ``models/conversion/peft_bridge.py``
    # (build_adapter_config_dict); ms-swift 4.6 ``megatron/utils/utils.py`` (prepare_adapter).
    from reshard.formats.megatron.run_config import ADAPTER

    args = _read_args(manifest)
    stated = args.get(ADAPTER)
    if args.get("tuner_type") == "lora":
        of_adapter = {"dim": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout"}
        stated = {name: args.get(argument) for name, argument in of_adapter.items()}
    if not isinstance(stated, Mapping):
        return None
    return {
        "peft_type": LORA,
        "r": stated.get("dim"),
        "lora_alpha": stated.get("alpha"),
        "lora_dropout": stated.get("dropout", 0.0),
        "use_rslora": args.get("use_rslora") is True,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }


def _name_extra_states(manifest: Manifest) -> str:
    from reshard.formats.megatron import kept_states

    return kept_states.name_extra_states(manifest)


def _translate(manifest: Manifest) -> tuple[Manifest, list[str]]:
    from reshard.formats.megatron import translate

    return translate.translate(manifest)


class Megatron(Writer):
    """Megatron-LM's directory: a folder per model-parallel rank, or torch_dist."""

    name = NAME
    load_line = "--load {path}"
    options = (
        *(
            "tp",
            "pp",
            "ep",
            "dp",
            "cp",
            "etp",
            "vpp",
            "stage_layers",
            "make_vocab_size_divisible_by",
        ),
        *("ckpt_format", "distributed_optimizer", "optim_sharding", "adam"),
        *("transformer_impl", "extra_state"),
    )
    random_states = "own"
    has_fixed_names = True
    needs_shapes = False
    keeps_grid_of = (NAME,)

    def has_separate_masters(self, _source: Manifest, _options: TargetOptions) -> bool:
        """Return True: optimizers of a model in 16 bits update fp32 copies."""
        return True

    def resolve(self, request: Request, source: Manifest, options: TargetOptions) -> Request:
        """Return the request with the directory's form, grid and vocabulary.

        Raises:
            UsageError: ``--stage-layers`` is not a list of numbers.
        """
        from reshard.formats.megatron.arguments import Arguments
        from reshard.formats.megatron.write.resolved import MegatronTarget
        from reshard.layouts.model_parallel.sizes import parse_stage_layers

        args, sizes = _read_args(source), request.parallel
        virtual = options.vpp
        if virtual is None:
            # The source's chunks divide the layers of its own stages; other stages start with one
            # chunk.
            keeps = args.get("pipeline_model_parallel_size") == sizes.pipeline
            virtual = (args.get("virtual_pipeline_model_parallel_size") if keeps else None) or 1
        stage_layers, mtp_at = parse_stage_layers(options.stage_layers), None
        own = Arguments(source.origin.path, args)
        has_same_stages = (own.pp, own.vp) == (sizes.pipeline, virtual)
        if stage_layers is None and own.states_layers and has_same_stages:
            stage_layers = tuple(chain.from_iterable(own.list_layers()))
            mtp_at = own.locate_mtp(len(stage_layers))
        distributed = options.distributed_optimizer
        if distributed is None:
            distributed = args.get("use_distributed_optimizer") is True
        is_local = args.get("transformer_impl") == "local"
        return replace(
            MegatronTarget.of(request),
            sizes=replace(sizes, virtual=virtual),
            form=options.ckpt_format
            or ("torch_dist" if source.origin.form in _OF_DCP else "torch"),
            stage_layers=stage_layers,
            mtp_at=mtp_at,
            distributed=distributed,
            sharding=options.optim_sharding,
            adam=options.adam,
            impl=options.transformer_impl or ("local" if is_local else "transformer_engine"),
            keeps_names=source.origin.format == NAME and options.transformer_impl is None,
            divisible=(
                options.make_vocab_size_divisible_by
                or _get_multiple(source)
                or _keep_rows(source, sizes.tensor)
                or _DIVISIBLE
            ),
            module_dtype=request.dtype or _find_dtype_of_module(source, args),
        )

    def describe(self, request: Request) -> str:
        """Return the form and the grid."""
        target = _as_target(request)
        return " ".join(filter(None, (target.form, str(target.sizes))))

    def rename(self, conversion: StateConversion, names: NameOptions) -> Naming:
        """Return the state under Megatron's names, with the description of its model.

        Raises:
            UsageError: nothing states what the model is.
            UnsupportedError: there is no table of the model.
        """
        from reshard.containers.pickles import script_values
        from reshard.layouts.model_parallel import names as renaming
        from reshard.layouts.model_parallel.architecture import Described
        from reshard.layouts.model_parallel.rules import add_user_rules, load_whole_table
        from reshard.naming import tables
        from reshard.naming.config import describe_config

        manifest, source = conversion.manifest, conversion.source
        if manifest.origin.format == NAME:
            table = add_user_rules(load_whole_table(NAME), names.rules)
            traits = tables.describe_source(manifest, source.names)
            namespace = manifest.train.objects.get("args")
            saved = namespace.state if script_values.is_namespace(namespace) else {}
            # The config has what JSON can state; the saved attributes add enums and dtypes as they
            # were.
            args = {**manifest.train.config, **saved}
            if traits is None:  # verl, NeMo 2 and ms-swift save no arguments of the model
                family, traits = describe_config(manifest, names, conversion.request.model_hint)
                args |= family.make_args(traits)
            described = Described(table, tables.build_architecture(traits, names), args)
            return _trim(Naming(manifest, described=described), _as_target(conversion.request))
        manifest, traits, family = tables.rename_to_hf_first(
            manifest, source.names, names, conversion.request.model_hint
        )
        table = add_user_rules(family.table, names.rules)
        renamed = renaming.rename_from_hf(manifest, table, traits.make_architecture())
        notes = (*renamed.notes, f"renamed to Megatron's names, by the table of {family.name}")
        described = Described(
            table, tables.build_architecture(traits, names), family.make_args(traits)
        )
        named = Naming(renamed.manifest, notes, described=described, merged=renamed.merged)
        return _trim(named, _as_target(conversion.request))

    def adapt(self, conversion: S) -> S:
        """Return the conversion with what ranks of Megatron saved beside tensors."""
        from reshard.formats.megatron import kept_states

        return kept_states.adapt(conversion)

    def list_own_entries(self, request: Request) -> Sequence[Entry]:
        """Return the extra states of modules."""
        return _as_target(request).rank_states.entries

    def lay_out(self, state: WritableState, request: Request) -> LaidOut:
        """Lay out the directory."""
        from reshard.formats.megatron import write

        if request.described is None:
            raise AssertionError("`rename` describes the model")
        return write.lay_out(state, _as_target(request), request.described)


def _as_target(request: Request) -> MegatronTarget:
    from reshard.formats.megatron.write.resolved import MegatronTarget

    return MegatronTarget.of(request)


def _find_dtype_of_module(source: Manifest, args: Mapping[str, Any]) -> DType | None:
    """Return the dtype in which a run computes, if its files have the masters alone."""
    if source.origin.form != FSDP_DTENSOR:
        return None
    return next((dtype for name, dtype in _PRECISIONS.items() if args.get(name) is True), None)


def _get_multiple(source: Manifest) -> int:
    """Return the multiple of the vocabulary that a run states, or one that came from Megatron."""
    from reshard.formats.megatron.translate import DIVISIBLE

    config = source.train.config
    stated = config.get(DIVISIBLE) if isinstance(config, Mapping) else None
    return stated if type(stated) is int and stated > 0 else 0


def _keep_rows(source: Manifest, tensor_ranks: int) -> int:
    # This keeps the rows of a source of Megatron whose program states no multiple.
    if source.origin.format != NAME:
        return 0
    from reshard.formats.megatron.names import EMBEDDING

    embedding = source.entries.get((PARAM, EMBEDDING))
    rows = embedding.shape[0] if embedding else 0
    return 0 if rows % tensor_ranks else rows // tensor_ranks


def _trim(named: Naming, wanted: MegatronTarget) -> Naming:
    from reshard.layouts.model_parallel import vocabulary

    known = named.described
    if known is None or known.architecture.vocab is None:
        return named
    vocab_size, layers = known.architecture.vocab, known.architecture.layers
    rows = round_up(vocab_size, wanted.divisible * wanted.sizes.tensor)
    constants = {"layers": layers} if layers else {}
    manifest, removed = vocabulary.cut_rows(named.manifest, known.table, constants, rows)
    note = f"removed {removed} padding rows from the vocabulary, which has {vocab_size} entries"
    return named._replace(manifest=manifest, notes=(*named.notes, *([note] * bool(removed))))


FORMAT = Format(
    name=NAME,
    detect=detect,
    read=_read,
    ignored_hints=("key", "wrap"),
    sources={
        NAME: Source(
            writer=NAME,
            names=ModelNames(
                describe=_describe_model, describe_adapter=_describe_adapter, of_own_models=True
            ),
            name_own_parts=_name_extra_states,
            translate=_translate,
        )
    },
    writers=(Megatron(),),
    claims=is_run,
    requires=("dcp",),
)
