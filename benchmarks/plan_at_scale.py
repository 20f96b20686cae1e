"""Measure what a split costs before it copies a byte, for many ranks: time, memory, copies.

    python benchmarks/plan_at_scale.py zero3 256 1024 4096
    python benchmarks/plan_at_scale.py moe 256 1024 4096 16384
    python benchmarks/plan_at_scale.py fsdp2 64 256 --simulated
    python benchmarks/plan_at_scale.py dcp 64 256 --simulated

``zero3`` is Llama 3.1 405B in DeepSpeed's ZeRO 3 with Adam's moments, split to a quarter of the
ranks. ``moe`` is a mixture of experts of a trillion parameters in Megatron's torch format with the
distributed optimizer, split to another grid of tensor, pipeline and expert parallel ranks.
``fsdp2`` and ``dcp`` split 45,000 tensors of ZeRO 3 to rank files of FSDP 2 and to DCP.

The source's files have real headers but no tensor data. They are sparse files in ``--headers``,
which must be on a file system with sparse files (tmpfs is one), and the real readers read them. The
latency of a network file system is not measured. Every size runs in a process of its own; times are
CPU seconds of its one thread.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from reshard import formats
from reshard.commands.output import check_overlaps
from reshard.core import dtypes
from reshard.core.box import whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import DType
from reshard.core.manifest import (
    Entry,
    Manifest,
    Origin,
    ParamGroup,
    Skeleton,
    SourceFile,
    TrainState,
    check,
    index_entries,
)
from reshard.engine.planning.planner import Plan
from reshard.formats import registry
from reshard.formats.megatron.write.resolved import Described, MegatronTarget
from reshard.formats.request import Request
from reshard.layouts.model_parallel.architecture import Architecture
from reshard.layouts.model_parallel.rules import load_table
from reshard.layouts.model_parallel.sizes import Sizes
from reshard.training.state import build_writable_state

Shapes = dict[str, tuple[int, ...]]
ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Case:
    """A model in one layout.

    Args:
        whole: its state as one file would have it.
        request: for a number of ranks, of the source or of the target.
        source: the layout of the source; empty: the target's.
    """

    target: str
    whole: Callable[[], Manifest]
    request: Callable[[int, bool], Request]
    source: str = ""


def state(
    name: str, shapes: Shapes, kinds: dict[str, DType], config: Any, hyper: dict[str, Any]
) -> Manifest:
    """Return a manifest of whole tensors, one after the other in a file that does not exist."""
    entries, at = [], 0
    for kind, dtype in kinds.items():
        for fqn, shape in shapes.items():
            chunk = contiguous("state", at, dtype, whole(shape))
            entries.append(Entry(fqn, kind, dtype, shape, (chunk,)))
            at += dtype.itemsize * prod(shape)
    train = TrainState(
        step=10,
        optimizer_step=dict.fromkeys(shapes, 10.0),
        param_groups=(ParamGroup({**ADAM, **hyper}, tuple(shapes)),),
        config=config,
    )
    return Manifest(
        Origin(name, "state", precision="bfloat16"),
        index_entries(entries),
        {"state": SourceFile("state", at)},
        train,
        trained_dtypes=dict.fromkeys(shapes, dtypes.BFLOAT16),
        ordered=True,
    )


# Llama 3.1 405B (its config.json: 126 layers, 128 heads of which 8 groups, vocabulary 128256)


def llama(hidden: int = 16384, ffn: int = 53248, keys: int = 1024, layers: int = 126) -> Shapes:
    words = 128256
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: Shapes = {"model.embed_tokens.weight": (words, hidden)}
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}


def zero3_state(model: Callable[[], Shapes]) -> Manifest:
    kinds = dict.fromkeys(("master", *MOMENTS), dtypes.FLOAT32)
    config = {"bf16": {"enabled": True}, "train_batch_size": 65536}
    return state("deepspeed", model(), kinds, config, {"bias_correction": True})


def largest() -> Shapes:
    """Return the shapes of a model of 10 trillion parameters."""
    return llama(hidden=65536, ffn=196608, keys=4096, layers=208)


def zero3(ranks: int, is_source: bool) -> Request:
    world = ranks if is_source else max(ranks // 4, 1)
    return Request(world_size=world, zero_stage=3, separate_masters=True)


def deepest() -> Shapes:
    """Return the shapes of 15,000 parameters, which are 45,000 tensors with Adam's moments."""
    return llama(hidden=4096, ffn=14336, layers=1666)


