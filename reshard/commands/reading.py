"""What every command that reads tensors shares: which source, whether to trust it, the budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard import formats, units
from reshard.errors import ResourceError, UnsafeError, UsageError
from reshard.manifest import Manifest
from reshard.plan.planner import WINDOW_BYTES
from reshard.ranks.team import Progress, ignore_progress

Meter = Callable[[int], AbstractContextManager[Progress]]

_MIN_WINDOW = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a command reads its source."""

    tag: str | None = None
    key: str | None = None
    model: str | None = None  # config.json, a directory of one, or module:factory
    wrap: str | None = None  # class names, size=N or none
    rules: Path | None = None  # YAML: lines that a table of parameters lacks
    source_format: str | None = None
    allow_pickle: Sequence[str] = ()
    workers: int = 0  # 0: one a core, at most 8
    max_memory_bytes: int = 256 << 20  # buffers of all workers together
    html: str | Path | None = None  # where to write the report as a page
    overwrite: bool = False  # replace what is there

    def told(self) -> dict[str, Any]:
        """The keywords of `formats.read`."""
        return {
            "force": self.source_format,
            "tag": self.tag,
            "key": self.key,
            "model": self.model,
            "wrap": self.wrap,
            "rules": self.rules,
        }

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
                "give that much or more",
            )
        workers = min(workers, most)
        return workers, min(WINDOW_BYTES, self.max_memory_bytes // (2 * workers))


def _cores() -> int:
    """Cores that this process may use, where the system says; else those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def metered(meter: Meter | None, nbytes: int) -> AbstractContextManager[Progress]:
    """A progress display for a number of bytes; for nobody where there is no meter."""
    return meter(nbytes) if meter else nullcontext(ignore_progress)


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is not among the choices.

    Raises:
        UsageError: naming them.
    """
    if value not in choices:
        raise UsageError(f"{name}={value!r}", f"must be one of {', '.join(map(str, choices))}")


def trusted(sources: Sequence[Path], options: ReadOptions) -> Manifest:
    """The checkpoint that is asked for, once it is known to be safe.

    Raises:
        ReshardError: it cannot be read or trusted.
    """
    manifest = formats.read(sources, **options.told())
    check_trust(manifest, options.allow_pickle)
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
