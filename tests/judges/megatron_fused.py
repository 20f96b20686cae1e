"""Layers that hold their norm inside the linear layer behind it, as Transformer Engine's do.

Transformer Engine needs a GPU, but its names are what most users' files hold:
``self_attention.linear_qkv.layer_norm_weight``, ``mlp.linear_fc1.layer_norm_weight``. The order of
parameters and the extra state are those of transformer_engine/pytorch/module/layernorm_linear.py
and base.py.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear


class NormThenLinear(ColumnParallelLinear):
    """A norm and a column parallel linear layer in one module."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **told: Any) -> None:
        super().__init__(input_size, output_size, config=config, **told)
        norm = getattr(torch.nn, config.normalization)(input_size, eps=config.layernorm_epsilon)
        own, self._parameters = self._parameters, {}
        for name, param in norm.named_parameters():
            param.sequence_parallel = config.sequence_parallel
            self.register_parameter(f"layer_norm_{name}", param)
        self._parameters.update(own)
        self.eps, self.kind = config.layernorm_epsilon, config.normalization
        self.history = torch.zeros(4)  # the largest outputs, as of FP8's delayed scaling

    def forward(self, x: torch.Tensor) -> Any:
        """Normalise x (sequence, samples, hidden), then as the linear layer does."""
        if self.kind == "RMSNorm":
            x = torch.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        else:
            told = (self.layer_norm_weight, self.layer_norm_bias, self.eps)
            x = torch.layer_norm(x, x.shape[-1:], *told)
        made = super().forward(x)
        largest = made[0].detach().abs().amax().float()
        self.history = torch.cat([self.history[1:], largest[None]])
        return made

    def get_extra_state(self) -> torch.Tensor:
        """Opaque bytes, as Transformer Engine's are."""
        return self.history.view(torch.uint8).clone()

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """They again; nothing and no bytes change nothing."""
        if state is not None and state.numel():
            self.history = state.clone().view(torch.float32)


class FusedSpecProvider(LocalSpecProvider):
    """Local modules where Transformer Engine has no other names."""

    def fuse_layernorm_and_linear(self) -> bool:
        """One module."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """It."""
        return NormThenLinear


def layer_spec(*, qk_layernorm: bool) -> Any:
    """What Megatron-core specifies with Transformer Engine, of these modules."""
    gpt_layer_specs.TESpecProvider = FusedSpecProvider
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm)