def sharded(ranks: int, is_source: bool) -> Request:
    return zero3(8, True) if is_source else Request(world_size=ranks, device="cuda")


# A mixture of experts: 64 layers of 256 experts, 1.03 trillion parameters

LAYERS, EXPERTS, HIDDEN, FFN, HEADS, GROUPS, HEAD, WORDS = 64, 256, 7168, 2816, 64, 8, 128, 128256
ARGS = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
    "kv_channels": HEAD,
    "ffn_hidden_size": FFN,
    "moe_ffn_hidden_size": FFN,
    "num_experts": EXPERTS,
    "moe_router_topk": 8,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": WORDS,
}
GRIDS = {  # ranks -> (tensor, pipeline, expert), of the source and of the target
    256: ((4, 4, 16), (2, 8, 8)),
    1024: ((8, 8, 16), (4, 4, 32)),
    4096: ((8, 8, 64), (4, 16, 32)),
    16384: ((8, 16, 64), (4, 8, 128)),
}


def mixture() -> Shapes:
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attention.linear_qkv": ((HEADS + 2 * GROUPS) * HEAD, HIDDEN),
        "self_attention.linear_proj": (HIDDEN, HEADS * HEAD),
        "pre_mlp_layernorm": (HIDDEN,),
        "mlp.router": (EXPERTS, HIDDEN),
    }
    for number in range(EXPERTS):
        expert = f"mlp.experts.local_experts.{number}"
        layer |= {f"{expert}.linear_fc1": (2 * FFN, HIDDEN), f"{expert}.linear_fc2": (HIDDEN, FFN)}
    shapes: Shapes = {"embedding.word_embeddings.weight": (WORDS, HIDDEN)}
    for number in range(LAYERS):
        shapes |= {f"decoder.layers.{number}.{n}.weight": shape for n, shape in layer.items()}
    return shapes | {
        "decoder.final_layernorm.weight": (HIDDEN,),
        "output_layer.weight": (WORDS, HIDDEN),
    }


def moe_state() -> Manifest:
    kinds = {"param": dtypes.BFLOAT16, **dict.fromkeys(("master", *MOMENTS), dtypes.FLOAT32)}
    return state("megatron", mixture(), kinds, ARGS, {"bias_correction": True, "step": 10})


def moe(ranks: int, is_source: bool) -> Request:
    tensor, pipeline, expert = GRIDS[ranks][0 if is_source else 1]
    sizes = Sizes(tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=1)
    known = Architecture(
        source="args",
        layers=LAYERS,
        heads=HEADS,
        groups=GROUPS,
        head_dim=HEAD,
        vocab=WORDS,
        experts=EXPERTS,
        tied=False,
    )
    return MegatronTarget(
        world_size=ranks,
        parallel=sizes,
        sizes=sizes,
        distributed=True,
        described=Described(load_table("megatron"), known, ARGS),
    )


CASES = {
    "zero3": Case("deepspeed", partial(zero3_state, llama), zero3),
    "zero3-10T": Case("deepspeed", partial(zero3_state, largest), zero3),
    "fsdp2": Case("fsdp2", partial(zero3_state, deepest), sharded, "deepspeed"),
    "dcp": Case("dcp", partial(zero3_state, deepest), sharded, "deepspeed"),
    "moe": Case("megatron", moe_state, moe),
}


def write_headers(skeleton: Skeleton, directory: Path) -> None:
    """Write the files with their literals, and holes in place of tensors."""
    for file in skeleton.files:
        path = directory / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb", buffering=0) as out:
            out.truncate(file.nbytes)
            for offset, data in file.literals:
                out.seek(offset)
                out.write(data)


def make(case: Case, ranks: int, directory: Path) -> None:
    writer = registry.find_writer(case.source or case.target)
    request = case.request(ranks, True)
    laid = writer.lay_out(build_writable_state(case.whole()), request)
    write_headers(laid.skeleton, directory)


