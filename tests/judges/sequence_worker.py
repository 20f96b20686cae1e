"""Runs of real frameworks that save several checkpoints, for `average` and `--history`.

Each run leaves ``run/`` with its checkpoints, and ``found.pt``: step -> fqn -> the fp32 weights
that the live engine held when it saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.judges import deepspeed_models as models
from tests.judges import deepspeed_state, deepspeed_train, ranks
from tests.judges.deepspeed_worker import PRELOADED

Weights = dict[str, torch.Tensor]
WHOLE = StateDictOptions(full_state_dict=True)


def train_deepspeed(job: ranks.Job) -> dict[int, Weights]:
    """Train a case of the DeepSpeed judge, and save at every step of ``saves``."""
    case, saves = job.told["case"], job.told["saves"]
    deepspeed_train.start_rank()
    run = deepspeed_train.start(case, dist.get_world_size(), job.out)
    found = {}
    for step in range(max(saves)):
        deepspeed_train.train_step(run, step)
        if step + 1 in saves:
            now = deepspeed_state.snapshot(run.engine, case.slots)
            found[step + 1] = now.params | {
                name: value.float()
                for name, value in deepspeed_state.frozen_params(run.engine.module).items()
            }
            deepspeed_train.save(run, job.out / "run")
    return found


def train_fsdp2(job: ranks.Job) -> dict[int, Weights]:
    """Train a Llama under FSDP 2, and save it with DCP as torchtitan lays a run out."""
    model = _build(job.told)
    config = model.config
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, scheduler = _make_optimizer(model, job.told)

    def save(step: int) -> Weights:
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(state, checkpoint_id=job.out / "run" / f"step-{step}")
        if dist.get_rank() == 0:
            config.save_pretrained(job.out / "run")
        whole = get_model_state_dict(model, options=WHOLE)
        return {name: value.clone() for name, value in whole.items()}

    return _train(model, optimizer, scheduler, job.told["saves"], save)


def train_alone(job: ranks.Job) -> dict[int, Weights]:
    """Train a Llama in one process, and save it with transformers."""
    model = _build(job.told)
    optimizer, scheduler = _make_optimizer(model, job.told)

    def save(step: int) -> Weights:
        place = job.out / "run" / f"checkpoint-{step}"
        model.save_pretrained(place)
        return {name: value.clone() for name, value in model.state_dict().items()}

    return _train(model, optimizer, scheduler, job.told["saves"], save)


def _build(told: dict[str, Any]) -> Any:
    torch.manual_seed(told.get("seed", 7))
    model = models.llama(tied=told.get("tied", False))
    if told.get("lora"):
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, value in model.named_parameters():
        value.requires_grad_("embed" not in name or not told.get("frozen", False))
    return model


def _make_optimizer(model: torch.nn.Module, told: dict[str, Any]) -> Any:
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, **{"lr": 1e-2, **told.get("settings", {})})
    warmup = told.get("warmup", 0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / warmup, 1.0) if warmup else 1.0
    )
    return optimizer, scheduler


def _train(
    model: Any, optimizer: Any, scheduler: Any, saves: Iterable[int], save: Callable[[int], Weights]
) -> dict[int, Weights]:
    found, saves = {}, set(saves)
    for step in range(max(saves)):
        batch = models.rank_share(
            models.global_batch(step, 0, 1), dist.get_rank(), dist.get_world_size()
        )
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step + 1 in saves:
            found[step + 1] = save(step + 1)
    return found


KINDS = {"deepspeed": train_deepspeed, "fsdp2": train_fsdp2, "alone": train_alone}


def work(job: ranks.Job, rank: int) -> None:
    """Train the run that the job asks for."""
    ranks.join_group(job, rank)
    found = KINDS[job.told["kind"]](job)
    if rank == 0:
        torch.save(found, job.result)


if __name__ == "__main__":
    ranks.serve(work, PRELOADED)
