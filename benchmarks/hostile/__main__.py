"""Run many cases, or repeat one: ``python -m benchmarks.hostile --cases 100000 --seed 1``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.hostile import case, runner
from benchmarks.hostile.seeds import Seed, kept, made, private

_SHOWN = 5


def main() -> int:
    """Run the cases; return 1 if any of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checkpoints", type=Path, help="further checkpoints, which judges wrote")
    parser.add_argument("--only", default="", help="part of the names of the checkpoints to damage")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))
    parser.add_argument(
        "--replay", metavar="SEED:INDEX", help="repeat one case; keep its files in --scratch"
    )
    parser.add_argument("--list", action="store_true", help="list the checkpoints")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=asked.scratch) as name:
        seeds = private(_chosen(asked), Path(name, "seeds"))
        if asked.list:
            print("\n".join(f"{seed.name}  {len(seed.files)}" for seed in seeds))
            return 0
        if asked.replay:
            return _replay(asked, seeds)
        before = contents(seeds)
        result = runner.Result()
        cases = range(asked.first, asked.first + asked.cases)
        work = Path(name, "work")
        told = 0
        try:
            for result in runner.run(seeds, asked.seed, cases, work, workers=asked.workers):
                rate = result.cases / max(result.seconds, 1e-9)
                print(f"{result.cases} cases, {rate:.0f}/s, {len(result.findings)} findings")
                for finding in result.findings[told:]:
                    print(f"{finding.index} {finding.verdict.wrong[:160]} {finding.verdict.where}")
                told = len(result.findings)
                sys.stdout.flush()
        except KeyboardInterrupt:
            print("interrupted; so far:")
        changed = [path for path, data in contents(seeds).items() if before.get(path) != data]
    _print(result, len(seeds))
    for path in changed:
        print(f"CHANGED a source: {path}")
    return int(bool(result.findings or changed))


def _chosen(asked: argparse.Namespace) -> list[Seed]:
    found = [*kept(), *(made(asked.checkpoints) if asked.checkpoints else [])]
    return [seed for seed in found if asked.only in seed.name]


def contents(seeds: list[Seed]) -> dict[str, bytes]:
    """Return the contents of every seed's files, to check that sources are only read."""
    return {
        f"{seed.name}/{file}": (seed.place / file).read_bytes()
        for seed in seeds
        for file in seed.files
    }


def _print(result: runner.Result, seeds: int) -> None:
    codes = ", ".join(f"{code}: {count}" for code, count in sorted(result.codes.items()))
    print(f"{result.cases} cases of {seeds} seeds in {result.seconds:.0f} s; exit codes {codes}")
    print(f"slowest {result.slowest[0]:.2f} s of CPU, case {result.slowest[1]}")
    print(f"{result.tripped.total()} cases tripped a reader, at {len(result.tripped)} places:")
    for where, count in result.tripped.most_common():
        print(f"  {count} x {where}")
    groups = defaultdict(list)
    for finding in result.findings:
        kind = finding.verdict.wrong.split(":")[0].split(" '")[0]
        groups[kind, finding.verdict.where].append(finding)
    for (kind, where), found in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(found)} x {kind} at {where}")
        for finding in found[:_SHOWN]:
            print(f"  {finding.index}: {finding.verdict.wrong[:160]}\n      {finding.told[:300]}")


def _replay(asked: argparse.Namespace, seeds: list[Seed]) -> int:
    seed, index = map(int, asked.replay.split(":"))
    place = Path(tempfile.mkdtemp(prefix="replay-", dir=asked.scratch))
    told, verdict = case.run(seeds, seed, index, place)
    print(told, verdict.trace, f"exit code {verdict.code} {verdict.wrong}", place, sep="\n")
    return int(bool(verdict.wrong))


if __name__ == "__main__":
    sys.exit(main())
