"""A Llama of transformers that DeepSpeed's AutoTP cuts, and the whole model from its ranks.

DeepSpeed's layers gather their own parameters (``gather_params``), see `consolidated`; here
they gather whatever else has the parameters' shapes too: masters and moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.utils import groups
from transformers import LlamaForCausalLM

from tests.judges import parallel_models as models
from tests.judges.models import llama_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from tests.judges.parallel_cases import Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model(case: Case) -> nn.Module:
    """Build the whole model, before DeepSpeed cuts it."""
    torch.manual_seed(models.Tp.seed)
    config = llama_config(case.words, hidden=24, tied=case.tied)
    config.num_attention_heads, config.num_key_value_heads = case.heads
    made = LlamaForCausalLM(config)
    dtype = DTYPES[case.precision]
    return deepspeed.tp_model_init(made, case.tp, dtype)  # type: ignore[no-any-return]


def data_rank() -> int:
    """Return the number of this rank's part of a batch."""
    return int(groups.get_data_parallel_rank())


def gatherer(module: nn.Module) -> Callable[[str, Tensor], Tensor]:
    """Return a function: (name, this rank's part) -> the whole tensor; all ranks must call it."""
    layers = {
        f"{name}.{own}" if name else own: (layer, own)
        for name, layer in module.named_modules()
        if isinstance(layer, TensorParallel_Layer)
        for own, _ in layer.named_parameters(recurse=False)
    }

    def gather(name: str, local: Tensor) -> Tensor:
        whole = local.detach().clone()
        layer, own = layers.get(name, (None, ""))
        if layer is None or not hasattr(getattr(layer, own), "gather_params"):
            return whole
        layer.gather_params([whole] if own == "weight" else [None, whole])
        return whole

    return gather


def consolidated(engine: Any) -> dict[str, Tensor]:
    """Return what accelerate and the HF trainer save of the model, on the first rank.

    At stages 0 to 2 ``save_16bit_model`` itself writes the first rank's part (DeepSpeed 0.19.8).
    """
    found: dict[str, Tensor] = engine._consolidated_16bit_state_dict()
    return {name: value.clone() for name, value in (found or {}).items()}
