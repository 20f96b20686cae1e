"""Megatron-core's models with gated delta nets on a CPU.

Megatron-core's own PyTorch functions replace the kernels of ``fla``, and the layers of `fused`
replace those of Transformer Engine, of which Megatron-core builds these models.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.megatron import cpu


def replace_kernels() -> None:
    """Add modules with the functions of ``fla`` that Megatron-core imports.

    Megatron-core must not be imported yet.
    """

    def normalize(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)

    def compute(*args: Any, **options: Any) -> Any:
        from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

        return torch_chunk_gated_delta_rule(*args, **options)

    functions: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.modules": {},
        "fla.ops": {},
        "fla.modules.l2norm": {"l2norm": normalize},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": compute},
    }
    cpu.add_modules(functions)


def make_layer_spec(config: Any) -> Any:
    """Return Megatron-core's specification of this rank's layers."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs

    from tests.support.megatron.fused import FusedSpecProvider

    variants.TESpecProvider = FusedSpecProvider
    gpt_layer_specs.TESpecProvider = FusedSpecProvider
    return variants.get_transformer_block_with_experimental_attention_variant_spec(config)
