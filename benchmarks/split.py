"""Define the benchmarks of splitting: reshard, ``ds_to_universal``, DCP, ``cp``, and the limit."""

from __future__ import annotations

import json
from pathlib import Path

from contest import HERE, PYTHON, Contender, limits

from reshard import formats
from reshard.core import keys
from reshard.engine.planning.planner import Plan
from reshard.formats import registry
from reshard.formats.request import Request
from reshard.training.state import build_writable_state


def copied_spans(run: Path, ranks: int, stage: int) -> list[tuple[str, int, int]]:
    """Return (file, byte offset, nbytes) of every run that the plan of a split copies."""
    manifest = keys.edit(formats.read([run]), keys.Edits()).manifest
    request = Request(world_size=ranks, zero_stage=stage)
    skeleton = (
        registry.find_writer("deepspeed").lay_out(build_writable_state(manifest), request).skeleton
    )
    return [
        (copy.file, copy.byte_offset, copy.numel * copy.dtype.itemsize)
        for window in Plan(manifest.entries, skeleton)
        for copy in window.copies
    ]


def split(name: str, run: Path, *options: str) -> Contender:
    command = [PYTHON, "-m", "reshard", "split", str(run)]
    return Contender(name, lambda out: [*command, str(out), *options])


def to_ranks(run: Path, ranks: int, stage: int, spans: Path) -> list[Contender]:
    """Split a run of DeepSpeed to other ranks, at ``stage``."""
    spans.write_text(json.dumps(copied_spans(run, ranks, stage)))
    to = ("--world-size", str(ranks), "--zero-stage", str(stage))
    return [
        split("reshard", run, *to),
        split("reshard --no-verify", run, *to, "--no-verify"),
        *limits(spans),
        Contender("cp -r", lambda out: ["cp", "-r", str(run), str(out)]),
    ]


def to_universal(run: Path) -> list[Contender]:
    command = [PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    (tag,) = (path for path in run.iterdir() if path.is_dir())
    folders = ["--input_folder", str(tag), "--output_folder"]
    return [
        split("reshard", run, "--to", "ds-universal"),
        Contender("ds_to_universal", lambda out: [*command, *folders, f"{out}/u"]),
        Contender("cp -r", lambda out: ["cp", "-r", str(run), str(out)]),
    ]


def dcp_shards(source: Path, config: Path, ranks: int) -> list[Contender]:
    """Reshard with DCP itself: load into a live model of as many ranks, and save."""
    again = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    again.append(str(HERE / "dcp_again.py"))
    return [
        split("reshard", source, "--world-size", str(ranks)),
        Contender(
            f"DCP load and save, {ranks} ranks",
            lambda out: [*again, str(source), str(out), str(config)],
        ),
        Contender("cp -r", lambda out: ["cp", "-r", str(source), str(out)]),
    ]


def to_megatron(model: Path, tp: int) -> list[Contender]:
    """Split a model with tensor parallelism, which cuts half of its matrices along columns."""
    options = ("--to", "megatron", "--init-optimizer", "none", "--world-size", str(tp))
    return [
        split(f"reshard --tp {tp}", model, *options, "--tp", str(tp)),
        split("reshard --tp 1", model, *options[:-1], "1"),
        Contender("cp -r", lambda out: ["cp", "-r", str(model), str(out)]),
    ]
