"""What every command that writes shares: budget, proof of the target, staging, reading back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from reshard import commit, execute, formats, units
from reshard.errors import DifferentError, ResourceError, UnsafeError, UsageError
from reshard.manifest import Manifest, Origin, Skeleton, SourceFile, check
from reshard.plan import WINDOW_BYTES, Plan

OnOverflow = Literal["error", "clamp", "allow"]
Meter = Callable[[int], AbstractContextManager[Callable[[int], None]]]
Check = Callable[[Path], None]

_MIN_WINDOW = 64 << 10
_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How a command reads its source and may write; the defaults are the safe ones."""

    tag: str | None = None
    key: str | None = None
    model: str | None = None  # config.json, a directory of one, or module:factory
    wrap: str | None = None  # class names, size=N or none
    source_format: str | None = None
    on_overflow: OnOverflow = "error"
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
        one_of("on_overflow", self.on_overflow, get_args(OnOverflow))

    def budget(self) -> tuple[int, int]:
        """(workers, bytes a window): a worker holds one window and one read buffer.

        Raises:
            UsageError: no worker.
            ResourceError: not the memory for one.
        """
        workers = self.workers or min(_cores(), 8)
        if workers < 1:
            raise UsageError(f"--workers {self.workers}", "at least one is needed")
        most = self.max_memory_bytes // (2 * _MIN_WINDOW)
        if most < 1:
            raise ResourceError(
                f"--max-memory {units.show_bytes(self.max_memory_bytes)}",
                f"one worker needs {units.show_bytes(2 * _MIN_WINDOW)}",
            )
        workers = min(workers, most)
        return workers, min(WINDOW_BYTES, self.max_memory_bytes // (2 * workers))


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is not among the choices.

    Raises:
        UsageError: naming them.
    """
    if value not in choices:
        raise UsageError(f"{name}={value!r}", f"must be one of {', '.join(map(str, choices))}")


def _cores() -> int:
    """Cores that this process may use, where the system says; else those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def opened(
    sources: Sequence[Path], destination: Path, options: OutputOptions, *, is_directory: bool
) -> Manifest:
    """The checkpoint that is asked for, once it is known to be safe and its destination free.

    Raises:
        ReshardError: the source cannot be read or trusted, or the destination is taken.
    """
    manifest = formats.read(
        sources,
        force=options.source_format,
        tag=options.tag,
        key=options.key,
        model=options.model,
        wrap=options.wrap,
    )
    check_trust(manifest, options.allow_pickle)
    commit.check_destination(
        destination,
        [*sources, Path(manifest.origin.path)],
        is_directory=is_directory,
        overwrite=options.overwrite,
    )
    return manifest


def check_trust(manifest: Manifest, allowed: Sequence[str]) -> None:
    """Refuse a source whose pickles name classes that nobody knows.

    Raises:
        UnsafeError: naming them.
    """
    refused = [name for name in manifest.unknown_globals if name not in allowed]
    if refused:
        raise UnsafeError(
            manifest.origin.path,
            f"its pickles name {', '.join(refused)}, which no known framework writes",
            "if they are your own classes, go on with "
            + " ".join(f"--allow-pickle {name}" for name in refused)
            + " (they are never executed either way)",
        )


def check_skeleton(skeleton: Skeleton) -> None:
    """The target is held to the same proof as a source, for each dtype that a tensor gets."""
    files = {file.name: SourceFile(file.name, file.nbytes) for file in skeleton.files}
    entries = {(e.kind, f"{e.fqn} ({e.dtype}, {n})"): e for n, e in enumerate(skeleton.entries)}
    check(Manifest(Origin("target", ""), entries, files))


def check_places(skeleton: Skeleton) -> None:
    """Every chunk of a target lies inside its file, and no two on the same bytes.

    Raises:
        DifferentError: a target that would damage itself.
    """
    sizes = {file.name: file.nbytes for file in skeleton.files}
    spans = sorted(
        (chunk.file, *chunk.byte_span, entry.fqn)
        for entry in skeleton.entries
        for chunk in entry.chunks
        if chunk.box.volume
    )
    for (file, _, stop, fqn), (other_file, start, _, other) in pairwise(spans):
        if file == other_file and start < stop:
            raise DifferentError(file, f"{fqn!r} and {other!r} would lie on the same bytes")
    for file, start, stop, fqn in spans:
        if start < 0 or stop > sizes[file]:
            raise DifferentError(file, f"{fqn!r} would lie outside of it")


def write(
    plan: Plan,
    skeleton: Skeleton,
    manifest: Manifest,
    destination: Path,
    options: OutputOptions,
    *,
    is_directory: bool,
    look: Check,
    meter: Meter | None = None,
) -> execute.Outcome:
    """Write the skeleton's files to a temporary place, check them, and move them to theirs.

    Args:
        look: reads the written files' own headers, as a stranger would.

    Raises:
        ReshardError: nothing is left at the destination then.
    """
    workers, window_bytes = options.budget()
    total = sum(file.nbytes for file in skeleton.files) * (2 if options.verify else 1)
    place = commit.staged(destination, is_directory=is_directory, overwrite=options.overwrite)
    show = meter or (lambda _total: nullcontext(_unseen))
    with place as staging, show(total) as progress:
        outcome = execute.execute(
            plan,
            skeleton,
            manifest.files,
            staging,
            workers=workers,
            read_bytes=window_bytes,
            clamp=options.on_overflow == "clamp",
            progress=progress,
        )
        if outcome.overflowed and options.on_overflow == "error":
            _refuse_overflow(outcome, skeleton)
        if options.verify:
            for file in skeleton.files:
                if file.nbytes != (staging / file.name).stat().st_size:
                    raise DifferentError(file.name, "has another size than planned")
            look(staging)
            execute.read_back(outcome, staging, workers=workers, progress=progress)
    return outcome


def _unseen(_nbytes: int) -> None:
    """Progress for nobody."""


def _refuse_overflow(outcome: execute.Outcome, skeleton: Skeleton) -> None:
    names = outcome.overflowed.most_common()
    shown = ", ".join(f"{fqn} ({count})" for fqn, count in names[:_LISTED])
    more = f" and {len(names) - _LISTED} more tensors" if len(names) > _LISTED else ""
    written = [entry.dtype for entry in skeleton.entries if entry.fqn == names[0][0]]
    dtype = min(written, key=lambda dtype: dtype.itemsize)
    raise DifferentError(
        f"{dtype}",
        f"{sum(outcome.overflowed.values())} finite values would become infinite: {shown}{more}",
        "choose --dtype bf16 or fp32, keep those tensors with --keep-fp32 REGEX,"
        " or accept it with --on-overflow clamp|allow",
    )
