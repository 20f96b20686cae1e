"""Measure the peak RSS as the model grows, with the same ``--max-memory``.

    python benchmarks/memory.py --place /data/bench --sizes 230 1100 4000

Real FSDP 2 (gloo) saves bf16 weights of each size with DCP. The program measures the peak RSS of
whole processes that merge, cast and split them. It needs three times the bytes of the largest model
on disk.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from contest import PYTHON, Contender, measure
from sources import SHAPES, Sources

MEMORY = "128MiB"


def contenders(source: Path) -> list[Contender]:
    reshard = [PYTHON, "-m", "reshard"]
    budget = ["--max-memory", MEMORY]
    merge = [*reshard, "merge", str(source)]
    split = [*reshard, "split", str(source)]
    three = ["--world-size", "3", "--init-optimizer", "none"]
    return [
        Contender("inspect", lambda _: [*reshard, "inspect", str(source)]),
        Contender("merge", lambda out: [*merge, f"{out}.safetensors", *budget]),
        Contender("merge --dtype fp16", lambda out: [*merge, str(out), "--dtype", "fp16", *budget]),
        Contender("split to 3 ranks", lambda out: [*split, str(out), *three, *budget]),
        Contender("verify --deep", lambda _: [*reshard, "verify", str(source), "--deep", *budget]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["230", "1100", "4000"])
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    rows: dict[str, list[float]] = {}
    for size in args.sizes:
        made = Sources(args.place / f"of-{size}-{args.ranks}", SHAPES[size], args.ranks)
        for contender in contenders(made.fsdp("dcp")):
            measure(contender, args.place / "out" / "x")
            rows.setdefault(contender.name, []).append(contender.rss_mb[0])
        shutil.rmtree(args.place / "out", ignore_errors=True)
    print(f"peak RSS in MB, --max-memory {MEMORY}, {args.ranks} ranks")
    print(f"{'million parameters':24}" + "".join(f"{size:>10}" for size in args.sizes))
    for name, values in rows.items():
        print(f"{name:24}" + "".join(f"{value:10.0f}" for value in values))


if __name__ == "__main__":
    main()
