"""Layers that contain a norm and the linear layer after it, like those of Transformer Engine.

Transformer Engine needs a GPU, but the files of most users have its names:
``self_attention.linear_qkv.layer_norm_weight``, ``mlp.linear_fc1.layer_norm_weight``. The order of
the parameters and the extra state are those of
transformer_engine/pytorch/module/layernorm_linear.py and base.py.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class NormThenLinear(ColumnParallelLinear):
    """A norm and a column parallel linear layer in one module."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        norm = getattr(torch.nn, config.normalization)(input_size, eps=config.layernorm_epsilon)
        # Transformer Engine registers the norm's parameters first, so optimizers number them first.
        own, self._parameters = self._parameters, {}
        for name, param in norm.named_parameters():
            param.sequence_parallel = config.sequence_parallel
            self.register_parameter(f"layer_norm_{name}", param)
        self._parameters.update(own)
        self.added = int(config.layernorm_zero_centered_gamma)
        self.eps, self.kind = config.layernorm_epsilon, config.normalization
        self.history = torch.zeros(4)  # the largest outputs, as FP8's delayed scaling keeps them

    def forward(self, x: torch.Tensor) -> Any:
        """Normalize x (sequence, samples, hidden), then apply the linear layer."""
        if self.kind == "RMSNorm":
            x = torch.rms_norm(x, x.shape[-1:], self.added + self.layer_norm_weight, self.eps)
        else:
            parts = (self.layer_norm_weight, self.layer_norm_bias, self.eps)
            x = torch.layer_norm(x, x.shape[-1:], *parts)
        result = super().forward(x)
        largest = result[0].detach().abs().amax().float()
        self.history = torch.cat([self.history[1:], largest[None]])
        return result

    def get_extra_state(self) -> torch.Tensor:
        """Return bytes whose content only this class knows, like Transformer Engine."""
        return self.history.view(torch.uint8).clone()

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Restore the state; None and an empty state change nothing."""
        if state is not None and state.numel():
            self.history = state.clone().view(torch.float32)


class Whole(torch.nn.Module):
    """A module that is the same on every tensor-parallel rank, with an empty extra state."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Return the tensors and the extra state like Transformer Engine's wrappers."""
        options = {
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
            "dp_cp_group": metadata["dp_cp_group"],
        }
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, None, sharded_offsets, **options)

    def get_extra_state(self) -> None:
        """Return None, which is saved under the key of Transformer Engine."""

    def set_extra_state(self, state: Any) -> None:
        """Accept a state, and ignore it."""


class Core(Whole, DotProductAttention):
    """Attention with an extra state, like Transformer Engine's."""


class WholeLinear(Whole):
    """A linear layer that every tensor-parallel rank has whole (``TELinear``, "duplicated")."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, parallel_mode: str, **_: Any
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated"
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(config.init_method(weight))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> Any:
        """Apply the layer to x (sequence, samples, inputs); return the outputs, and no bias."""
        return torch.nn.functional.linear(x, self.weight), None


class GroupedLinear(Whole):
    """The weights of several experts in one module (``TEGroupedLinear``), for a rank's tokens."""

    def __init__(
        self,
        count: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        tp_comm_buffer_name: str,
        **options: Any,
    ) -> None:
        super().__init__()
        assert not options["bias"]
        self.groups = options["pg_collection"]
        ranks = self.groups.expt_tp.size()
        # Ranks divide the outputs of the first linear layer, and the inputs of the second.
        is_first = tp_comm_buffer_name == "fc1"
        self.cut = 0 if is_first else 1
        shape = (
            (output_size // ranks, input_size) if is_first else (output_size, input_size // ranks)
        )
        for number in range(count):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{number}", weight)
        self.register_load_state_dict_pre_hook(self._join_extra_states)

    @staticmethod
    def _join_extra_states(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Drop the states of all experts but the first, as ``merge_extra_states`` joins them."""
        for number in range(1, len(list(module.parameters()))):
            state.pop(f"{prefix}_extra_state{number}", None)

    def forward(self, x: torch.Tensor, tokens_per_expert: list[int]) -> Any:
        """Return the outputs of the tokens, which are in the order of their experts."""
        parts = zip(x.split(tokens_per_expert), self.parameters(), strict=True)
        return torch.cat([torch.nn.functional.linear(part, weight) for part, weight in parts]), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Return the same as ``_sharded_state_dict_grouped`` (extensions/transformer_engine.py)."""
        weights = list(self.parameters())
        first, count = self.groups.ep.rank() * len(weights), self.groups.ep.size() * len(weights)
        found = {}
        for number, weight in enumerate(weights):
            own = make_sharded_tensors_for_checkpoint(
                {"weight": weight, "_extra_state": None},
                prefix,
                {"weight": self.cut},
                (*sharded_offsets, (len(sharded_offsets), first + number, count)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for part in own.values():
                part.replica_id = (*part.replica_id[:2], self.groups.expt_dp.rank())
            found[f"{prefix}weight{number}"] = own[f"{prefix}weight"]
            found[f"{prefix}_extra_state{number or ''}"] = own[f"{prefix}_extra_state"]
        return found


class FusedSpecProvider(LocalSpecProvider):
    """The modules of this file, and local ones where Transformer Engine has the same names."""

    def linear(self) -> type:
        """Return the layer of latent attention's down projections."""
        return WholeLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Return True: the norm and the linear layer are one module."""
        return True

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> Any:
        """Return the experts' module."""
        if moe_use_grouped_gemm and not moe_use_legacy_grouped_gemm:
            return TEGroupedMLP, MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        return super().grouped_mlp_modules(moe_use_grouped_gemm, moe_use_legacy_grouped_gemm)

    def core_attention(self) -> type:
        """Return attention with an extra state."""
        return Core

    def column_parallel_layer_norm_linear(self) -> type:
        """Return the module that contains both."""
        return NormThenLinear


def make_layer_spec(config: Any) -> Any:
    """Return Megatron-core's specification with Transformer Engine, made of these modules."""
    gpt_layer_specs.TESpecProvider = FusedSpecProvider
    multi_latent_attention.TELinear = WholeLinear
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
