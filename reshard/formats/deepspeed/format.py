"""DeepSpeed's checkpoints as one format: native and universal directories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from reshard.core.location import Location
from reshard.core.manifest import Manifest
from reshard.errors import FETCH_MISSING, IncompleteError, UsageError
from reshard.formats.base import (
    Format,
    ReadHints,
    Source,
    Writer,
    describe_by_megatron_args,
    has_megatron_args,
)
from reshard.formats.deepspeed import directory
from reshard.formats.deepspeed.directory import NAME, detect
from reshard.naming.options import ModelNames

if TYPE_CHECKING:
    from reshard.containers.skeletons import LaidOut
    from reshard.formats.base import RandomStates, S
    from reshard.formats.request import Request
    from reshard.formats.target_options import TargetOptions
    from reshard.layouts.model_parallel.traits import Traits
    from reshard.model.weight_decay import Division, FindDivisions
    from reshard.training.state import WritableState

UNIVERSAL = "deepspeed-universal"


def _read(location: Location, hints: ReadHints) -> Manifest:
    from reshard.formats import adjacent_files

    tag = directory.locate(location, hints.tag)

    def find_divisions() -> tuple[Division, ...]:
        from reshard.model.weight_decay import divide_parameters

        model = adjacent_files.describe_trained_model(tag, hints.model)
        return divide_parameters(model) if model else ()

    manifest = _read_state(tag, hints.rules, find_divisions)
    manifest = adjacent_files.add_companions(manifest, location)
    return adjacent_files.add_run_document(manifest, tag)


def _read_state(location: Location, rules: Path | None, find_divisions: FindDivisions) -> Manifest:
    if "zero" in location.folders:
        from reshard.formats.deepspeed import universal

        return universal.read(location, rules)
    from reshard.formats.deepspeed import tag_directory

    files = directory.list_files(location)
    first = tag_directory.open_first(files.ranks[0])
    if first.root.get("ds_autoep_layers"):
        from reshard.formats.deepspeed.experts import autoep

        _check_rules(rules)
        return autoep.read(files, first)
    if not files.experts and (files.expert_optim or first.root.get("num_experts")):
        raise IncompleteError(
            location,
            "is of a run with experts, but no file of an expert is there (layer_*_expert_*)",
            FETCH_MISSING,
        )
    if files.is_parallel or first.model_ranks > 1:
        from reshard.formats.deepspeed import parallel

        return parallel.read(files, first, rules)
    _check_rules(rules)
    if files.has_experts:
        from reshard.formats.deepspeed.experts import reader

        return reader.read(files, first)
    return tag_directory.read(files.ranks[0], first, find_divisions=find_divisions)


def _check_rules(rules: Path | None) -> None:
    """Report a mistake in a user's table, although no rank shares a parameter."""
    if rules:
        from reshard.layouts.model_parallel.rules import Table, add_user_rules

        add_user_rules(Table("", ()), rules)


def _names_may_differ(manifest: Manifest) -> bool:
    from reshard.formats.deepspeed import dialects

    return has_megatron_args(manifest) or dialects.find_dialect(manifest) == dialects.NEOX


def _describe_model(manifest: Manifest) -> Traits | None:
    from reshard.formats.deepspeed import dialects, neox

    if dialects.find_dialect(manifest) != dialects.NEOX:
        return describe_by_megatron_args(manifest)
    path, args = manifest.origin.path, manifest.train.client.get("args")
    padded = args.get("padded_vocab_size") if isinstance(args, Mapping) else None
    settings = neox.read_settings(path)
    return neox.read_traits(settings, padded, path) if settings else None


def _find_spelling(manifest: Manifest) -> str | None:
    from reshard.formats.deepspeed import dialects

    return dialects.find_dialect(manifest)


_LIGHTNING_TAG = "checkpoint"  # Lightning 2.6 ``strategies/deepspeed.py``


class _DeepSpeedWriter(Writer):
    is_tagged = True
    stores_masters = True
    keeps_wrappers_of = (NAME, UNIVERSAL)

    def resolve(self, request: Request, source: Manifest, options: TargetOptions) -> Request:
        from reshard.formats.deepspeed.write.grid import DeepSpeedTarget
        from reshard.layouts.model_parallel.sizes import parse_stage_layers

        name = PurePath(source.origin.path).name
        # Lightning and Accelerate load these tags, whatever ``latest`` says.
        is_known = name == _LIGHTNING_TAG or directory.ACCELERATE_TAG.fullmatch(name)
        is_fixed = source.origin.format == NAME and is_known
        return replace(
            DeepSpeedTarget.of(request),
            tag=name if is_fixed else None,
            program=_find_program(source) if request.keeps_layout else None,
            stage_layers=parse_stage_layers(options.stage_layers),
            divisible=options.make_vocab_size_divisible_by,
            experts=options.ep,
        )

    def adapt(self, conversion: S) -> S:
        from reshard.formats.coded_values import decode_moments

        return decode_moments(conversion) if conversion.request.zero_stage else conversion


