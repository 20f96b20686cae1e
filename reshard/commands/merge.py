"""``merge``: any checkpoint to one full set of weights, as safetensors, an HF directory or .pt."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from reshard import commit, execute, formats, keys, units, weights
from reshard.commands.merge_report import MergeReport, describe
from reshard.dtypes import DType
from reshard.errors import (
    CorruptError,
    DifferentError,
    ResourceError,
    UnsafeError,
    UsageError,
)
from reshard.files import SourceFiles
from reshard.formats import huggingface, torch_writer
from reshard.manifest import Entry, Manifest, Origin, Skeleton, SourceFile, check, keyed
from reshard.plan import WINDOW_BYTES, Plan, plan

OnOverflow = Literal["error", "clamp", "allow"]
Meter = Callable[[int], AbstractContextManager[Callable[[int], None]]]

_MIN_WINDOW = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """What a merge can be asked for; the defaults are the safe ones."""

    dtype: str | None = None  # bf16, fp16, fp32, keep; None: as trained
    keep_fp32: Sequence[str] = ()
    on_overflow: OnOverflow = "error"
    max_shard_bytes: int = 5 * 10**9
    hf_dir: Path | None = None
    tied: weights.Tied = "auto"
    edits: keys.Edits = field(default_factory=keys.Edits)
    tag: str | None = None
    key: str | None = None
    source_format: str | None = None
    allow_pickle: Sequence[str] = ()
    workers: int = 0  # 0: one a core, at most 8
    max_memory_bytes: int = 256 << 20  # buffers of all workers together
    overwrite: bool = False
    verify: bool = True
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Refuse a choice that there is not.

        Raises:
            UsageError: naming the choices.
        """
        for name, value, choices in (
            ("tied", self.tied, get_args(weights.Tied)),
            ("on_overflow", self.on_overflow, get_args(OnOverflow)),
        ):
            if value not in choices:
                raise UsageError(f"{name}={value!r}", f"must be one of {', '.join(choices)}")


def merge(
    source: str | Path,
    destination: str | Path,
    options: MergeOptions | None = None,
    meter: Meter | None = None,
) -> MergeReport:
    """Write the full weights of a checkpoint.

    Args:
        destination: ``*.safetensors`` or ``*.pt|.bin|.pth`` for one file, else a directory in
            Hugging Face form.
        meter: makes a progress display for a number of bytes.

    Raises:
        ReshardError: see its subclasses; nothing is left at the destination then.
    """
    options = options or MergeOptions()
    began = time.perf_counter()
    report_as, source = str(destination), Path(source)
    is_directory = Path(destination).suffix not in (".safetensors", *formats.PLAIN_SUFFIXES)
    destination = Path(destination).resolve()  # a link is followed once, here
    manifest = formats.read(source, force=options.source_format, tag=options.tag, key=options.key)
    _check_trust(manifest, options.allow_pickle)
    commit.check_destination(
        destination,
        [source, Path(manifest.origin.path)],
        is_directory=is_directory,
        overwrite=options.overwrite,
    )
    job = _prepare(manifest, source, destination, options, is_directory=is_directory)
    report = describe(manifest, job.edited, job.weights, job.skeleton, job.plan)
    report.destination = report_as
    report.peak_buffer_bytes = job.workers * 2 * job.plan.window_bytes
    report.changes = job.changes
    if options.dry_run:
        return report
    commit.check_space(destination, report.bytes_written)
    outcome = _run(
        job, manifest, destination, options, meter or (lambda _total: nullcontext(_quiet))
    )
    report.overflowed = dict(outcome.overflowed)
    report.flushed = dict(outcome.flushed)
    report.verified = options.verify
    report.done = True
    report.seconds = time.perf_counter() - began
    return report


def _quiet(_nbytes: int) -> None:
    """Progress for nobody."""


def _check_trust(manifest: Manifest, allowed: Sequence[str]) -> None:
    refused = [name for name in manifest.unknown_globals if name not in allowed]
    if refused:
        raise UnsafeError(
            manifest.origin.path,
            f"its pickles name {', '.join(refused)}, which no known framework writes",
            "if they are your own classes, go on with "
            + " ".join(f"--allow-pickle {name}" for name in refused)
            + " (they are never executed either way)",
        )


@dataclass(slots=True)
class _Job:
    """A merge that is decided and planned, with nothing written yet."""

    edited: keys.Edited
    weights: weights.Weights
    skeleton: Skeleton
    plan: Plan
    changes: list[str]
    is_directory: bool
    workers: int
    window_bytes: int


def _prepare(
    manifest: Manifest,
    source: Path,
    destination: Path,
    options: MergeOptions,
    *,
    is_directory: bool,
) -> _Job:
    edited = keys.edit(manifest, options.edits)
    chosen = weights.select(edited.manifest, options.dtype, options.keep_fp32)
    near = _near(source, manifest)
    try:
        companions = huggingface.companions(options.hf_dir, near)
    except CorruptError:
        if is_directory:
            raise
        companions = huggingface.Companions(None, None, ())  # a file needs no config
    with SourceFiles() as pool:
        untied = weights.settle_ties(
            chosen,
            edited.manifest,
            config=companions.config,
            policy=options.tied,
            pool=pool,
        )
        weights.check_replicas(chosen, pool)
    workers, window_bytes = _budget(options)
    skeleton, changes = _lay_out(destination, chosen, companions, options, untied=untied)
    _check_skeleton(skeleton)
    planned = plan(keyed(entry for entry, _ in chosen.tensors), skeleton, window_bytes)
    return _Job(edited, chosen, skeleton, planned, changes, is_directory, workers, window_bytes)


