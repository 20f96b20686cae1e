"""Measure the cost of canonical reduction: step time against ``--reduction fast``.

    python benchmarks/reduction.py --nproc 2 --steps 12 --rounds 3 [flags of the trainer]

Each run is a whole ``python -m trainer``; the runs alternate on the same number of ranks. The first
three steps of each are left out. The program prints medians of the step time and of its reduce
part, and their ratios. It has no assertions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
WARMUP = 3


def train(directory: Path, strategy: str, reduction: str, flags: list[str]) -> list[dict]:
    """Train once and return the log, without the warm-up."""
    log = directory / "log.jsonl"
    command = [sys.executable, "-m", "trainer", "--strategy", strategy, "--reduction", reduction]
    command += ["--wall-clock-breakdown", "--no-progress", "--no-parameter-hash", "--overwrite"]
    command += ["--save", str(directory / "run"), "--log", str(log), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in log.read_text().splitlines()][WARMUP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    arguments, flags = parser.parse_known_args()
    print("| strategy | canonical ms | fast ms | ratio | reduce: canonical ms | fast ms |")
    print("|---|---|---|---|---|---|")
    for strategy in arguments.strategies:
        steps: dict[str, list[float]] = {"canonical": [], "fast": []}
        reduces: dict[str, list[float]] = {"canonical": [], "fast": []}
        for _ in range(arguments.rounds):
            for reduction, times in steps.items():
                with tempfile.TemporaryDirectory() as directory:
                    for line in train(Path(directory), strategy, reduction, flags):
                        times.append(line["seconds"]["step_total"] * 1e3)
                        reduces[reduction].append(line["seconds"].get("reduce", 0.0) * 1e3)
        step = {name: statistics.median(times) for name, times in steps.items()}
        reduce = {name: statistics.median(times) for name, times in reduces.items()}
        print(
            f"| {strategy} | {step['canonical']:.0f} | {step['fast']:.0f} "
            f"| {step['canonical'] / step['fast']:.2f} "
            f"| {reduce['canonical']:.0f} | {reduce['fast']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
