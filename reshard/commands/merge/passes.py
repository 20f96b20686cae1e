"""The passes of a merge: each returns a changed conversion, and appends to its notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard import formats, naming
from reshard.commands.merge.options import FILL, MergeOptions
from reshard.commands.output import is_single_file
from reshard.commands.passes import apply_names
from reshard.containers import safetensors_shards as writer
from reshard.containers.json_files import format_json
from reshard.core import keys
from reshard.core.box import Index
from reshard.core.location import get_directory, note_outside
from reshard.core.manifest import WEIGHT_KINDS, Skeleton, find_main_dtype
from reshard.errors import CorruptError, IncompleteError, UsageError
from reshard.formats.base import Conversion
from reshard.model import ModelHint
from reshard.model import adapter_names as adapters
from reshard.model.model_order import list_missing_in_layers, refuse_other_shapes
from reshard.naming import published
from reshard.naming.published import ModelConfig, may_be_published
from reshard.system.files import SourceFiles, read_small_file
from reshard.system.paths import as_path
from reshard.tensors import replicas, schedule_free, weights
from reshard.tensors.weights import Tied, Weights
from reshard.training import companion_files, copied_files, sentence_modules
from reshard.training.companion_files import Companions, choose_stem, is_of_diffusers, match_config
from reshard.units import abridge, counted

if TYPE_CHECKING:
    from reshard.tensors.adapters.config import AdapterConfig

_NO_CONFIG = (
    "there is no config.json beside the checkpoint, and transformers cannot load the output without"
    " one; copy the model's config.json and tokenizer into the output, or merge with --hf-dir DIR"
)


class Adapter(NamedTuple):
    """An adapter: its name, its configuration, the files beside its weights, and notes on it."""

    name: str
    config: AdapterConfig
    texts: dict[str, bytes]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Addition:
    """The changes that an adapter made to its base.

    Args:
        revision: the commit of the base model on the Hub; empty if it is not known.
        scales: factor of a product -> the number of weights that one with this factor was added to.
        dora: the number of weights with DoRA magnitudes.
        from_masters: the number of tensors of the adapter that come from fp32 masters.
        replaced: the weights that the adapter stores as a whole.
        added: the replaced weights that the base does not have.
        token_rows: embedding -> the number of rows that come from the adapter.
        worker_nbytes: the memory that each worker needs for the sums, in bytes.
    """

    adapter: str
    base: str
    revision: str
    scales: Mapping[str, int]
    dora: int
    from_masters: int
    replaced: Sequence[str]
    added: Sequence[str]
    token_rows: Mapping[str, int]
    worker_nbytes: int

    @property
    def merged(self) -> int:
        """The number of weights that a product was added to."""
        return sum(self.scales.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge(Conversion):
    """The conversion of a checkpoint to its full weights.

    Args:
        path: the first path that the user named as the source.
        edited: a record of the edits of names.
        aliases: names of tied weights that transformers leaves out -> the name that is written;
            None if no form of the model was chosen.
        shapes: shapes that transformers gives the tensors in files; empty if nothing states them.
        has_config_of_other_model: whether the weights are known not to be those of its config.
        filled: the weights that come from another model.
        tied: further names of tied weights; see the option.
        untied: whether tied weights are written as copies.
        adapter: the PEFT adapter to write; None: the whole model.
        addition: what the adapter changed in the base that it was added to; None: there is no base.
        worker_nbytes: the memory that each worker needs for quantised weights or means, in bytes.
    """

    options: MergeOptions
    path: Path
    output: Path
    edited: keys.Edited
    aliases: Mapping[str, str] | None = None
    shapes: Mapping[str, Index] = field(default_factory=dict)
    companions: Companions = Companions(None, None, ())
    has_config_of_other_model: bool = False
    filled: list[str] = field(default_factory=list)
    weights: Weights = field(default_factory=Weights)
    tied: Tied
    untied: bool = False
    skeleton: Skeleton = Skeleton((), ())
    adapter: Adapter | None = None
    addition: Addition | None = None
    worker_nbytes: int = 0

    @property
    def computed_nbytes(self) -> int:
        """The memory that each worker needs for all values that are computed, in bytes."""
        return self.worker_nbytes + (self.addition.worker_nbytes if self.addition else 0)

    @property
    def is_directory(self) -> bool:
        """Whether the output is a directory for transformers, not a single file."""
        return not is_single_file(self.output)

    def list_config_places(self) -> list[Path]:
        """Return the directories where the model's config may be: the checkpoint's, the run's."""
        directory = get_directory(self.manifest.origin.path)
        near = [directory, directory.resolve().parent]
        return [self.path, *near] if self.path.is_dir() and self.path != directory else near