def simulate(case: Case, ranks: int) -> Manifest:
    """Return the manifest that the headers would give, without files."""
    whole_state, request = case.whole(), case.request(ranks, True)
    writer = registry.find_writer(case.source or case.target)
    laid = writer.lay_out(build_writable_state(whole_state), request).skeleton
    files = {file.name: SourceFile(file.name, file.nbytes) for file in laid.files}
    return replace(whole_state, entries=index_entries(laid.entries), files=files)


def measure(case: Case, ranks: int, directory: Path | None) -> dict[str, Any]:
    """Measure CPU seconds of each part, numbers of files and copies, and the peak RSS in MB.

    Args:
        case: the model and its layouts.
        ranks: the number of ranks of the source.
        directory: where the headers are; None simulates them.
    """
    found: dict[str, Any] = {}

    def timed(part: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = work()
        found[part] = time.process_time() - began
        return result

    if directory:
        manifest = timed("read", lambda: formats.read([directory]))
    else:  # in a process of its own, as laying out the source takes gigabytes
        with multiprocessing.get_context("fork").Pool(1) as pool:
            manifest = pool.apply(simulate, (case, ranks))
    timed("prove", lambda: check(manifest))
    request = case.request(ranks, False)
    writer = registry.find_writer(case.target)
    laid = timed("lay out", lambda: writer.lay_out(build_writable_state(manifest), request))
    skeleton = laid.skeleton
    timed("prove target", lambda: check_overlaps(skeleton))
    planned = Plan(manifest.entries, skeleton)
    found["windows"] = timed("plan", lambda: sum(1 for _ in planned))
    if directory:  # without one, there would be too many copies to count
        copies = timed("copy", lambda: sum(len(window.copies) for window in planned))
        found["copy"], found["copies"] = found["copy"] - found["plan"], copies
    found["files"] = len(manifest.files), len(skeleton.files)
    found["MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return found


PARTS = ("read", "prove", "lay out", "prove target", "plan")


def rows(name: str, sizes: list[int], headers: Path, *, simulated: bool) -> Iterator[str]:
    columns = ("ranks", "files", *PARTS, "total, s", "windows", "copies", "copies, s", "peak RSS")
    yield f"| {' | '.join(columns)} |"
    yield "|" + " --- |" * len(columns)
    for ranks in sizes:
        directory = headers / f"{name}-{ranks}"
        try:
            again = [sys.executable, __file__, name, str(ranks), "--headers", str(headers)]
            if not simulated:
                subprocess.run([*again, "--part", "make"], check=True)
            part = "simulate" if simulated else "measure"
            done = subprocess.run([*again, "--part", part], check=True, capture_output=True)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        found = json.loads(done.stdout)
        total = sum(found.get(part, 0) for part in PARTS)
        before, after = found["files"]
        cells = [f"{ranks}", f"{before} to {after}"]
        cells += [f"{found[part]:.2f}" if part in found else "" for part in PARTS]
        cells += [f"{total:.1f}", f"{found['windows'] / 1e6:.2f} M"]
        counted = "copies" in found
        cells += [f"{found['copies'] / 1e6:.2f} M", f"{found['copy']:.1f}"] if counted else ["", ""]
        cells += [f"{found['MB']} MB"]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("ranks", type=int, nargs="+", help="numbers of ranks of the source")
    parser.add_argument("--headers", type=Path, default=Path("/dev/shm/reshard-headers"))
    parser.add_argument(
        "--simulated", action="store_true", help="create the manifest in memory; write no files"
    )
    parts = ("make", "measure", "simulate")
    parser.add_argument("--part", choices=parts, help="run this part for one size, in this process")
    asked = parser.parse_args()
    case, directory = CASES[asked.case], asked.headers / f"{asked.case}-{asked.ranks[0]}"
    if asked.part == "make":
        make(case, asked.ranks[0], directory)
    elif asked.part == "measure":
        print(json.dumps(measure(case, asked.ranks[0], directory)))
    elif asked.part == "simulate":
        print(json.dumps(measure(case, asked.ranks[0], None)))
    else:
        for line in rows(asked.case, asked.ranks, asked.headers, simulated=asked.simulated):
            print(line, flush=True)


if __name__ == "__main__":
    main()
