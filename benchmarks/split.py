"""``reshard split`` against ``ds_to_universal``, DCP load-and-save, ``cp`` and a bare copy loop.

    torchrun --nproc-per-node 8 benchmarks/make_zero.py RUN --stage 2
    python benchmarks/split.py RUN --out /dev/shm/bench/out --ranks 6 16

Every command is a whole process, start-up included; commands take turns. The bare loop reads and
writes the bytes that the plan of a split moves. ``ds_to_universal`` and DCP's load-and-save start
from the same state: DCP's directory is what ``reshard convert --to dcp`` makes of RUN.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path

from contest import HERE, PYTHON, Contender, compete, limits, report

from reshard import formats, keys
from reshard.formats import targets
from reshard.formats.training import training
from reshard.plan import plan


def copied_spans(run: Path, ranks: int) -> list[tuple[str, int, int]]:
    """(file, byte offset, nbytes) of every run that the plan of a split copies."""
    manifest = keys.edit(formats.read([run]), keys.Edits()).manifest
    stage = int(manifest.origin.detail.removeprefix("ZeRO stage "))
    asked = targets.Request(world_size=ranks, zero_stage=stage)
    skeleton = targets.TARGETS["deepspeed"].lay_out(training(manifest), asked)
    return [
        (copy.file, copy.byte_offset, copy.numel * copy.dtype.itemsize)
        for window in plan(manifest.entries, skeleton)
        for copy in window.copies
    ]


def split(name: str, run: Path, *options: str) -> Contender:
    command = [PYTHON, "-m", "reshard", "split", str(run)]
    return Contender(name, lambda out: [*command, str(out), *options])


def of_deepspeed(run: Path, ranks: int, spans: Path) -> list[Contender]:
    universal = [PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal"]
    (tag,) = (path for path in run.iterdir() if path.is_dir())
    to = ("--world-size", str(ranks))
    return [
        split(f"split to {ranks}", run, *to),
        split(f"split to {ranks} --no-verify", run, *to, "--no-verify"),
        *limits(spans),
        Contender("cp -r", lambda out: ["cp", "-r", str(run), str(out)]),
        split("split to ds-universal", run, "--to", "ds-universal"),
        Contender(
            "ds_to_universal",
            lambda out: [
                *(*universal, "--inject_missing_state"),
                *("--input_folder", str(tag), "--output_folder", f"{out}/u"),
            ],
        ),
    ]


def of_dcp(source: Path, config: Path, ranks: int) -> list[Contender]:
    again = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    again.append(str(HERE / "dcp_again.py"))
    return [
        split(f"split to {ranks} shards", source, "--world-size", str(ranks)),
        Contender(
            f"DCP load and save, {ranks} ranks",
            lambda out: [*again, str(source), str(out), str(config)],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[6, 16])
    parser.add_argument("--out", type=Path, default=Path("bench-out/x"))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    spans = args.out.parent.with_suffix(".spans.json")
    spans.parent.mkdir(parents=True, exist_ok=True)
    for ranks in args.ranks:
        spans.write_text(json.dumps(copied_spans(args.run, ranks)))
        field_of = of_deepspeed(args.run, ranks, spans)
        compete(field_of, args.out, args.rounds)
        report(f"{args.run} -> {ranks} ranks", field_of)
    spans.unlink()
    dcp = args.out.parent.with_name("dcp")
    convert = [PYTHON, "-m", "reshard", "convert", str(args.run), str(dcp), "--to", "dcp"]
    subprocess.run([*convert, "--quiet"], check=True)
    for ranks in args.ranks:
        field_of = of_dcp(dcp, args.run / "config.json", ranks)
        compete(field_of, args.out, args.rounds)
        report(f"{dcp} -> {ranks} shards", field_of)
    shutil.rmtree(dcp)


if __name__ == "__main__":
    main()