def compute_averaged(merge: Merge) -> Merge:
    """Return the merge with the averaged weights of a schedule-free optimizer, if it has one."""
    options = merge.options
    manifest, note = schedule_free.average(
        merge.manifest, options.schedule_free, merge.tied, options.replicas
    )
    if not note:
        return merge
    merge.notes.derived.append(note)
    nbytes = max(merge.worker_nbytes, schedule_free.WORKER_NBYTES)
    return replace(merge, manifest=manifest, worker_nbytes=nbytes)


def refuse_other_model(merge: Merge) -> Merge:
    """Return the merge, if the model that the user named has the shapes of the checkpoint.

    Published weights, and those of programs with other names, are not compared.

    Raises:
        UsageError: a weight has another shape in the model.
    """
    manifest, options = merge.manifest, merge.options
    has_other_names = may_be_published(manifest) or merge.source.names.may_differ(manifest)
    if options.model is None or has_other_names:
        return merge
    bare = keys.edit(manifest, keys.Edits(strip_wrappers=options.edits.strip_wrappers)).manifest
    refuse_other_shapes(bare.weight_shapes, ModelHint(options.model, options.wrap).shapes())
    return merge


def find_companions(merge: Merge) -> Merge:
    """Return the merge with the model's config and the files beside it."""
    near, options = merge.list_config_places(), merge.options
    own = copied_files.find_hooked_folder(merge.manifest)
    if options.fill_missing_from:
        near.append(get_directory(options.fill_missing_from))
    if options.quantise_like:
        near.append(get_directory(options.quantise_like))
    if options.merge_lora:
        near.append(get_directory(options.merge_lora))
    try:
        return replace(
            merge, companions=companion_files.find_companions(options.hf_dir or own, near)
        )
    except CorruptError:
        if merge.is_directory:
            raise
        return merge  # one file of weights needs no config


def rename(merge: Merge) -> Merge:
    """Return the merge under the names of the output, with a config if one was derived."""
    options, companions, own = merge.options, merge.companions, merge.source.names
    wanted = naming.NameOptions(
        names=options.names,
        family=options.family,
        rules=options.rules,
        vocab_size=options.vocab_size,
        keep_padding=options.keep_padding,
        config=companions.config,
    )
    model = str(companions.directory) if companions.directory else None
    if not (merge.is_directory or options.names or options.family):
        # A directory is for transformers, so its names are chosen; a file keeps the source's.
        merge.notes.warnings += naming.explain_source_names(merge.manifest, own, wanted, model)
        wanted = naming.prefer_source(wanted)
    # Slots of another shape than their weight (Adafactor's) could not be converted.
    kept = merge.manifest.with_entries(merge.manifest.of_kind(*WEIGHT_KINDS))
    chosen = naming.choose_names(kept, own, wanted, model)
    if chosen.config is not None:
        companions = replace(companions, config=dict(chosen.config))
    return replace(apply_names(merge, chosen), companions=companions)


def rename_adapter(merge: Merge) -> Merge:
    """Return the merge of an adapter under Hugging Face's names, with which PEFT loads it.

    Raises:
        UsageError: nothing states the model, on which these names depend.
    """
    names, manifest = merge.source.names, merge.manifest
    if not names.of_own_models:
        return merge
    given = merge.options.hf_dir  # it may have the adapter's configuration alone
    if given is None or (given / "config.json").is_file():
        merge = find_companions(merge)
    is_stated = merge.companions.config or names.describe(manifest)
    if names.describe_adapter(manifest) and not is_stated and merge.options.names != "source":
        raise UsageError(
            manifest.origin.path,
            "has an adapter under Megatron's names, and no file states which Hugging Face model"
            " this is",
            "pass the directory of the base model, with its config.json, as --hf-dir",
        )
    return replace(rename(merge), naming=None)


