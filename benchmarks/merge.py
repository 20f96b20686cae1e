"""``reshard merge`` against ``zero_to_fp32`` and against a bare copy loop, on the same bytes.

    python benchmarks/merge.py RUN_DIR [RUN_DIR ...] --out /dev/shm/bench --rounds 5

Every command is a whole process, start-up included; commands take turns, and medians and peak RSS
(of the process, from wait4) are printed as a table. Nothing is asserted: it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import reshard
from reshard.manifest import MASTER, PARAM

HERE = Path(__file__).parent


@dataclass
class Contender:
    """One command, and what its runs took."""

    name: str
    command: Callable[[Path], list[str]]
    seconds: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)


def needed_spans(run: Path) -> list[tuple[str, int, int]]:
    """Where the weights' bytes lie, in file order of the output."""
    with reshard.open(run) as checkpoint:
        manifest = checkpoint.manifest
    masters = {entry.fqn: entry for entry in manifest.of_kind(PARAM)}
    masters.update((entry.fqn, entry) for entry in manifest.of_kind(MASTER))
    spans = []
    for fqn in sorted(masters):
        for chunk in masters[fqn].chunks:
            start, stop = chunk.byte_span
            spans.append((chunk.file, start, stop - start))
    return spans


def contenders(run: Path, dtype: str, spans: Path, threads: int) -> list[Contender]:
    python = sys.executable
    shrink = "2" if dtype == "bf16" else "1"
    merge = [python, "-m", "reshard", "merge", str(run)]
    loop = [python, str(HERE / "bare_loop.py"), str(spans)]
    found = [
        Contender("reshard", lambda out: [*merge, f"{out}.safetensors", "--dtype", dtype]),
        Contender(
            "reshard --no-verify",
            lambda out: [*merge, f"{out}.safetensors", "--dtype", dtype, "--no-verify"],
        ),
        Contender(
            "reshard --workers 1",
            lambda out: [*merge, f"{out}.safetensors", "--dtype", dtype, "--workers", "1"],
        ),
        Contender("bare loop, 1 thread", lambda out: [*loop, f"{out}.raw", "--shrink", shrink]),
        Contender(
            f"bare loop, {threads} threads",
            lambda out: [*loop, f"{out}.raw", "--shrink", shrink, "--threads", str(threads)],
        ),
    ]
    peer = run / "zero_to_fp32.py"
    if dtype == "fp32" and peer.exists():
        command = [python, str(peer), str(run)]
        found.append(
            Contender(
                "zero_to_fp32",
                lambda out: [*command, str(out), "--safe_serialization", "--max_shard_size", "1TB"],
            )
        )
    return found


def measure(contender: Contender, out: Path) -> None:
    """Run once, with an empty output place."""
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir(parents=True)
    began = time.perf_counter()
    compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    child = subprocess.Popen(
        contender.command(out), env=compiled, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, status, usage = os.wait4(child.pid, 0)
    contender.seconds.append(time.perf_counter() - began)
    contender.rss_mb.append(usage.ru_maxrss / 1024)
    if status:
        error = child.stderr.read().decode()[-2000:] if child.stderr else ""
        raise SystemExit(f"{contender.name} failed:\n{error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    for run in args.runs:
        spans = args.out.with_suffix(".spans.json")
        spans.parent.mkdir(parents=True, exist_ok=True)
        spans.write_text(json.dumps(needed_spans(run)))
        for dtype in args.dtypes:
            field_of = contenders(run, dtype, spans, threads)
            for number in range(args.rounds + 1):  # the first warms the page cache
                for contender in field_of:
                    measure(contender, args.out / "x")
                    if number == 0:
                        contender.seconds.clear()
                        contender.rss_mb.clear()
            report(run, dtype, field_of)
        spans.unlink()
    shutil.rmtree(args.out, ignore_errors=True)


def report(run: Path, dtype: str, field_of: list[Contender]) -> None:
    ours = statistics.median(field_of[0].seconds)
    print(f"\n{run}  ->  {dtype}")
    print(f"{'':24} {'median s':>9} {'min':>7} {'max':>7} {'ratio':>7} {'peak RSS MB':>12}")
    for contender in field_of:
        median = statistics.median(contender.seconds)
        print(
            f"{contender.name:24} {median:9.3f} {min(contender.seconds):7.3f}"
            f" {max(contender.seconds):7.3f} {median / ours:7.2f} {max(contender.rss_mb):12.0f}"
        )


if __name__ == "__main__":
    main()
