"""``merge``: write the full weights of a checkpoint as safetensors, a Hugging Face model or .pt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from reshard import formats
from reshard.commands.merge import codes, passes
from reshard.commands.merge.options import HUB_PREFIX, MergeOptions
from reshard.commands.merge.passes import Merge
from reshard.commands.merge.report import MergeReport, describe_merge
from reshard.commands.output import Job, check_skeleton, convert, is_single_file
from reshard.commands.output_report import OutputReport
from reshard.commands.passes import run_passes
from reshard.commands.reading import Meter
from reshard.core import keys
from reshard.core.manifest import WEIGHT_KINDS, Manifest, Skeleton, index_entries
from reshard.engine.planning.planner import Plan
from reshard.errors import DifferentError, UsageError
from reshard.formats import placeholders, registry
from reshard.quantised import remainders
from reshard.system.paths import as_path

R = TypeVar("R", bound=OutputReport)
Pass = Callable[[Merge], Merge]
OPENING: Sequence[Pass] = (
    passes.compute_averaged,
    codes.dequantise,
    passes.refuse_other_model,
    passes.find_companions,
)
"""The passes that find what is written beside the weights; ``average`` runs them, too."""
CHOOSING: Sequence[Pass] = (
    passes.rename,
    passes.choose_form,
    passes.edit_names,
    passes.fill,  # after the edits: --rename adapts names to those of the base
    passes.choose_weights,
    codes.match_config,
    passes.note_adapters,
    passes.compare_copies,
    passes.check_missing,
)
"""The passes that choose the weights to write, with names and dtypes; of ``average``, too."""


def merge(
    source: formats.Paths,
    destination: str | Path,
    options: MergeOptions | None = None,
    meter: Meter | None = None,
) -> MergeReport:
    """Write the full weights of a checkpoint.

    Args:
        source: several directories if each node stored its own files.
        destination: ``*.safetensors`` or ``*.pt|.bin|.pth`` for one file, ``hf://org/name`` for a
            repository of the Hub, else a directory in Hugging Face format.
        meter: opens a progress display for a number of bytes.

    Raises:
        ReshardError: see its subclasses; the destination is then unchanged.
    """
    options = options or MergeOptions()
    if str(destination).startswith(HUB_PREFIX):
        from reshard.commands.merge import upload

        repository = upload.find_repository(destination)
        return upload.upload(source, repository, options, partial(plan_merge, options=options))
    sources = formats.as_paths(source)
    if is_single_file(destination):
        if options.writes_adapter:
            raise UsageError(
                destination, "the name has the suffix of a file, but --adapter writes a directory"
            )
        options.refuse_given(
            ["max_shard_bytes"],
            f"has no effect, because the suffix of {destination} asks for one file",
            "leave it out, or name a directory",
        )

    def prepare(manifest: Manifest, output: Path, means: list[str]) -> Job[MergeReport]:
        return plan_merge(manifest, sources[0], output, options, means)

    models = (options.fill_missing_from, options.merge_lora, options.quantise_like)
    base = [as_path(path) for path in models if path]
    return convert(
        sources, destination, options, prepare, kinds=WEIGHT_KINDS, beside=base, meter=meter
    )


def plan_merge(
    manifest: Manifest,
    source: Path,
    output: Path,
    options: MergeOptions,
    means: Sequence[str] = (),
) -> Job[MergeReport]:
    """Run all passes, and plan the copies that fill the files of the output.

    Args:
        source: the first path that the user named.
        means: notes on copies that were averaged.
    """
    opened = open_merge(manifest, source, output, options)
    result = run_passes(_list_passes(options), opened)
    result.notes.warnings += means
    return plan_files(result, manifest, describe_merge)


def open_merge(manifest: Manifest, source: Path, output: Path, options: MergeOptions) -> Merge:
    """Return a merge before its first pass."""
    manifest, _ = remainders.name_masters(manifest)
    return Merge(
        manifest=manifest,
        source=registry.describe_source(manifest),
        options=options,
        path=source,
        output=output,
        edited=keys.Edited(manifest),
        tied=options.tied,
    )


def plan_files(
    merge: Merge, manifest: Manifest, describe: Callable[[Manifest, Merge, Plan], R]
) -> Job[R]:
    """Plan the copies that fill the files that are laid out.

    Args:
        manifest: the source before its names were changed.
        describe: returns the report of the plan.
    """
    check_skeleton(merge.skeleton)
    entries = [entry for entry, _ in merge.weights.tensors]
    placeholders.refuse(merge.manifest, entries)
    plan = Plan(index_entries(entries), merge.skeleton, merge.options.budget()[1])
    return Job(
        manifest=merge.manifest,
        shown=manifest,
        skeleton=merge.skeleton,
        plan=plan,
        report=describe(manifest, merge, plan),
        check=partial(_check_output, merge.skeleton),
        worker_nbytes=merge.computed_nbytes,
    )


def _list_passes(options: MergeOptions) -> Sequence[Pass]:
    quantise: tuple[Pass, ...] = ()
    if options.writes_codes:
        from reshard.commands.merge import quantising

        quantise = (quantising.quantise,)
    if options.merge_lora is not None:
        from reshard.commands.merge import lora

        return (
            passes.compute_averaged,
            passes.rename_adapter,
            passes.edit_names,
            lora.add_adapter,
            passes.choose_form,
            passes.choose_weights,
            codes.match_config,
            passes.compare_copies,
            passes.check_missing,
            *quantise,
            passes.lay_out,
        )
    if options.writes_adapter:
        from reshard.commands.merge import adapter

        return (
            passes.compute_averaged,
            passes.rename_adapter,
            passes.edit_names,
            adapter.select_adapter,
            passes.choose_weights,
            passes.compare_copies,
            adapter.lay_out,
        )
    return (*OPENING, *CHOOSING, *quantise, passes.lay_out)


def _check_output(skeleton: Skeleton, staging: Path) -> None:
    expected = {entry.fqn: entry for entry in skeleton.entries}
    written = formats.read_outputs(staging, [file.name for file in skeleton.files])
    if written.keys() != expected.keys():
        raise DifferentError(staging.name, "the file contains other tensors than planned")
    for fqn, entry in written.items():
        planned = expected[fqn]
        chunk, planned_chunk = entry.chunks[0], planned.chunks[0]
        if (entry.shape, chunk.dtype, chunk.byte_offset) != (
            planned.shape,
            planned_chunk.dtype,
            planned_chunk.byte_offset,
        ) and entry.numel:
            raise DifferentError(fqn, "reads back with another shape, dtype or byte offset")
