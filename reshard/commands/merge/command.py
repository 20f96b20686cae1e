"""``merge``: write the full weights of a checkpoint as safetensors, a Hugging Face model or .pt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard import formats, keys, naming, replicas, weights
from reshard.adapters import names as adapters
from reshard.commands.merge.options import MergeOptions
from reshard.commands.merge.report import MergeReport, describe
from reshard.commands.output import (
    build_page,
    check_skeleton,
    is_single_file,
    open_source,
    report_untouched,
    resolve_destination,
    write,
)
from reshard.commands.padding import note_trained_padding
from reshard.commands.page import check_page, write_page
from reshard.commands.reading import Meter
from reshard.containers import safetensors_shards as writer
from reshard.containers.json_files import format_json
from reshard.dtypes import DType
from reshard.errors import CorruptError, DifferentError, UsageError
from reshard.files import SourceFiles, read_small_file
from reshard.formats import placeholders, registry
from reshard.identity import check_identity
from reshard.location import directory_of
from reshard.manifest import WEIGHT_KINDS, Entry, Manifest, Skeleton, index_entries
from reshard.paths import as_path
from reshard.plan.planner import Plan
from reshard.training.companion_files import QUANTISED, Companions, matched_config
from reshard.training.companion_files import companions as find_companions

_NO_CONFIG = (
    "there is no config.json beside the checkpoint, and transformers cannot load this directory"
    " without one; pass the model's directory as --hf-dir DIR, or copy its config.json here"
)


def merge(
    source: formats.Paths,
    destination: str | Path,
    options: MergeOptions | None = None,
    meter: Meter | None = None,
) -> MergeReport:
    """Write the full weights of a checkpoint.

    Args:
        source: several directories if each node stored its own files.
        destination: ``*.safetensors`` or ``*.pt|.bin|.pth`` for one file, else a directory in
            Hugging Face format.
        meter: opens a progress display for a number of bytes.

    Raises:
        ReshardError: see its subclasses; the destination is then unchanged.
    """
    options = options or MergeOptions()
    began = time.perf_counter()
    report_as, sources = str(destination), formats.as_paths(source)
    is_directory = not is_single_file(destination)
    if options.adapter is not None and not is_directory:
        raise UsageError(destination, "the name is that of a file; --adapter writes a directory")
    destination = resolve_destination(destination)
    check_page(options, sources, destination)
    beside = [as_path(options.fill_missing_from)] if options.fill_missing_from else []
    with report_untouched(destination):
        manifest = open_source(
            sources, destination, options, is_directory=is_directory, beside=beside
        )
        identity = check_identity(manifest, options.trust)
        with replicas.average_replicas(manifest, options.replicas, WEIGHT_KINDS) as (
            averaged,
            means,
        ):
            job = _prepare(averaged, sources[0], destination, options, is_directory=is_directory)
            job.weights.notes += means
            report = describe(averaged, job.edited, job.weights, job.skeleton, job.plan)
            report.destination = report_as
            report.options = options.given()
            report.identity = identity
            _write(job, report, destination, options, meter)
            report.seconds = time.perf_counter() - began if report.done else 0.0
            write_page(
                options,
                lambda: build_page(report.to_json(), averaged, job.skeleton),
                written=report_as if report.done else "",
            )
    return report


def _write(
    job: _Job,
    report: MergeReport,
    destination: Path,
    options: MergeOptions,
    meter: Meter | None,
) -> None:
    """Write the output, except in a dry run, and complete the report."""
    report.peak_buffer_bytes = options.budget()[0] * 2 * job.plan.window_bytes
    report.changes = job.changes
    report.filled = job.filled
    if options.dry_run:
        return
    written = write(
        job.plan,
        job.edited.manifest,
        destination,
        options,
        is_directory=not is_single_file(destination),
        check=lambda staging: _check_output(job, staging),
        meter=meter,
    )
    report.overflowed = dict(written.outcome.overflowed)
    report.flushed = dict(written.outcome.flushed)
    report.resumed_bytes = written.resumed_bytes
    report.warnings += written.notes
    report.verified = options.verify
    report.done = True


@dataclass(slots=True)
class _Job:
    """A planned merge, of which nothing is written yet."""

    edited: keys.Edited
    weights: weights.Weights
    skeleton: Skeleton
    plan: Plan
    changes: list[str]
    filled: list[str] = field(default_factory=list)  # weights that come from another model


def _prepare(
    manifest: Manifest,
    source: Path,
    destination: Path,
    options: MergeOptions,
    *,
    is_directory: bool,
) -> _Job:
    """Decide which weights are written, under which names and in which files."""
    near = _list_config_places(source, manifest)
    if options.adapter is not None:
        return _prepare_adapter(manifest, options.adapter, near, options)
    if options.fill_missing_from:
        near.append(directory_of(options.fill_missing_from))
    try:
        companions = find_companions(options.hf_dir, near)
    except CorruptError:
        if is_directory:
            raise
        companions = Companions(None, None, ())  # one file of weights needs no config
    named = naming.choose_names(
        manifest,
        registry.describe_source(manifest).names,
        _name_options(options, companions, is_directory=is_directory),
    )
    padding = note_trained_padding(manifest, *named.trimmed) if named.trimmed else []
    if named.config is not None:
        companions = replace(companions, config=dict(named.config))
    edited = keys.edit(named.manifest, options.edits)
    filled: list[str] = []
    notes: list[str] = []
    if options.fill_missing_from:  # after the edits: --rename adapts names to those of the base
        from reshard.commands.merge import filling

        base = filling.Base.open(as_path(options.fill_missing_from), options.allow_pickle)
        edited.manifest, filled, notes = base.fill(edited.manifest)
    chosen = weights.select(edited.manifest, options.dtype, options.keep_fp32)
    _refuse_rounded_scales(companions, chosen, options)
    chosen.notes += adapters.explain_separate(entry.fqn for entry, _ in chosen.tensors)
    chosen.notes += notes
    with SourceFiles() as pool:
        untied = weights.resolve_ties(
            chosen,
            edited.manifest,
            config=companions.config,
            policy=options.tied,
            pool=pool,
        )
        entries = [entry for entry, _ in chosen.tensors]
        chosen.notes += replicas.check(entries, manifest.files, pool, options.replicas)
    skeleton, changes = _lay_out(destination, chosen, companions, options, untied=untied)
    if companions.directory is None:
        changes = []  # a config without a directory was built for these weights: nothing changed
        if companions.config is not None and is_directory:
            kind = companions.config["architectures"][0]
            changes = [f"config.json is built from the source: a {kind}"]
    job = _plan(edited, chosen, skeleton, [*named.notes, *padding, *changes], options)
    job.filled = filled
    return job


def _prepare_adapter(
    manifest: Manifest, name: str, near: Sequence[Path], options: MergeOptions
) -> _Job:
    """Plan the merge of an adapter's tensors, like `_prepare`; tied ones get all their names."""
    edited = keys.edit(manifest, options.edits)
    from reshard.commands.merge import adapter

    selected = adapter.select_adapter(edited.manifest, name, options.hf_dir, near)
    edited.manifest = selected.manifest
    chosen = weights.select(edited.manifest, options.dtype, options.keep_fp32)
    with SourceFiles() as pool:
        weights.resolve_ties(chosen, edited.manifest, config=None, policy="keep", pool=pool)
        entries = [entry for entry, _ in chosen.tensors]
        chosen.notes += replicas.check(entries, manifest.files, pool, options.replicas)
        chosen.notes += [*selected.notes, *adapter.note_untrained(entries, pool)]
    return _plan(edited, chosen, selected.lay_out(chosen), selected.changes, options)


