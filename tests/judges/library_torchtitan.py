"""Checkpoints of torchtitan's CheckpointManager.

Each ``step-N`` is in DCP; the last one may be the model alone, or safetensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.judges import library_models as models
from tests.judges import library_state
from tests.judges.library_stubs import stand_in

if TYPE_CHECKING:
    from pathlib import Path

    from tests.judges.library_cases import Case

MISSING = ("torchdata", "tyro", "datasets", "tensorboard", "wandb", "spmd_types", "triton")
with stand_in(MISSING):
    import triton  # type: ignore[import-not-found]

    triton.__version__ = "3.0"
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
    from torchtitan.components.optimizer.optimizer import ParamGroupConfig
    from torchtitan.models.common.attention import FusedQKVLinear
    from torchtitan.models.common.linear import Linear

STEPS = 3


class TrainState:
    """What torchtitan's trainer saves of itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the same state as ``Trainer.state_dict``."""
        return {"step": self.step, "ntokens_seen": self.step * 32}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the manager requires the method of a stateful object."""
        self.step = state["step"]


class Fused(torch.nn.Module):
    """A model with the projection of torchtitan's Llama 3, of which it saves three parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = torch.nn.Embedding(models.VOCAB, 8)
        linear = Linear.Config(in_features=8, out_features=24, bias=False)
        heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 3}
        self.qkv = FusedQKVLinear(FusedQKVLinear.Config(**heads, wqkv=linear))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        loss: torch.Tensor = self.qkv.wqkv(self.embed(tokens)).square().mean()
        return loss


class Adapter:
    """The least of a state dict adapter: the names are Hugging Face's already."""

    def __init__(self, mapping: dict[str, int] | None) -> None:
        self.fqn_to_index_mapping = mapping

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state unchanged: there is nothing to rename."""
        return state


def make(case: Case, ckpt: Path) -> library_state.State:
    """Save ``step-2`` whole and ``step-3`` as the case asks; a sample has only the last step."""
    model: Any = models.build(case.factory)
    mesh = init_device_mesh("cpu", (case.world,), mesh_dim_names=("fsdp",))
    for layer in _layers(case, model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = OptimizersContainer(_groups(case), model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=10
    )
    state = TrainState()
    last = {key: case.how[key] for key in ("last_save_model_only", "last_save_in_hf")}
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True, interval=100 if case.kept else 2, **last, **case.how.get("export", {})
        ),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=Adapter(case.how.get("mapping")),
        base_folder=str(ckpt),
    )
    del manager.states["dataloader"]  # the trainer's real one; None is nothing to save
    for step in range(1, STEPS + 1):
        state.step = step
        _loss(case, model).backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        manager.save(step, last_step=step == STEPS)
    (optimizer,) = optimizers.optimizers
    found = library_state.read_state(
        models.build(case.factory), model, optimizer, schedulers, STEPS
    )
    manager.close()
    if last["last_save_model_only"]:
        dtype = getattr(torch, case.how.get("export", {}).get("export_dtype", "float32"))
        params = {name: value.to(dtype) for name, value in found["params"].items()}
        empty: library_state.State = {"optimizer": {}, "steps": {}, "groups": []}
        step = None if last["last_save_in_hf"] else STEPS  # else the directory's name says it
        found |= {"params": params, "scheduler": None, "step": step, **empty}
        floats = {
            n: v.to(dtype) if v.is_floating_point() else v for n, v in found["buffers"].items()
        }
        found["buffers"] = floats
    return found


def _layers(case: Case, model: Any) -> Any:
    if case.factory == "tiny":
        return model
    return (model.llama if case.factory.startswith("net") else model).model.layers


def _loss(case: Case, model: Any) -> torch.Tensor:
    batch = models.tokens(case.world)[dist.get_rank()][None]
    if case.factory == "tiny":
        loss: torch.Tensor = model(batch[:, :6] / models.VOCAB).square().mean()
    elif case.factory.startswith("net"):
        loss = model(batch)
    else:
        loss = model(batch, labels=batch).loss
    return loss


def _groups(case: Case) -> Any:
    def group(pattern: str, decay: float) -> ParamGroupConfig:
        kwargs = {"lr": 1e-2, "weight_decay": decay}
        return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=kwargs)

    plain = "bias" if case.factory == "tiny" else "norm|small"
    groups = [group(plain, 0.0), group(".*", 0.1)]
    return OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