def choose_form(merge: Merge) -> Merge:
    """Return the merge with the names that transformers writes, or those of its model in memory.

    Wrapper prefixes are removed first, and the user's edits apply to the result.
    """
    options, companions = merge.options, merge.companions
    stated = merge.manifest.quantisation
    if stated is not None and not stated.decoded:
        return merge  # codes and scales: the names of the release, which config.json refers to
    named = merge.naming or naming.Naming(merge.manifest)
    has_own_names = named.config is None and merge.source.names.may_differ(merge.manifest)
    # transformers reads safetensors files only: of other files, a module expects its names.
    keeps_names = has_own_names or merge.output.suffix in formats.PLAIN_SUFFIXES
    names = options.names or ("source" if keeps_names else None)
    if names == "source":
        return merge
    config = None
    if companions.config is not None:
        is_file = named.config is None
        config = ModelConfig(companions.config, companions.directory if is_file else None)
    bare = keys.edit(merge.manifest, keys.Edits(strip_wrappers=options.edits.strip_wrappers))
    form = published.choose_form(bare.manifest, config, names)
    merge.notes.derived += form.notes
    merge.notes.warnings += form.warnings
    return replace(
        merge,
        manifest=form.manifest,
        edited=bare,
        aliases=form.aliases,
        shapes=form.shapes,
        has_config_of_other_model=form.is_other_model,
    )


def edit_names(merge: Merge) -> Merge:
    """Return the merge with the user's edits of names."""
    edits, stripped = merge.options.edits, merge.edited.stripped
    if merge.aliases is not None:  # `choose_form` has removed the wrappers
        edits = replace(edits, strip_wrappers=False)
    edited = keys.edit(merge.manifest, edits)
    edited.stripped = [*stripped, *edited.stripped]
    merge.notes.warnings += (f"{option}: matches no name" for option in edited.unmatched)
    return replace(merge, manifest=edited.manifest, edited=edited)


def fill(merge: Merge) -> Merge:
    """Return the merge with the weights that the checkpoint lacks, from the model that has them."""
    options = merge.options
    if not options.fill_missing_from:
        return merge
    from reshard.commands.merge import filling

    path = as_path(options.fill_missing_from)
    base, decoded = filling.read_model(path, FILL, options.allow_pickle)
    manifest, filled, notes = filling.fill(merge.manifest, base, path)
    merge.notes.derived += decoded
    merge.notes.warnings += notes
    return replace(merge, manifest=manifest, filled=filled)


def choose_weights(merge: Merge) -> Merge:
    """Return the merge with the weights to write, each with its dtype."""
    options = merge.options
    chosen = weights.select(merge.manifest, options.dtype, options.keep_fp32)
    return replace(merge, weights=chosen)


def note_adapters(merge: Merge) -> Merge:
    """Note that the weights of LoRA layers stay separate from those that they adapt."""
    names = [entry.fqn for entry, _ in merge.weights.tensors]
    source = merge.manifest.origin.path
    merge.notes.warnings[:0] = adapters.explain_separate(names, source, "OUTPUT")
    return merge


def compare_copies(merge: Merge) -> Merge:
    """Return the merge with aliases of tied weights resolved, after a comparison of all copies."""
    chosen, manifest, options = merge.weights, merge.manifest, merge.options
    with SourceFiles(manifest.files) as pool:
        untied = weights.resolve_ties(
            chosen,
            manifest,
            config=merge.companions.config,
            policy=merge.tied,
            pool=pool,
            aliases=merge.aliases,
        )
        entries = [entry for entry, _ in chosen.tensors]
        differing = replicas.check(entries, manifest.files, pool, options.replicas)
    merge.notes.warnings += [*chosen.notes, *differing]
    return replace(merge, untied=untied)


