"""Measure what DeepSpeed, FSDP and DDP keep on a rank between backward and the optimizer step."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from reshard.sizing.configs import build_deepspeed
from reshard.sizing.families import count_config
from reshard.sizing.setup import Cluster, Training
from reshard.sizing.strategies import forecast
from reshard.sizing.strategy_choice import choose_named
from tests.judges.memory_cases import BUCKET, CASES, CONFIG, SEQ_LEN, Case
from tests.judges.ranks import Job, join_group, serve

PRELOADED = (
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "transformers.models.llama.modeling_llama",
)
Step = tuple[Callable[[], None], Callable[[], None]]


def _build(case: Case) -> nn.Module:
    config = AutoConfig.for_model(**CONFIG)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    for name, parameter in model.named_parameters():
        if case.frozen and re.search(case.frozen, name):
            parameter.requires_grad = False
    return model


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _loss(model: Any) -> Tensor:
    tokens = torch.arange(SEQ_LEN).reshape(1, -1)
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _write_config(case: Case) -> dict[str, Any]:
    """Return the configuration that `reshard plan` writes, as one that DeepSpeed must accept."""
    cluster = Cluster(case.world, 10**12)
    # Stage 1 reduces gradients at the end of an accumulation, and keeps all of them until then.
    steps = 2 if case.strategy == "zero1" else 1
    training = Training(
        precision=case.precision,  # type: ignore[arg-type]
        seq_len=SEQ_LEN,
        global_batch=steps * case.world,
    )
    rows = forecast(count_config(CONFIG, "config"), cluster, training)
    return build_deepspeed(choose_named(rows, case.strategy, cluster), cluster, training)


def _start_deepspeed(case: Case) -> Step:
    model = _build(case)
    config = _write_config(case)
    config["zero_optimization"] |= {
        "overlap_comm": False,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": BUCKET,
        "stage3_max_reuse_distance": BUCKET,
    }
    config["zero_force_ds_cpu_optimizer"] = False  # it would be compiled
    optimizer = torch.optim.AdamW(_trained(model), 1e-3)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    return lambda: engine.backward(_loss(engine)), engine.step


def _start_torch(case: Case) -> Step:
    model = _build(case)
    narrow = torch.bfloat16 if case.precision == "bf16" else torch.float32
    if case.strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        world = dist.get_world_size()
        sizes = (2, world // 2) if case.strategy == "hsdp" else (world,)
        mesh = dist.init_device_mesh(
            "cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :]
        )
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(_trained(model), 1e-3, foreach=False)

    def backward() -> None:
        with torch.autocast("cpu", dtype=narrow, enabled=case.strategy == "ddp"):
            loss = _loss(model)
        loss.backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    backward.model = model  # type: ignore[attr-defined]
    return backward, step


def _list_tensors() -> Iterator[Tensor]:
    """Yield every tensor that Python reaches, with the local part of a distributed one."""
    for each in gc.get_objects():
        if isinstance(each, DTensor):
            yield each.to_local()
            if each.grad is not None:
                yield each.grad.to_local()
        elif isinstance(each, Tensor) and type(each).__name__ != "FakeTensor":
            yield each
            if each.is_leaf and each.grad is not None and not isinstance(each.grad, DTensor):
                yield each.grad


def _count_bytes() -> int:
    gc.collect()  # tensors in cycles that are only not yet freed are no model state
    storages: dict[int, int] = {}
    for tensor in _list_tensors():
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _count_after_barrier() -> int:
    """Count when ranks have met: a thread of gloo may still hold the tensors of a collective."""
    dist.barrier()
    return _count_bytes()


def _work(job: Job, rank: int) -> None:
    case = CASES[job.case]
    join_group(job, rank)
    before = _count_bytes()
    start = _start_deepspeed if case.strategy.startswith("zero") else _start_torch
    backward, step = start(case)
    for _ in range(2):  # the optimizer has its state after one step, of two micro batches at most
        backward()
        step()
    backward()
    counted = min(_count_after_barrier() for _ in range(3)) - before
    every: list[Any] = [None] * job.world
    dist.all_gather_object(every, counted)
    if rank == 0:
        (job.out / "found.json").write_text(json.dumps(every))
    dist.barrier()


if __name__ == "__main__":
    serve(_work, PRELOADED)
