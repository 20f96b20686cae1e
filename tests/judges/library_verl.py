"""Checkpoints of verl's FSDPCheckpointManager, in the directories that its trainer makes.

verl imports Ray, hydra and its engines on the way to the manager; its packages are entered without
their ``__init__``, and what else is missing is stubbed.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.judges import library_models as models
from tests.judges import library_state
from tests.judges.library_cpu import wrap_on_cpu
from tests.judges.library_stubs import stand_in

if TYPE_CHECKING:
    from torch import nn

    from tests.judges.library_cases import Case

STEPS = 3
ENTERED = ("verl", "verl.utils", "verl.utils.checkpoint", "verl.trainer", "verl.workers")


def _enter() -> None:
    for path in map(Path, sys.path):
        if (path / "verl" / "utils" / "checkpoint").is_dir():
            for name in ENTERED:
                package = types.ModuleType(name)
                package.__path__ = [str(path.joinpath(*name.split(".")))]
                sys.modules[name] = package
            return
    raise ImportError("verl is not on sys.path: ./dev install puts it into .venv/programs")


_enter()
with stand_in(["ray", "tensordict", "omegaconf", "codetiming", "hydra", "torchdata", "datasets"]):
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager


def shard(model: nn.Module, case: Case) -> nn.Module:
    """Shard as verl's workers do: on a mesh, with flat parameters in FSDP 1."""
    mesh = init_device_mesh("cpu", (case.world,), mesh_dim_names=("fsdp",))
    if case.how["version"] == 1:
        wrap_on_cpu()
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_mesh=mesh, use_orig_params=case.how["orig"]
        )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make(case: Case, ckpt: Path) -> library_state.State:
    """Save ``global_step_3/actor``, and the trainer's pointer to it."""
    bare: Any = models.build(case.factory)
    bare.config.architectures = [type(bare).__name__]  # as from_pretrained would have it
    model = shard(bare, case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    batch = models.tokens(case.world)[dist.get_rank()][None]
    for _ in range(STEPS):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    contents = {"save_contents": case.how.get("save", ["model", "optimizer", "extra"])}
    manager = FSDPCheckpointManager(model, optimizer, scheduler, checkpoint_config=contents)
    manager.save_checkpoint(str(ckpt / f"global_step_{STEPS}" / "actor"), global_step=STEPS)
    if dist.get_rank() == 0:
        (ckpt / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    return library_state.read_state(models.build(case.factory), model, optimizer, scheduler, STEPS)
