"""The interface of a format: one object that finds, reads and writes checkpoints of one kind.

A package of this project or of a third party declares a `Format`; `registry` collects them. No
module outside of a format's package names the format: it asks the objects here. A `Conversion` is
the value that the passes of a command extend and annotate on the way from a source to a `Writer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, TypeVar

from reshard.core.location import Location
from reshard.core.manifest import Entry, Manifest, Skeleton
from reshard.naming.options import ModelNames

if TYPE_CHECKING:
    from typing_extensions import Self

    from reshard.containers.skeletons import LaidOut
    from reshard.formats.request import Request
    from reshard.formats.target_options import StateDictType, TargetOptions
    from reshard.layouts.model_parallel.traits import Traits
    from reshard.model import ModelShapes
    from reshard.naming.options import NameOptions, Naming
    from reshard.training.rng import RankRng
    from reshard.training.state import WritableState
    from reshard.training.trainer_run import TrainerRun

RandomStates = Literal["none", "per rank", "own"]
S = TypeVar("S", bound="StateConversion")


@dataclass(frozen=True, slots=True)
class ReadHints:
    """The user's options for reading a source, as in `formats.read`; and the live model.

    Args:
        alike: see `formats.read`.
    """

    tag: str | None = None
    key: str | None = None
    model: str | None = None
    wrap: str | None = None
    rules: Path | None = None
    live: ModelShapes | None = None
    alike: Mapping[str, str] = field(default_factory=dict)


_MEGATRON_ARGS = {"num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"}


def has_megatron_args(manifest: Manifest) -> bool:
    """Return whether the training script saved Megatron's arguments, as Megatron-DeepSpeed does."""
    return isinstance(manifest.train.client.get("args"), Mapping)


def describe_by_megatron_args(manifest: Manifest) -> Traits | None:
    """Return what Megatron's arguments, a Namespace, state about the model."""
    args = manifest.train.client.get("args")
    state = args.get("state") if isinstance(args, Mapping) else None
    if isinstance(state, Mapping) and state.keys() >= _MEGATRON_ARGS:
        from reshard.layouts.model_parallel.megatron_traits import parse_args

        return parse_args(state, manifest.origin.path)
    return None