def check_missing(merge: Merge) -> Merge:
    """Warn about weights that the model has, and the output lacks; refuse incomplete layers.

    The model is known only if its names were compared (`choose_form`), because building it takes
    seconds. ``verify --model`` compares any model.

    Raises:
        IncompleteError: the layers lack matrices.
    """
    edits, chosen = merge.options.edits, merge.weights
    if edits.rename or edits.include or edits.exclude:
        return merge  # the names or the selection are the user's
    named = {entry.fqn for entry, _ in chosen.tensors} | chosen.dropped_aliases.keys()
    missing = [fqn for fqn in merge.shapes if fqn not in named.union(merge.manifest.absent)]
    if of_layers := list_missing_in_layers(missing, named, merge.shapes):
        count = counted(len(of_layers), "tensor")
        complete = f"take them from another model with {FILL} MODEL"
        raise IncompleteError(
            merge.manifest.origin.path,
            f"the model of config.json has {count} in its layers that the checkpoint lacks:"
            f" {abridge(of_layers)}",
            f"merge the base alone first, and {complete}"
            if merge.addition
            else f"{complete}, or write what the checkpoint has, under its own names, with"
            " --names source",
        )
    if missing:
        merge.notes.warnings.append(
            f"the model of config.json has {counted(len(missing), 'tensor')} that the checkpoint"
            f" lacks, and transformers gives them random values: {abridge(missing)}."
            f" {FILL} MODEL takes them from another model"
        )
    return merge


def lay_out(merge: Merge) -> Merge:
    """Return the merge with the files of the output."""
    if merge.is_directory:
        return _lay_out_directory(merge)
    name, chosen = merge.output.name, merge.weights
    if merge.output.suffix in formats.PLAIN_SUFFIXES:
        from reshard.containers import torch_writer

        return replace(merge, skeleton=torch_writer.lay_out(name, chosen.tensors))
    # like safetensors.torch.save_model: alias -> the name under which its value is stored
    metadata = {**writer.METADATA, **chosen.dropped_aliases}
    return replace(merge, skeleton=writer.lay_out_file(name, chosen.tensors, metadata))


def _lay_out_directory(merge: Merge) -> Merge:
    texts = build_companions(merge)
    names = (entry.fqn for entry, _ in merge.weights.tensors)
    modules = sentence_modules.compare(merge.list_config_places(), names)
    merge.notes.warnings += modules.warnings
    merge = replace(
        merge, has_config_of_other_model=merge.has_config_of_other_model or modules.are_whole
    )
    if merge.companions.config is None or not merge.companions.may_copy_config:
        merge.notes.warnings.append(_NO_CONFIG)
    skeleton = writer.lay_out(
        merge.weights.tensors,
        max_shard_bytes=merge.options.max_shard_bytes,
        texts=texts,
        metadata=writer.METADATA,
        stem=choose_stem(merge.companions.config),
    )
    return replace(merge, skeleton=skeleton)


def build_companions(merge: Merge) -> dict[str, bytes]:
    """Return the files beside the weights by name; changes of the config are noted."""
    tensors, companions = merge.weights.tensors, merge.companions
    texts = {path.name: read_small_file(path) for path in companions.others}
    merge.notes.warnings += note_outside(companions.outside)
    if companions.config is None or not companions.may_copy_config:
        return texts
    if is_of_diffusers(companions.config):  # it states no dtype and no vocabulary
        return texts | {"config.json": format_json(companions.config)}
    dtype = find_main_dtype(
        (dtype, entry.numel) for entry, dtype in tensors if dtype.family == "float"
    )
    config, changes = match_config(
        companions.config,
        tensors,
        dtype.name,
        untied=merge.untied,
        known=merge.shapes,
    )
    if companions.directory is None:  # the config was built for these weights
        kind = companions.config["architectures"][0]
        changes = [f"config.json is built from the source: a {kind}"]
    merge.notes.derived += changes
    return texts | {"config.json": format_json(config)}
