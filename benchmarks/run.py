"""Run reshard and other tools on the same bytes; print medians, ratios and peak RSS.

    python benchmarks/run.py --size 230 --rounds 3
    python benchmarks/run.py --only merge-zero2 split-zero2 --place /dev/shm/bench

Real DeepSpeed, PyTorch and Megatron-core write the checkpoints first. Every command is a whole
process, start-up included, and the commands take turns. A first round does not count; in it, the
tensors of every merged file are compared with reshard's. There are no assertions about time.
``peers.py`` lists the mergers that take part if a variable names their packages.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import merge
import proof
import split
from contest import Contender, compete, report
from equal import check
from sources import RANKS, SHAPES, Sources

Case = Callable[[Sources, Path], list[Contender]]


def _merged(stage: int, dtype: str) -> Case:
    return lambda made, spans: merge.of_zero(made.zero(stage), dtype, spans)


def _split(stage: int, ranks: int) -> Case:
    return lambda made, spans: split.to_ranks(made.zero(stage), ranks, stage, spans)


CASES: dict[str, Case] = {
    "start-up": lambda _made, _spans: proof.start_up(),
    "merge-zero1": _merged(1, "fp32"),
    "merge-zero2": _merged(2, "fp32"),
    "merge-zero3": _merged(3, "fp32"),
    "merge-zero2-bf16": _merged(2, "bf16"),
    "merge-zero2-fp16": _merged(2, "fp16"),
    "merge-zero3-bf16": _merged(3, "bf16"),
    "merge-dcp": lambda made, spans: merge.of_dcp(made.fsdp("dcp"), spans),
    "merge-hf-shards": lambda made, spans: merge.of_hf_shards(made.fsdp("hf"), spans),
    "merge-verl": lambda made, spans: merge.of_verl(made.fsdp("verl"), spans),
    "merge-megatron": lambda made, spans: merge.of_megatron(made.megatron("torch"), spans),
    "merge-megatron-dist": lambda made, spans: merge.of_megatron(
        made.megatron("torch_dist"), spans
    ),
    "split-zero2": _split(2, 6),
    "split-zero3": _split(3, 6),
    "stage-2-to-3": lambda made, spans: split.to_ranks(made.zero(2), made.ranks, 3, spans),
    "to-universal": lambda made, _spans: split.to_universal(made.zero(2)),
    "split-dcp": lambda made, _spans: split.dcp_shards(
        made.converted("dcp", made.zero(2), "--to", "dcp"), made.zero(2) / "config.json", 6
    ),
    "to-megatron": lambda made, _spans: split.to_megatron(made.model(), 8),
    "read": lambda made, _spans: proof.reading(
        made.zero(2), made.converted("zero2-6", made.zero(2), "--world-size", "6")
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", choices=list(SHAPES), default="90", help="size of the model in million parameters"
    )
    parser.add_argument(
        "--ranks", type=int, default=RANKS, help="number of ranks that write the checkpoints"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--place", type=Path, help="directory for checkpoints and outputs; kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reshard-bench-") as temporary:
        place = args.place or Path(temporary)
        made = Sources(place / f"of-{args.size}-{args.ranks}", SHAPES[args.size], args.ranks)
        for name in args.only:
            field_of = CASES[name](made, place / "spans.json")
            compare = check if name.startswith("merge") else None
            compete(field_of, place / "out" / "x", args.rounds, compare)
            report(f"{name}: {args.size} million parameters, {args.ranks} ranks", field_of)


if __name__ == "__main__":
    main()
