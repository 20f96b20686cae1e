"""Measure merges from a storage whose every read takes some time.

    python benchmarks/latency.py --place /data/bench --size 230 --milliseconds 1 10 50
    python benchmarks/latency.py --place /data/bench --rows zero2-bf16 --only merge loop

Storages: ``shim``, a preloaded library that waits before each read of a source file, so that
nothing is read ahead; ``fuse``, a file system that waits before each request, and that the kernel
caches and reads ahead, as it does NFS and Lustre; ``s3``, a store that waits before each answer,
and whose CPU time comes out of the same machine. Commands: ``merge``, reshard with default
options; ``loop``, a bare loop that keeps 16 requests of 8 MiB in flight and writes as many bytes,
which is the limit; ``cp``, ``cp -r`` of the whole checkpoint, or s3fs's ``get``; ``inspect``,
reshard's report. Real DeepSpeed and PyTorch write the checkpoints first. The ratio is to the loop.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from contest import HERE, PYTHON, Contender, measure
from merge import needed_spans
from sources import RANKS, SHAPES, Sources
from storages import Bucket, Counts, Mount, Shim, View

REQUESTS = 16
REQUEST_BYTES = 8 << 20
STORAGES: dict[str, type[Shim | Mount | Bucket]] = {"shim": Shim, "fuse": Mount, "s3": Bucket}
COPY = "import sys, s3fs; s3fs.S3FileSystem().get(*sys.argv[1:], recursive=True)"
SOURCES: dict[str, Callable[[Sources], Path]] = {
    "zero2": lambda made: made.zero(2),
    "zero3": lambda made: made.zero(3),
    "dcp": lambda made: made.fsdp("dcp", "float32"),
    "hf": lambda made: made.fsdp("hf", "float32"),
}
ROWS = [f"{source}-{dtype}" for source in SOURCES for dtype in ("fp32", "bf16")]
COMMANDS = ("merge", "loop", "cp", "inspect")


def contender(name: str, dtype: str, view: View, spans: Path) -> Contender:
    """Return a command that reads a source where a storage shows it."""
    source = view.path
    reshard = [PYTHON, "-m", "reshard"]
    shrink = "1" if dtype == "fp32" else "2"
    loop = [PYTHON, str(HERE / "bare_loop.py"), str(spans)]
    depth = ["--threads", str(REQUESTS), "--request", str(REQUEST_BYTES), "--shrink", shrink]
    commands: dict[str, Callable[[Path], list[str]]] = {
        "merge": lambda out: [
            *(*reshard, "merge", source, f"{out}.safetensors"),
            *("--dtype", dtype),
        ],
        "loop": lambda out: [*loop, f"{out}.raw", *depth],
        "cp": lambda out: (
            [PYTHON, "-c", COPY, source, str(out)]
            if source.startswith("s3:")
            else ["cp", "-r", source, str(out)]
        ),
        "inspect": lambda _: [*reshard, "inspect", source],
    }
    return Contender(name, commands[name], view.variables)


def run_row(source: Path, dtype: str, storage: str, ms: float, args: argparse.Namespace) -> None:
    """Run the commands in turns, and print a line for each."""
    spans = needed_spans(source, masters=source.name.startswith("zero"))
    runs: dict[str, list[Contender]] = {name: [] for name in args.only}
    counted: dict[str, tuple[int, int, int]] = {}
    with tempfile.TemporaryDirectory(prefix="reshard-latency-") as temporary:
        place = Path(temporary)
        slow = STORAGES[storage](place)
        counts = Counts(place / "counts")
        for _ in range(args.rounds):
            for name in args.only:
                counts.clear()
                with slow.serve(source, ms / 1000, counts) as view:
                    seen = [(view.path + file[len(str(source)) :], *at) for file, *at in spans]
                    (place / "spans.json").write_text(json.dumps(seen))
                    runs[name].append(contender(name, dtype, view, place / "spans.json"))
                    measure(runs[name][-1], args.place / "out" / "x")
                counted[name] = counts.get()
    shutil.rmtree(args.place / "out", ignore_errors=True)
    seconds = {name: statistics.median(each.seconds[0] for each in runs[name]) for name in runs}
    for name, each in runs.items():
        reads, nbytes, most = counted[name]
        ratio = f"{seconds[name] / seconds['loop']:9.2f}" if "loop" in seconds else f"{'-':>9}"
        cpu = statistics.median(run.cpu[0] for run in each)
        rss = max(run.rss_mb[0] for run in each)
        print(
            f"{storage:6}{ms:>5g} ms  {args.row:12}{name:9}{seconds[name]:9.2f}{ratio}{cpu:9.2f}"
            f"{reads:8d}{nbytes / 1e6:9.0f}{most:10d}{rss:10.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--place", type=Path, required=True, help="directory for checkpoints and outputs"
    )
    parser.add_argument(
        "--size", choices=list(SHAPES), default="90", help="size of the model in million parameters"
    )
    parser.add_argument(
        "--ranks", type=int, default=RANKS, help="number of ranks that write the checkpoints"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--storages", nargs="+", choices=list(STORAGES), default=list(STORAGES))
    parser.add_argument("--milliseconds", nargs="+", type=float, default=[1, 10, 50])
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    args.place = args.place.resolve()
    made = Sources(args.place / f"of-{args.size}-{args.ranks}", SHAPES[args.size], args.ranks)
    print(f"{args.size} million parameters, {args.ranks} ranks")
    head = ("s", "ratio", "CPU s", "reads", "MB", "in flight", "RSS, MB")
    widths = (9, 9, 9, 8, 9, 10, 10)
    columns = "".join(f"{word:>{width}}" for word, width in zip(head, widths, strict=True))
    print(f"{'storage':16}{'row':12}{'command':9}{columns}", flush=True)
    for storage in args.storages:
        for row in args.rows:
            source, _, dtype = row.partition("-")
            args.row = row
            for ms in args.milliseconds:
                run_row(SOURCES[source](made), dtype, storage, ms, args)


if __name__ == "__main__":
    main()