def _plan(
    edited: keys.Edited,
    chosen: weights.Weights,
    skeleton: Skeleton,
    changes: list[str],
    options: MergeOptions,
) -> _Job:
    """Check the planned files, and plan the copies."""
    check_skeleton(skeleton)
    placeholders.refuse(edited.manifest, (entry for entry, _ in chosen.tensors))
    _, window_bytes = options.budget()
    planned = Plan(index_entries(entry for entry, _ in chosen.tensors), skeleton, window_bytes)
    return _Job(edited, chosen, skeleton, planned, changes)


def _name_options(
    options: MergeOptions, companions: Companions, *, is_directory: bool
) -> naming.NameOptions:
    return naming.NameOptions(
        # A directory is for transformers, so its names are chosen; a file keeps the source's.
        names=options.names or (None if is_directory or options.family else "source"),
        family=options.family,
        rules=options.rules,
        vocab_size=options.vocab_size,
        keep_padding=options.keep_padding,
        config=companions.config,
    )


def _list_config_places(source: Path, manifest: Manifest) -> list[Path]:
    """Return the directories where the model's config may be: the checkpoint's and the run's."""
    directory = directory_of(manifest.origin.path)
    near = [directory, directory.resolve().parent]
    return [source, *near] if source.is_dir() and source != directory else near