class Native(_DeepSpeedWriter):
    """DeepSpeed's native directory, for one number of ranks."""

    name = NAME
    load_line = 'engine.load_checkpoint("{path}")'
    live_line = 'reshard.deepspeed.load_checkpoint(engine, "{path}")'
    options = (
        "zero_stage",
        *("tp", "pp", "ep", "dp"),
        *("stage_layers", "make_vocab_size_divisible_by"),
    )
    needs_order = True
    keeps_grid_of = (NAME, UNIVERSAL)

    def has_separate_masters(self, _source: Manifest, _options: TargetOptions) -> bool:
        """Return True: ZeRO updates fp32 partitions."""
        return True

    def keeps_value(self, name: str, _request: Request) -> bool:
        """Return True for all but the loss scaler, which is part of the optimizer's state."""
        from reshard.state_dict.torch_state_dict import SCALER

        return name != SCALER

    def describe(self, request: Request) -> str:
        """Return the stage, and the grid of model-parallel ranks if there is one."""
        return request.describe_zero()

    def find_random_states(self, request: Request) -> RandomStates:
        """Return that only a library has a place for random states, beside the engine's files."""
        return "per rank" if request.program else "none"

    def describe_load(self, request: Request) -> str:
        """Return the line, with what DeepSpeed needs to load weights without an optimizer."""
        if not request.weights_only:
            return _LOAD_LINES.get(request.program, self.load_line)
        at_stage_3 = ", load_optimizer_states=False" if request.zero_stage == 3 else ""
        return f'engine.load_checkpoint("{{path}}", load_module_only=True{at_stage_3})'

    def lay_out(self, state: WritableState, request: Request) -> LaidOut:
        """Lay out the directory of a tag, with ``latest`` beside it.

        Raises:
            IncompleteError: nothing states the order of the model's parameters.
        """
        from reshard.formats.deepspeed import write
        from reshard.formats.parameter_kinds import mark_buffers

        if not state.manifest.ordered and not request.weights_only:
            raise IncompleteError(
                state.manifest.origin.path,
                "does not state the order of the model's parameters, by which DeepSpeed refers to"
                " them (FSDP units and safetensors files have their own order)",
                "pass the model: --model config.json|DIR|module:factory",
            )
        if request.zero_stage == 3:
            why = "ZeRO-3 stores parameters in shards but buffers whole"
            otherwise = ", or write another stage: --zero-stage 2"
            state = mark_buffers(state, request.model, why, otherwise)
        laid_out = write.lay_out(state, request)
        if request.program is None or request.weights_only:
            return laid_out
        return _add_files_of_program(laid_out, state, request)


_LOAD_LINES: dict[str | None, str] = {
    "accelerate": 'accelerator.load_state("{path}")',
    "hf-trainer": 'trainer.train(resume_from_checkpoint="{path}")',
}


def _find_program(source: Manifest) -> str | None:
    """Return the writer of the library that saved files beside the engine's; None if none did."""
    from reshard.training import trainer_run

    train = source.train
    if source.origin.format != NAME:
        return None
    if train.trainer_state is not None and not trainer_run.is_document(train.trainer_state):
        return "hf-trainer"
    # ``save_state`` writes each rank's random states, and DeepSpeed alone has no such files.
    is_named = directory.ACCELERATE_TAG.fullmatch(PurePath(source.origin.path).name)
    return "accelerate" if is_named and (train.rng_files or train.kept_files) else None


def _add_files_of_program(laid_out: LaidOut, state: WritableState, request: Request) -> LaidOut:
    from reshard.containers import skeletons
    from reshard.formats.trainers import accelerate, hf_trainer
    from reshard.training import schedules

    if request.program == "accelerate":
        ranks = request.world_size
        files = list(accelerate.lay_out_accelerate_extras(state, ranks, engine=True))
        notes = tuple(schedules.describe_changes(state.manifest, ranks))
    else:
        files = list(hf_trainer.lay_out_extras(state, request))
        notes = tuple(hf_trainer.describe_derived(state, request))
    skeleton = skeletons.join([laid_out.skeleton, *files])
    return laid_out._replace(skeleton=skeleton, notes=(*laid_out.notes, *notes))


class Universal(_DeepSpeedWriter):
    """DeepSpeed's universal directory, which any number of ranks loads."""

    name = "ds-universal"
    load_line = 'engine.load_checkpoint("{path}"), with "checkpoint": {"load_universal": true}'
    options = ("zero_stage",)
    keeps_grid_of = (NAME,)

    def numbers_parameters(self, _request: Request) -> bool:
        """Return False: a parameter is a folder with its name."""
        return False

    def lay_out(self, state: WritableState, request: Request) -> LaidOut:
        """Lay out one folder per parameter.

        Raises:
            UsageError: the optimizer is to be left out.
        """
        from reshard.formats.deepspeed import write

        if request.weights_only:
            raise UsageError(
                "--to ds-universal",
                "stores the optimizer state, one folder per parameter",
                "write only the weights with --to deepspeed, or with reshard merge",
            )
        return write.lay_out_universal(state, request)


_NAMES = ModelNames(may_differ=_names_may_differ, describe=_describe_model, spelling=_find_spelling)
FORMAT = Format(
    name=NAME,
    detect=detect,
    read=_read,
    ignored_hints=("key", "wrap"),
    sources={
        NAME: Source(writer=NAME, pointer="latest", names=_NAMES),
        UNIVERSAL: Source(writer=NAME, pointer="latest_universal", names=_NAMES),
    },
    writers=(Native(), Universal()),
    reads_tags=True,
)
