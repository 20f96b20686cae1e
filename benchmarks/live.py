"""Measure how a run starts from a checkpoint of another number of ranks: live or converted.

    python benchmarks/live.py WORK [hidden layers repeats [ways ...]]

Four ranks train a Llama with real DeepSpeed at stage 2 and save. Then two ranks load it with

    live        reshard.deepspeed.load_checkpoint
    split       reshard split, then DeepSpeed's load_checkpoint
    universal   ds_to_universal, then DeepSpeed's load_checkpoint with load_universal

Four ranks of FSDP 2 also save with DCP, and so do two. Then two ranks of FSDP 2 load

    reader      the checkpoint of four, with dcp.load through reshard.dcp.StorageReader
    dcp         the checkpoint of four, with dcp.load
    right-size  the checkpoint of two, with dcp.load

Each prints the seconds until the state is loaded, the seconds from the start of the launcher to the
end of the first step, and for each rank its peak RSS and the bytes that it read. The bytes of a
conversion count for the rank that started it. The page cache is warm for all; engines are created
before the time of the load begins.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

STAGE = 2  # DeepSpeed finds no universal checkpoint of another stage
DEEPSPEED, FSDP = ("live", "split", "universal"), ("reader", "dcp", "right-size")
RANKS = {"train": 4, "train-4": 4, "train-2": 2, **dict.fromkeys((*DEEPSPEED, *FSDP), 2)}


def train(work: Path, hidden: int, layers: int) -> None:
    """Save a checkpoint after one step, as rank of torchrun."""
    engine, tokens = start(hidden, layers, stage=STAGE)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(str(work / "run"))
    if engine.global_rank == 0:
        engine.module.config.save_pretrained(work / "run")


def load(work: Path, hidden: int, layers: int, how: str) -> None:
    """Load the checkpoint, as rank of torchrun; rank 0 prints the figures."""
    import torch.distributed as dist

    source, copy = work / "run", work / how
    universal = how == "universal"
    engine, tokens = start(hidden, layers, stage=STAGE, universal=universal)
    dist.barrier()
    began, before = time.perf_counter(), count_read()
    if how == "live":
        import reshard.deepspeed

        reshard.deepspeed.load_checkpoint(engine, source)
    else:
        if engine.global_rank == 0:
            convert(source, copy, how)
        dist.barrier()
        engine.load_checkpoint(str(copy))
    dist.barrier()
    seconds, read = time.perf_counter() - began, count_read() - before
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    report(how, seconds, read, copy)


def report(how: str, seconds: float, read: int, copy: Path) -> None:
    """Print the figures of all ranks, once all have made a step; ``copy`` is what was written."""
    import torch.distributed as dist

    dist.barrier()
    started = time.time() - float(os.environ["BEGAN"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    ranks: list[tuple[int, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (read // 10**6, peak))
    if dist.get_rank() == 0:
        written = sum(file.stat().st_size for file in copy.rglob("*") if file.is_file())
        figures = {
            "how": how,
            "load s": round(seconds, 2),
            "to first step s": round(started, 2),
            "read MB": [rank[0] for rank in ranks if rank],
            "peak MiB": [rank[1] for rank in ranks if rank],
            "written MB": written // 10**6,
            "load average": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(figures), flush=True)


def count_read() -> int:
    """Return the bytes that this process has read, from the page cache too."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line)
    return int(line.split()[1])


def use_dcp(work: Path, hidden: int, layers: int, how: str) -> None:
    """Save the state of a model under FSDP 2 with DCP, or load it, as rank of torchrun."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as live
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import reshard.dcp

    dist.init_process_group("gloo")
    model = build(hidden, layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(64).reshape(1, 64)
    if how.startswith("train"):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    state = {
        "model": live.get_model_state_dict(model),
        "optim": live.get_optimizer_state_dict(model, optimizer),
    }
    if how.startswith("train"):
        dcp.save(state, checkpoint_id=work / f"dcp{how.removeprefix('train')}")
        return
    dist.barrier()
    began, before = time.perf_counter(), count_read()
    source = work / ("dcp-2" if how == "right-size" else "dcp-4")
    reader = reshard.dcp.StorageReader(source) if how == "reader" else dcp.FileSystemReader(source)
    dcp.load(state, storage_reader=reader)
    live.set_model_state_dict(model, state["model"])
    live.set_optimizer_state_dict(model, optimizer, state["optim"])
    dist.barrier()
    seconds, read = time.perf_counter() - began, count_read() - before
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    report(how, seconds, read, work / how)


def convert(source: Path, copy: Path, how: str) -> None:
    """Write the copy that DeepSpeed loads."""
    tag = (source / "latest").read_text()
    if how == "split":
        command = [
            "-m",
            "reshard",
            "split",
            str(source),
            str(copy),
            "--world-size",
            str(RANKS[how]),
        ]
    else:
        command = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        command += ["--input_folder", str(source / tag), "--output_folder", str(copy / tag)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    subprocess.run(
        [sys.executable, *command], check=True, env=environment, stdout=subprocess.DEVNULL
    )


def start(hidden: int, layers: int, *, stage: int, universal: bool = False):  # noqa: ANN201
    """Return an engine and a batch."""
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = build(hidden, layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": universal},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine, torch.arange(64).reshape(1, 64)


def build(hidden: int, layers: int):  # noqa: ANN201
    """Return a Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=hidden,
            intermediate_size=hidden * 3,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
        )
    )


def main() -> None:
    """Start the ranks of each phase, one after the other."""
    work = Path(sys.argv[1])
    sizes = sys.argv[2:4] or ["1024", "8"]
    if "RANK" in os.environ:
        how = sys.argv[4]
        if how == "train":
            train(work, *map(int, sizes))
        elif how in DEEPSPEED:
            load(work, *map(int, sizes), how)
        else:
            use_dcp(work, *map(int, sizes), how)
        return
    repeats = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    ways = tuple(sys.argv[5:]) or (*DEEPSPEED, *FSDP)
    saves = [
        *(["train"] if {*DEEPSPEED} & {*ways} else []),
        *(["train-4", "train-2"] if {*FSDP} & {*ways} else []),
    ]
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    for how in (*saves, *repeats * ways):
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nproc-per-node", str(RANKS[how]), __file__, str(work), *sizes, how]
        began = {"DS_BUILD_OPS": "0", "BEGAN": str(time.time())}
        subprocess.run(command, check=True, env=environment | began)
        shutil.rmtree(work / how, ignore_errors=True)


if __name__ == "__main__":
    main()