BY_MEGATRON_ARGS = ModelNames(may_differ=has_megatron_args, describe=describe_by_megatron_args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What commands need to know about checkpoints with a given ``Origin.format``.

    Args:
        writer: name of the writer that keeps the layout; None: the user must choose one.
        choose_writer: returns that name where it depends on the files of the checkpoint.
        pointer: name of the file in the run directory from which the framework takes the name of
            the checkpoint to resume from; empty: the framework takes the checkpoint's own path.
        names: how the names of parameters may differ from those of Hugging Face's model.
        name_own_parts: returns how a report calls the parts of a checkpoint that only writers of
            the same format have a place for; empty: there are none.
        translate: returns a training state with what is beside its tensors in the form that
            programs of other formats load, and notes; None: it has that form.
        is_whole: whether every rank loads all files, if the checkpoint states no ranks.
    """

    writer: str | None = None
    choose_writer: Callable[[Manifest], str | None] | None = None
    pointer: str = ""
    names: ModelNames = BY_MEGATRON_ARGS
    name_own_parts: Callable[[Manifest], str] | None = None
    translate: Callable[[Manifest], tuple[Manifest, list[str]]] | None = None
    is_whole: bool = False

    def has_foreign_names(self, writer: Writer) -> bool:
        """Return whether what loads the writer's files has other names than this source."""
        return self.names.of_own_models and self.writer != writer.name


class Writer(ABC):
    """One layout that a training state can be written in: a choice of ``split --to``.

    Attributes:
        name: the name for ``--to``.
        options: the options, among those that not every writer uses, that this one uses.
        random_states: "per rank": there is a place for one state per rank. "own": the writer
            decides itself what becomes of them, in `adapt`.
        weights_alone: whether weights without an optimizer are complete: nothing that loads the
            layout expects more.
        starts_optimizer: whether a new Adam can be written (``--init-optimizer zeros``).
        is_tagged: whether the state files are in a directory named by the step.
        writes_file: whether the layout can be one file.
        stores_masters: whether the files have master weights beside the module's.
        needs_order: whether optimizer states refer to parameters by their position in the model.
        has_fixed_names: whether the files have parameter names of their own, which ``--names``
            cannot change.
        needs_shapes: whether a model that the user names must be built; False where the writer's
            own tables describe the model.
        has_data_parallel_ranks: False where files depend on model-parallel ranks alone.
        keeps_grid_of: sources (``Origin.format``) whose model-parallel sizes are the default.
        keeps_wrappers_of: sources whose program loads the output with the same code, so that
            wrapper prefixes stay in the names.
        load_line: the line of a script or command that loads the files, for reports, with
            ``{path}`` for their directory; empty: there is no single one.
        live_line: the line with which the same program loads any checkpoint, ``{path}``, as if it
            were written in this layout; empty: there is none.
    """

    name: str
    load_line: str = ""
    live_line: str = ""
    options: tuple[str, ...] = ()
    random_states: RandomStates = "none"
    weights_alone = False
    starts_optimizer = True
    is_tagged = False
    writes_file = False
    stores_masters = False
    needs_order = False
    has_fixed_names = False
    needs_shapes = True
    has_data_parallel_ranks = True
    keeps_grid_of: tuple[str, ...] = ()
    keeps_wrappers_of: tuple[str, ...] = ()

    @abstractmethod
    def lay_out(self, state: WritableState, request: Request) -> LaidOut:
        """Return the files to write, and notes on what is derived or dropped.

        Raises:
            ReshardError: the layout cannot hold the state, or cannot be written as requested.
        """

    def choose_stage(self, given: int | None, source: int | None) -> int:
        """Return the ZeRO stage to write."""
        return next((stage for stage in (given, source) if stage is not None), 2)

    def choose_state_dict_type(self, _source: Manifest, _run: TrainerRun | None) -> StateDictType:
        """Return the FSDP state dict type to write, if the user names none."""
        return "sharded"

    def has_separate_masters(self, _source: Manifest, _options: TargetOptions) -> bool:
        """Return whether the optimizer updates fp32 copies and not the module's parameters."""
        return False

    def writes_zero(self, request: Request) -> bool:
        """Return whether a DeepSpeed engine with a ZeRO stage loads the output."""
        return request.separate_masters and "zero_stage" in self.options

    def resolve(self, request: Request, _source: Manifest, _options: TargetOptions) -> Request:
        """Return the request with what this writer alone derives from source and options.

        Raises:
            UsageError: an option has a value that the writer cannot use.
        """
        return request

    def numbers_parameters(self, _request: Request) -> bool:
        """Return whether the requested files may refer to parameters by their position."""
        return True

    def needs_every_state(self, _request: Request) -> bool:
        """Return whether what loads the files requires a state of every trainable parameter."""
        return False

    def find_random_states(self, _request: Request) -> RandomStates:
        """Return which place the requested files have for random states; see ``random_states``."""
        return self.random_states

    def describe_load(self, _request: Request) -> str:
        """Return the line that loads the requested files; see ``load_line``."""
        return self.load_line

    def rename(self, conversion: StateConversion, names: NameOptions) -> Naming:
        """Return the state under the parameter names that the files have.

        Raises:
            UsageError: nothing states what the model is.
            UnsupportedError: there is no table of the model.
        """
        from reshard import naming

        source = conversion.source
        if not source.has_foreign_names(self):
            names = naming.prefer_source(names)
        model = conversion.request.model_hint
        return naming.choose_names(conversion.manifest, source.names, names, model)

    def adapt(self, conversion: S) -> S:
        """Return the conversion with what only this format knows to change before layout.

        Raises:
            ReshardError: a part of the state that must be kept cannot be.
        """
        return conversion

    def keeps_value(self, _name: str, _request: Request) -> bool:
        """Return whether weights without an optimizer are written with this value beside them.

        Args:
            name: one of `torch_state_dict.list_values`. A writer that keeps values notes in
                `lay_out` which ones it cannot store.
        """
        return False

    def copies_values(self, _conversion: StateConversion) -> bool:
        """Return whether all values beside the tensors are copied unchanged.

        Random states are among them, so it is false if the user asks for others.
        """
        return False

    def list_own_entries(self, _request: Request) -> Sequence[Entry]:
        """Return entries of the output that the training state does not contain."""
        return ()

    def describe(self, request: Request) -> str:
        """Describe the layout in more detail than the writer's name does, for reports."""
        return str(request.grid or request.parallel)

    def settings_of_run(self, _request: Request) -> Mapping[str, str]:
        """Return the settings to change in the state of a run of ``python -m trainer``."""
        return {}

    def find_companion_folders(
        self, skeleton: Skeleton, _state: WritableState, request: Request
    ) -> tuple[str, str]:
        """Return the output folders for files beside the checkpoint and above it.

        Returns:
            (folder for the files in the checkpoint's directory, folder for those of the directory
            above); empty names mean the output directory itself.
        """
        run = request.run
        if run is not None and skeleton.files[-1].name.startswith(f"{run.tag}/"):
            return run.tag, run.tag
        parent = PurePosixPath(skeleton.files[-1].name).parent
        return (str(parent) if self.is_tagged else ""), ""

    def place(self, skeleton: Skeleton, _state: WritableState, _destination: str) -> Skeleton:
        """Return the files with their paths below the destination that the user named."""
        return skeleton


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One checkpoint format.

    Args:
        name: the name for ``--from``.
        detect: whether a checkpoint of the format is directly at a location; decides by names of
            files, or by their first bytes.
        read: reads headers and pickles, never tensor elements, into a manifest.
        sources: ``Origin.format`` -> what commands need to know about such a checkpoint.
        writers: the layouts of the format.
        detect_loosely: like ``detect``, by evidence that other formats may show as well; tried
            after ``detect`` of all formats.
        claims: whether a directory belongs to a run of the format although no checkpoint is
            directly in it; see ``yields_to_runs``.
        is_generic: whether runs of other formats may contain files of this format; extensions
            are tried before such a format.
        yields_to_runs: whether the format is not looked for in a directory that another one claims.
        ignored_hints: which of the user's options ``key`` and ``wrap`` the reader does not use;
            reports say so, and a key is refused.
        reads_tags: whether ``read`` resolves ``--tag`` itself, and lists the tags in its errors.
        suffixes: suffixes of files that are weights by themselves.
        requires: names of format packages that this one is built on.
    """

    name: str
    detect: Callable[[Location], bool]
    read: Callable[[Location, ReadHints], Manifest]
    sources: Mapping[str, Source]
    writers: tuple[Writer, ...] = ()
    detect_loosely: Callable[[Location], bool] | None = None
    claims: Callable[[Location], bool] | None = None
    is_generic: bool = False
    yields_to_runs: bool = False
    ignored_hints: tuple[str, ...] = ()
    reads_tags: bool = False
    suffixes: tuple[str, ...] = ()
    requires: tuple[str, ...] = field(default=())


@dataclass(slots=True)
class Notes:
    """Notes for the report about parts of the state, in the order in which passes add them."""

    kept: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A checkpoint during its conversion to another layout.

    A pass returns a changed copy, and appends to ``notes``, which all copies share.

    Args:
        manifest: the source, as the passes so far have changed it.
        source: what is known about checkpoints of the source's format.
        naming: the names under which weights are written; None before they are chosen.
    """

    manifest: Manifest
    source: Source
    naming: Naming | None = None
    notes: Notes = field(default_factory=Notes)

    def with_manifest(self, manifest: Manifest) -> Self:
        """Return a copy with a changed manifest."""
        return replace(self, manifest=manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConversion(Conversion):
    """The conversion of a training state, with its optimizer.

    Args:
        options: the options that only some writers use.
        request: the options of the output, with nothing left open.
        shapes: the model that the user named, or that a config beside the source describes.
        rng: the random states to write, in rank order.
        slots_left_out: how many optimizer slots of the source the options leave out.
    """

    writer: Writer
    options: TargetOptions
    request: Request
    shapes: ModelShapes | None = None
    rng: tuple[RankRng, ...] = ()
    slots_left_out: int = 0