def _near(source: Path, manifest: Manifest) -> list[Path]:
    """Where a model's config may lie: the checkpoint's directory and the run's."""
    place = Path(manifest.origin.path)
    place = place if place.is_dir() else place.parent
    near = [place, place.resolve().parent]
    return [source, *near] if source.is_dir() and source != place else near


def _budget(options: MergeOptions) -> tuple[int, int]:
    """(workers, bytes a window): a worker holds one window and one read buffer."""
    workers = options.workers or min(_cores(), 8)
    if workers < 1:
        raise UsageError(f"--workers {options.workers}", "at least one is needed")
    most = options.max_memory_bytes // (2 * _MIN_WINDOW)
    if most < 1:
        raise ResourceError(
            f"--max-memory {units.show_bytes(options.max_memory_bytes)}",
            f"one worker needs {units.show_bytes(2 * _MIN_WINDOW)}",
        )
    workers = min(workers, most)
    return workers, min(WINDOW_BYTES, options.max_memory_bytes // (2 * workers))


def _cores() -> int:
    """Cores that this process may use, where the system says; else those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _lay_out(
    destination: Path,
    chosen: weights.Weights,
    companions: huggingface.Companions,
    options: MergeOptions,
    *,
    untied: bool,
) -> tuple[Skeleton, list[str]]:
    if destination.suffix in formats.PLAIN_SUFFIXES:
        return torch_writer.lay_out(destination.name, chosen.tensors), []
    if destination.suffix == ".safetensors":
        # as safetensors.torch.save_model: the alias, and the name that holds its value
        metadata = {**huggingface.METADATA, **chosen.dropped_aliases}
        return huggingface.single_file(destination.name, chosen.tensors, metadata), []
    texts = {path.name: path.read_bytes() for path in companions.others}
    changes: list[str] = []
    if companions.config is not None:
        config, changes = huggingface.matched_config(
            companions.config, chosen.tensors, _main_dtype(chosen.tensors), untied=untied
        )
        texts["config.json"] = huggingface.json_text(config)
    skeleton = huggingface.lay_out(
        chosen.tensors,
        max_shard_bytes=options.max_shard_bytes,
        texts=texts,
        metadata=huggingface.METADATA,
    )
    return skeleton, changes


def _main_dtype(tensors: Sequence[tuple[Entry, DType]]) -> str:
    sizes: dict[str, int] = {}
    for entry, dtype in tensors:
        if dtype.family == "float":
            sizes[dtype.name] = sizes.get(dtype.name, 0) + entry.numel
    return max(sizes, key=lambda name: sizes[name], default="float32")


def _check_skeleton(skeleton: Skeleton) -> None:
    """The target is held to the same proof as a source."""
    files = {file.name: SourceFile(file.name, file.nbytes) for file in skeleton.files}
    check(Manifest(Origin("target", ""), keyed(skeleton.entries), files))


def _run(
    job: _Job, manifest: Manifest, destination: Path, options: MergeOptions, meter: Meter
) -> execute.Outcome:
    total = sum(file.nbytes for file in job.skeleton.files) * (2 if options.verify else 1)
    place = commit.staged(destination, is_directory=job.is_directory, overwrite=options.overwrite)
    with place as staging, meter(total) as progress:
        outcome = execute.execute(
            job.plan,
            job.skeleton,
            manifest.files,
            staging,
            workers=job.workers,
            read_bytes=job.window_bytes,
            clamp=options.on_overflow == "clamp",
            progress=progress,
        )
        if outcome.overflowed and options.on_overflow == "error":
            _refuse_overflow(outcome, job)
        if options.verify:
            _verify(job, outcome, staging, progress)
    return outcome


def _refuse_overflow(outcome: execute.Outcome, job: _Job) -> None:
    names = outcome.overflowed.most_common()
    shown = ", ".join(f"{fqn} ({count})" for fqn, count in names[:8])
    more = f" and {len(names) - 8} more tensors" if len(names) > 8 else ""
    dtype = next(d for entry, d in job.weights.tensors if entry.fqn == names[0][0])
    raise DifferentError(
        f"{dtype}",
        f"{sum(outcome.overflowed.values())} finite values would become infinite: {shown}{more}",
        "choose --dtype bf16 or fp32, keep those tensors with --keep-fp32 REGEX,"
        " or accept it with --on-overflow clamp|allow",
    )


def _verify(
    job: _Job, outcome: execute.Outcome, staging: Path, progress: Callable[[int], None]
) -> None:
    """Read the output as a stranger would: its own headers, then every byte."""
    for file in job.skeleton.files:
        if file.nbytes != (staging / file.name).stat().st_size:
            raise DifferentError(file.name, "has another size than planned")
    written = {entry.fqn: entry for entry in job.skeleton.entries}
    seen = formats.read_outputs(staging, [file.name for file in job.skeleton.files])
    if seen.keys() != written.keys():
        raise DifferentError(staging.name, "holds other tensors than were to be written")
    for fqn, entry in seen.items():
        planned = written[fqn]
        chunk, wanted = entry.chunks[0], planned.chunks[0]
        if (entry.shape, chunk.dtype, chunk.byte_offset) != (
            planned.shape,
            wanted.dtype,
            wanted.byte_offset,
        ) and entry.numel:
            raise DifferentError(fqn, "reads back with another shape, dtype or place")
    execute.read_back(outcome, staging, workers=job.workers, progress=progress)
