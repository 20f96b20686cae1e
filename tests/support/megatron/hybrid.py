"""Megatron-core's hybrid models (Mamba 2, attention, feed-forward layers) on a CPU.

Plain PyTorch replaces the kernels of ``mamba_ssm``, and the layers of `fused` replace those of
Transformer Engine, of which ``mamba_layer_specs.py`` builds these models.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from tests.support.megatron import cpu

if TYPE_CHECKING:
    from argparse import Namespace


class _RMSNormGated(torch.nn.Module):
    """The norm of each group of x after the gate, as ``layernorm_gated.RMSNorm`` computes it."""

    def __init__(
        self, size: int, eps: float, group_size: int, *, norm_before_gate: bool, **options: Any
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=options["dtype"]))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x = x * F.silu(z)
        groups = x.reshape(*x.shape[:-1], -1, self.group)
        return F.rms_norm(groups, groups.shape[-1:], None, self.eps).reshape(x.shape) * self.weight


def _scan(x: Any, dt: Any, a: Any, b: Any, c: Any, _chunk: int, **options: Any) -> torch.Tensor:
    """Compute the result of ``mamba_chunk_scan_combined``, step by step.

    Args:
        x: (batch, length, heads, dim).
        b, c: (batch, length, groups, state).
    """
    assert options["dt_softplus"]
    assert options["z"] is None
    kind = x.dtype
    x, dt, a, b, c = (each.double() for each in (x, dt, a, b, c))
    step = F.softplus(dt + options["dt_bias"])
    b, c = (each.repeat_interleave(x.shape[2] // each.shape[2], dim=2) for each in (b, c))
    state = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1])
    out = []
    for at in range(x.shape[1]):
        kept = torch.exp(step[:, at] * a)[..., None, None]
        added = (step[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        state = kept * state + added
        out.append((state * c[:, at, :, None]).sum(-1) + options["D"][:, None] * x[:, at])
    return torch.stack(out, 1).to(kind)


def replace_kernels() -> None:
    """Add modules with the functions of ``mamba_ssm`` that Megatron-core imports."""
    parts: dict[str, dict[str, Any]] = {
        "layernorm_gated": {"RMSNorm": _RMSNormGated},
        "ssd_combined": {
            "mamba_chunk_scan_combined": _scan,
            "mamba_split_conv1d_scan_combined": None,
        },
        "selective_state_update": {"selective_state_update": None},
    }
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        sys.modules.setdefault(name, types.ModuleType(name))
    modules = {f"mamba_ssm.ops.triton.{name}": values for name, values in parts.items()}
    # A module of inference, whose import needs Triton.
    modules["megatron.core.inference.contexts.attention_context.triton.tensor_ops"] = dict.fromkeys(
        ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")
    )
    cpu.add_modules(modules)


def build(args: Namespace, config: Any, **options: Any) -> Any:
    """Build this rank's stage like ``mamba_builder``."""
    replace_kernels()
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_block.TENorm = WrappedTorchNorm
    # This path would call ``mamba_split_conv1d_scan_combined``, which has no stand-in.
    config.use_mamba_mem_eff_path = False
    return MambaModel(
        config,
        ModuleSpec(module=mamba_block.MambaStack, submodules=_specify_layers()),
        hybrid_override_pattern=args.hybrid_override_pattern,
        **options,
    )


def _specify_layers() -> Any:
    """Return Megatron-core's specification of each kind of layer, without Transformer Engine."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from tests.support.megatron.fused import Core, FusedSpecProvider, NormThenLinear

    attention = SelfAttentionSubmodules(
        linear_qkv=NormThenLinear, core_attention=Core, linear_proj=RowParallelLinear
    )
    return mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                mixer=ModuleSpec(
                    module=MambaMixer,
                    submodules=MambaMixerSubmodules(
                        in_proj=NormThenLinear, out_proj=RowParallelLinear
                    ),
                ),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                self_attention=ModuleSpec(
                    module=SelfAttention,
                    params={"attn_mask_type": AttnMaskType.causal},
                    submodules=attention,
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                mlp=ModuleSpec(
                    module=MLP,
                    submodules=MLPSubmodules(
                        linear_fc1=NormThenLinear, linear_fc2=RowParallelLinear
                    ),
                ),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                # Any number of experts but None has the same effect (``mamba_layer_specs.py``).
                mlp=get_moe_module_spec_for_backend(
                    FusedSpecProvider(), num_experts=8, moe_grouped_gemm=True
                ),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    )
