"""Tensor parallelism: which matrices of a layer are cut by columns, by rows, or not at all.

The plan is that of Shoeybi et al., "Megatron-LM" (2019), section 3: the input is whole on every
rank, the first matrix of a block gives each rank some heads or columns, and the second one adds the
ranks' parts. Modules are recognized by the last part of their name, as the Llama family of
transformers names them.
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

from trainer.core.model import list_names
from trainer.errors import SettingsError

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "embed_tokens": lambda: RowwiseParallel(input_layouts=Replicate()),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel),
    **dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel),
    "lm_head": lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""How the weight of a module is cut. (torch calls the second dim of ``nn.Linear`` rows.)"""
WHOLE = {"input_layernorm", "post_attention_layernorm", "norm", "gate", "experts"}
"""Modules that every rank has: they see whole activations, so their gradients are equal."""


def cut_layers(model: nn.Module, mesh: DeviceMesh, config: Any) -> None:
    """Turn the parameters that ``STYLES`` names into DTensors. Collective.

    Args:
        model: a model of the Llama family, which is modified in place.
        mesh: the tensor axis.
        config: the model's configuration in transformers.

    Raises:
        SettingsError: a module has no rule, or the ranks do not divide the heads.
    """
    _check_heads(config, mesh.size())
    names = list_names(model)
    parallelize_module(model, mesh, make_plan(model))
    for first, *others in names.values():  # tied ones: each module got a DTensor of its own
        for other in others:
            module, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(module), leaf, model.get_parameter(first))


def make_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return module name -> style.

    Raises:
        SettingsError: a module with parameters has no rule.
    """
    styles = {}
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in STYLES:
            styles[name] = STYLES[kind]()
        elif kind not in WHOLE and next(module.parameters(recurse=False), None) is not None:
            raise SettingsError(
                f"tensor parallelism has no rule for {name} ({type(module).__name__})",
                "use --tp 1, or a model of the Llama family (tiny-llama)",
            )
    return styles


def _check_heads(config: Any, size: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or size
        if heads % size:
            raise SettingsError(
                f"--tp {size} does not divide {name} {heads}: a rank computes whole heads",
                f"use a --tp that divides {heads}",
            )
