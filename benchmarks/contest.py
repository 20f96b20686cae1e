"""Run commands in turn on the same bytes, each as a whole process including start-up."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = sys.executable
THREADS = len(os.sched_getaffinity(0))


@dataclass
class Contender:
    """One command, and what its runs took; ``command`` is given an empty place to write to."""

    name: str
    command: Callable[[Path], list[str]]
    variables: Mapping[str, str] = field(default_factory=dict)  # of its environment
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    disk_mb: list[float] = field(default_factory=list)  # the most that it used at any time


def limits(spans: Path, *, shrink: int = 1) -> list[Contender]:
    """Measure a bare loop over the same bytes, with one thread and with one per core.

    The last one also computes checksums and reads back what it wrote, as a merge does.
    """
    loop = [PYTHON, str(HERE / "bare_loop.py"), str(spans)]
    return [
        Contender(
            f"bare loop, {count} thread{'s' * (count > 1)}{', checks' * bool(checks)}",
            lambda out, count=count, checks=checks: [  # type: ignore[misc]
                *(*loop, f"{out}.raw", *checks),
                *("--threads", str(count), "--shrink", str(shrink)),
            ],
        )
        for count, checks in ((1, ()), (THREADS, ()), (THREADS, ("--checks",)))
    ]


def measure(contender: Contender, out: Path) -> None:
    """Run once, with an empty output place.

    Raises:
        SystemExit: the command failed.
    """
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir(parents=True)
    compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with _Disk(out.parent) as disk:
        began, before = time.perf_counter(), os.times()
        child = subprocess.Popen(
            contender.command(out),
            env=compiled | dict(contender.variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        error = child.stderr.read().decode()[-2000:] if child.stderr else ""
        _, status, usage = os.wait4(child.pid, 0)
        contender.seconds.append(time.perf_counter() - began)
    after = os.times()
    used = after.children_user + after.children_system
    contender.cpu.append(used - before.children_user - before.children_system)
    contender.rss_mb.append(usage.ru_maxrss / 1024)
    contender.disk_mb.append(disk.most / 1e6)
    if status:
        raise SystemExit(f"{contender.name} failed:\n{error}")


class _Disk:
    """The most that a file system grew by meanwhile, looked at ten times a second."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._before = shutil.disk_usage(place).used
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.most = 0

    def __enter__(self) -> _Disk:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        ended = False
        while not ended:
            ended = self._end.wait(0.1)
            self.most = max(self.most, shutil.disk_usage(self._place).used - self._before)


Compare = Callable[[Path, Path], None]


def forget(folder: Path) -> None:
    """Drop all files of a folder from the page cache, so that the next run reads the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # pages that are not on the disk yet would stay
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compete(
    field_of: Sequence[Contender],
    out: Path,
    rounds: int,
    compare: Compare | None = None,
    *,
    cold: Path | None = None,
) -> None:
    """Run all contenders in turns, after one round that is not counted.

    Args:
        compare: given what another made and what the first contender made, in the round that is
            not counted; the bare loop's output is no model.
        cold: a folder that is dropped from the page cache before each run.
    """
    reference = out.parent.with_name("reference.safetensors")
    for number in range(rounds + 1):
        for contender in field_of:
            if cold:
                forget(cold)
            measure(contender, out)
            if number:
                continue
            made = next(out.parent.iterdir(), None)
            if compare and made and contender is field_of[0]:
                shutil.copyfile(made, reference)
            elif compare and made and made.suffix != ".raw":
                compare(made, reference)
            for values in (contender.seconds, contender.cpu, contender.rss_mb, contender.disk_mb):
                values.clear()
    reference.unlink(missing_ok=True)
    shutil.rmtree(out.parent, ignore_errors=True)


def report(title: str, field_of: Sequence[Contender]) -> None:
    """Print a table of medians; ratios are relative to the first contender."""
    ours = statistics.median(field_of[0].seconds)
    print(f"\n{title}")
    head = ("median s", "min", "max", "ratio", "CPU s", "peak RSS MB", "disk MB")
    print(f"{'':30}" + "".join(f"{word:>13}" for word in head))
    for contender in field_of:
        median = statistics.median(contender.seconds)
        values = (
            *(median, min(contender.seconds), max(contender.seconds), median / ours),
            statistics.median(contender.cpu),
        )
        sizes = (max(contender.rss_mb), max(contender.disk_mb))
        print(
            f"{contender.name:30}"
            + "".join(f"{value:13.2f}" for value in values)
            + "".join(f"{size:13.0f}" for size in sizes),
            flush=True,
        )
