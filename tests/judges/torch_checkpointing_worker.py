"""torch_checkpointing's own CheckpointManager saves a sharded model as safetensors.

A job is a function of (ranks, ...) for `worlds.run`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.judges import programs

PROGRAM = "torch-checkpointing"
STEPS = 2


def save(_ranks, path):
    """Return the whole weights and moments of a trained model, after it was saved."""
    from tests.support.megatron.cpu import replace_cuda

    programs.enter(PROGRAM)
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    model, optimizer = _train()
    weights, state = get_state_dict(model, optimizer)
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
    config.items = {
        "model": ItemSpec(layout=layout, resharder=DefaultResharder()),
        "optimizer": ItemSpec(resharder=DefaultResharder()),
    }
    replace_cuda()  # it gathers the metadata on a GPU
    manager = CheckpointManager(config)
    manager.save(str(path), {"model": weights, "optimizer": state, "step": STEPS})
    manager.close()
    held = {name: value.full_tensor().tolist() for name, value in weights.items()}
    slots = {
        (slot, name): value.full_tensor().tolist()
        for name, own in state["state"].items()
        for slot, value in own.items()
        if slot != "step"
    }
    return held, slots


def _train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    world = dist.get_world_size()
    sizes, names = ((2, 2), ("dp_replicate", "dp_shard")) if world == 4 else ((2,), ("dp_shard",))
    fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer
