"""Tensor parallel: which matrices of a layer are cut by columns, which by rows, which not at all.

The plan is the one of Shoeybi et al., "Megatron-LM" (2019), section 3: what comes in is whole on
every rank, the first matrix of each block gives each rank some heads or columns, the second adds
the ranks' parts up. Modules are recognised by the last part of their name, as the Llama family
names them in transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from trainer.errors import SettingsError

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "embed_tokens": lambda: RowwiseParallel(input_layouts=Replicate()),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel),
    **dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel),
    "lm_head": lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""How a module's weight is cut. (torch calls rows what ``nn.Linear`` has as its second dim.)"""
WHOLE = {"input_layernorm", "post_attention_layernorm", "norm", "gate", "experts"}
"""What every rank has: it sees whole activations, so its gradient is the same everywhere."""


def cut(model: nn.Module, mesh: DeviceMesh, config: Any) -> None:
    """Make DTensors of what ``STYLES`` names, over the one axis of ``mesh``. Collective.

    Args:
        config: of transformers.

    Raises:
        SettingsError: the model has modules that no rule is for, or heads that do not divide.
    """
    _check_heads(config, mesh.size())
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    parallelize_module(model, mesh, plan(model))
    for first, *others in names.values():  # each module got a DTensor of its own
        for other in others:
            module, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(module), leaf, model.get_parameter(first))


def plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Module name -> style.

    Raises:
        SettingsError: a module with parameters is of a kind that is not known.
    """
    found = {}
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in STYLES:
            found[name] = STYLES[kind]()
        elif kind not in WHOLE and next(module.parameters(recurse=False), None) is not None:
            raise SettingsError(
                f"tensor parallelism has no rule for {name} ({type(module).__name__})",
                "use --tp 1, or a model of the Llama family (tiny-llama)",
            )
    return found


def _check_heads(config: Any, size: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or size
        if heads % size:
            raise SettingsError(
                f"tp {size} does not divide {name} {heads}: a rank computes whole heads",
                f"use a --tp that divides {heads}",
            )