def _refuse_rounded_scales(
    companions: Companions, chosen: weights.Weights, options: MergeOptions
) -> None:
    """Check that ``--dtype`` does not round the scales of a quantised model.

    Its codes are integers, which are never cast: rounded scales would not fit them.

    Raises:
        UsageError: a tensor of a quantised model would be cast.
    """
    how = (companions.config or {}).get(QUANTISED)
    cast = [entry.fqn for entry, dtype in chosen.tensors if entry.dtype != dtype]
    if options.dtype and how and cast:
        method = how.get("quant_method") if isinstance(how, dict) else None
        raise UsageError(
            f"--dtype {options.dtype}",
            f"config.json says that the model is quantised ({method or 'no method given'}):"
            f" {cast[0]} would be rounded, but not the codes that it scales",
            "leave out --dtype; reshard does not dequantise",
        )


def _lay_out(
    destination: Path,
    chosen: weights.Weights,
    companions: Companions,
    options: MergeOptions,
    *,
    untied: bool,
) -> tuple[Skeleton, list[str]]:
    """Return the files of the output, and the changes to the model's config."""
    if destination.suffix in formats.PLAIN_SUFFIXES:
        from reshard.containers import torch_writer

        return torch_writer.lay_out(destination.name, chosen.tensors), []
    if destination.suffix == ".safetensors":
        # like safetensors.torch.save_model: alias -> the name under which its value is stored
        metadata = {**writer.METADATA, **chosen.dropped_aliases}
        return writer.lay_out_file(destination.name, chosen.tensors, metadata), []
    texts = {path.name: read_small_file(path) for path in companions.others}
    changes: list[str] = []
    if companions.config is None:
        chosen.notes.append(_NO_CONFIG)
    else:
        config, changes = matched_config(
            companions.config, chosen.tensors, _find_main_dtype(chosen.tensors), untied=untied
        )
        texts["config.json"] = format_json(config)
    skeleton = writer.lay_out(
        chosen.tensors,
        max_shard_bytes=options.max_shard_bytes,
        texts=texts,
        metadata=writer.METADATA,
    )
    return skeleton, changes


def _find_main_dtype(tensors: Sequence[tuple[Entry, DType]]) -> str:
    """Return the floating-point dtype that most elements have, for the config."""
    sizes: dict[str, int] = {}
    for entry, dtype in tensors:
        if dtype.family == "float":
            sizes[dtype.name] = sizes.get(dtype.name, 0) + entry.numel
    return max(sizes, key=lambda name: sizes[name], default="float32")


def _check_output(job: _Job, staging: Path) -> None:
    """Check that the headers of the written files state what was planned.

    Raises:
        DifferentError: a header states another tensor, shape, dtype or offset.
    """
    expected = {entry.fqn: entry for entry in job.skeleton.entries}
    written = formats.read_outputs(staging, [file.name for file in job.skeleton.files])
    if written.keys() != expected.keys():
        raise DifferentError(staging.name, "the tensors in it are not the planned ones")
    for fqn, entry in written.items():
        planned = expected[fqn]
        chunk, planned_chunk = entry.chunks[0], planned.chunks[0]
        if (entry.shape, chunk.dtype, chunk.byte_offset) != (
            planned.shape,
            planned_chunk.dtype,
            planned_chunk.byte_offset,
        ) and entry.numel:
            raise DifferentError(fqn, "reads back with another shape, dtype or byte offset")
