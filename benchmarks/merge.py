"""``reshard merge`` against ``zero_to_fp32`` and against a bare copy loop, on the same bytes.

    python benchmarks/merge.py RUN_DIR [RUN_DIR ...] --out /dev/shm/bench --rounds 5

Every command is a whole process, start-up included; commands take turns, and medians and peak RSS
(of the process, from wait4) are printed as a table. Nothing is asserted: it measures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from contest import PYTHON, Contender, compete, limits, report

import reshard
from reshard.manifest import MASTER, PARAM


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


def contenders(run: Path, dtype: str, spans: Path) -> list[Contender]:
    merge = [PYTHON, "-m", "reshard", "merge", str(run)]
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
        *limits(spans, shrink=2 if dtype == "bf16" else 1),
    ]
    peer = run / "zero_to_fp32.py"
    if dtype == "fp32" and peer.exists():
        command = [PYTHON, str(peer), str(run)]
        found.append(
            Contender(
                "zero_to_fp32",
                lambda out: [*command, str(out), "--safe_serialization", "--max_shard_size", "1TB"],
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    args = parser.parse_args()
    for run in args.runs:
        spans = args.out.with_suffix(".spans.json")
        spans.parent.mkdir(parents=True, exist_ok=True)
        spans.write_text(json.dumps(needed_spans(run)))
        for dtype in args.dtypes:
            field_of = contenders(run, dtype, spans)
            compete(field_of, args.out / "x", args.rounds)
            report(f"{run}  ->  {dtype}", field_of)
        spans.unlink()


if __name__ == "__main__":
    main()
