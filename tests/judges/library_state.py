"""Read the state of live models and optimizers, as full tensors by fully qualified name."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.judges.models import ties

if TYPE_CHECKING:
    from collections.abc import Iterable

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
State = dict[str, Any]


def clean(name: str) -> str:
    """Return a name as the unwrapped model has it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def whole(tensor: Tensor) -> Tensor:
    """Return a private copy of the full tensor; for a sharded one, every rank must call it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone().cpu()


def facts(model: nn.Module) -> State:
    """Return what the architecture states: ties, frozen names, and the saved buffers."""
    saved = set(model.state_dict())
    return {
        "tied": ties(model),
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "saved_buffers": [name for name, _ in model.named_buffers() if name in saved],
    }


def read_state(
    fresh: nn.Module,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any = None,
    step: int | None = None,
) -> State:
    """Return the state of a plain, DDP, FSDP 1 or FSDP 2 run; every rank must call it.

    ``fresh`` is the same model unwrapped, whatever its values are.
    """
    known = facts(fresh)
    if isinstance(model, DistributedDataParallel):
        model = model.module
    flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    params = flat_params(model) if flat else whole_params(model)
    buffers = {clean(name): whole(value) for name, value in model.named_buffers()}
    state, groups = flat_optimizer(model, optimizer) if flat else named_optimizer(model, optimizer)
    return {
        "params": params,
        "buffers": {name: buffers[name] for name in known["saved_buffers"]},
        "tied": known["tied"],
        "frozen": known["frozen"],
        **by_slots(state),
        "groups": groups,
        "scheduler": copy.deepcopy(scheduler.state_dict()) if scheduler is not None else None,
        "step": step,
    }


def by_slots(state: dict[str, dict[str, Any]]) -> State:
    """Split ``step`` from the tensors, which must be as many as the parameter's elements."""
    return {
        "optimizer": {
            name: {slot: value for slot, value in slots.items() if slot != "step"}
            for name, slots in state.items()
        },
        "steps": {name: float(slots["step"]) for name, slots in state.items() if "step" in slots},
    }


def whole_params(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a plain, DDP or FSDP 2 model."""
    return {clean(name): whole(p) for name, p in model.named_parameters()}


def flat_params(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of an FSDP 1 model."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return whole_params(model)


def named_optimizer(model: nn.Module, optimizer: Any) -> tuple[dict[str, Any], list[State]]:
    """Return state and groups by name, found by the identity of each parameter."""
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    state = {names[id(p)]: _values(optimizer.state[p]) for p in optimizer.state}
    groups = [
        {**_hyper(group), "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return state, groups


def flat_optimizer(model: nn.Module, optimizer: Any) -> tuple[dict[str, Any], list[State]]:
    """Return state and groups as FSDP 1 reports them; CPU offload would alias the slots."""
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    ):
        found = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    state = {name: _values(slots) for name, slots in found["state"].items()}
    groups = [{**_hyper(g), "params": list(g["params"])} for g in found["param_groups"]]
    return state, groups


def _values(slots: dict[str, Any]) -> dict[str, Any]:
    return {k: whole(v) if isinstance(v, Tensor) else v for k, v in slots.items()}


def _hyper(group: dict[str, Any]) -> State:
    return {
        key: float(value) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in group.items()
        if key not in {"params", "param_names"}
    }


def decay_groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Return two groups as fine-tuning scripts have them: norms and vectors do not decay."""
    trained = [(name, p) for name, p in named if p.requires_grad]
    plain = [p for name, p in trained if "norm" in name or "small" in name]
    decay = [p for name, p in trained if not ("norm" in name or "small" in name)]
    return [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
