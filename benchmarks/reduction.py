"""Measure the cost of canonical reduction: step time against ``--reduction fast``.

    python benchmarks/reduction.py --nproc 2 --steps 12 --rounds 3 [flags of the trainer]

Each run is a whole ``python -m trainer``; the runs alternate on the same number of ranks. The first
three steps of each are left out. The program prints medians of the tokens per second, and their
ratio. It has no assertions.
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
    command += ["--no-progress", "--no-parameter-hash", "--overwrite"]
    command += ["--save", str(directory / "run"), "--log", str(log), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in log.read_text().splitlines()][WARMUP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    arguments, flags = parser.parse_known_args()
    print("| strategy | canonical: tokens/s | fast: tokens/s | fast / canonical |")
    print("|---|---|---|---|")
    for strategy in arguments.strategies:
        speeds: dict[str, list[float]] = {"canonical": [], "fast": []}
        for _ in range(arguments.rounds):
            for reduction, found in speeds.items():
                with tempfile.TemporaryDirectory() as directory:
                    lines = train(Path(directory), strategy, reduction, flags)
                    found += [line["tokens_per_s"] for line in lines]
        canonical, fast = map(statistics.median, speeds.values())
        print(f"| {strategy} | {canonical:.0f} | {fast:.0f} | {fast / canonical:.2f} |", flush=True)


if __name__ == "__main__":
    main()
