"""Define the benchmarks of merging: reshard, other mergers, and the limit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from contest import HERE, PYTHON, THREADS, Contender, limits

import reshard
from reshard.core.manifest import MASTER, PARAM

DCP_TO_TORCH = [PYTHON, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]


def needed_spans(run: Path, *, masters: bool) -> list[tuple[str, int, int]]:
    """Return where the weights' bytes are in the source, in the order of the output."""
    with reshard.open(run) as checkpoint:
        manifest = checkpoint.manifest
    wanted = {entry.fqn: entry for entry in manifest.of_kind(PARAM)}
    if masters:
        wanted.update((entry.fqn, entry) for entry in manifest.of_kind(MASTER))
    spans = []
    for fqn in sorted(wanted):
        seen = set()
        for chunk in wanted[fqn].chunks:
            start, stop = chunk.byte_span
            if chunk.box not in seen:  # a replica is read once
                spans.append((chunk.file, start, stop - start))
            seen.add(chunk.box)
    return spans


def ours(source: Path, *options: str) -> list[Contender]:
    command = [PYTHON, "-m", "reshard", "merge", str(source)]
    return [
        Contender("reshard", lambda out: [*command, f"{out}.safetensors", *options]),
        Contender(
            "reshard --no-verify",
            lambda out: [*command, f"{out}.safetensors", *options, "--no-verify"],
        ),
        Contender(
            "reshard --workers 1",
            lambda out: [*command, f"{out}.safetensors", *options, "--workers", "1"],
        ),
    ]


def of_zero(run: Path, dtype: str, spans: Path) -> list[Contender]:
    """Merge a DeepSpeed run, against ``zero_to_fp32``, which writes only fp32."""
    spans.write_text(json.dumps(needed_spans(run, masters=True)))
    found = [*ours(run, "--dtype", dtype), *limits(spans, shrink=1 if dtype == "fp32" else 2)]
    if dtype == "fp32":
        command = [PYTHON, str(run / "zero_to_fp32.py"), str(run)]
        options = ["--safe_serialization", "--max_shard_size", "1TB"]
        found.append(Contender("zero_to_fp32", lambda out: [*command, str(out), *options]))
    return found


def of_dcp(source: Path, spans: Path) -> list[Contender]:
    spans.write_text(json.dumps(needed_spans(source, masters=False)))
    accelerate = [str(Path(PYTHON).parent / "accelerate"), "merge-weights"]
    return [
        *ours(source),
        Contender(
            "reshard, to .pt",
            lambda out: [PYTHON, "-m", "reshard", "merge", str(source), f"{out}.pt"],
        ),
        *limits(spans),
        Contender("dcp_to_torch", lambda out: [*DCP_TO_TORCH, str(source), f"{out}.pt"]),
        Contender("accelerate merge-weights", lambda out: [*accelerate, str(source), str(out)]),
    ]


def of_hf_shards(source: Path, spans: Path) -> list[Contender]:
    spans.write_text(json.dumps(needed_spans(source, masters=False)))
    command = [PYTHON, str(HERE / "peers.py"), "consolidate", str(source)]
    return [
        *ours(source),
        *limits(spans),
        Contender("consolidate, 1 thread", lambda out: [*command, str(out)]),
        Contender(
            f"consolidate, {THREADS} threads",
            lambda out: [*command, str(out), "--threads", str(THREADS)],
        ),
    ]


def of_verl(source: Path, spans: Path) -> list[Contender]:
    """Merge verl's files, against its own merger if `./dev bench` installed it."""
    spans.write_text(json.dumps(needed_spans(source, masters=False)))
    found = [*ours(source), *limits(spans)]
    if Path(sys.prefix, "programs", "verl").is_dir():
        command = [PYTHON, str(HERE / "peers.py"), "verl", str(source)]
        found.append(Contender("verl.model_merger", lambda out: [*command, str(out)]))
    return found


def of_megatron(source: Path, spans: Path) -> list[Contender]:
    """Merge files of ``dist_checkpointing``, or one file per rank of ``--ckpt-format torch``.

    Megatron-LM's converter takes part where ``RESHARD_MEGATRON`` says where its clone lies.
    """
    spans.write_text(json.dumps(needed_spans(source, masters=False)))
    found = [*ours(source), *limits(spans)]
    (iteration,) = source.glob("iter_*")
    if (iteration / ".metadata").exists():
        command = [PYTHON, str(HERE / "peers.py"), "plain", str(iteration)]
        return [
            *found,
            Contender("load_plain_tensors", lambda out: [*command, f"{out}.safetensors"]),
            Contender("dcp_to_torch", lambda out: [*DCP_TO_TORCH, str(iteration), f"{out}.pt"]),
        ]
    if "RESHARD_MEGATRON" in os.environ:
        convert = [PYTHON, str(HERE / "peers.py"), "convert", str(source)]
        found.append(Contender("tools/checkpoint/convert.py", lambda out: [*convert, str(out)]))
    return found
