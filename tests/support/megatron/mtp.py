"""The layers of multi-token prediction (MTP), as in transformers.

``MtpModel`` of transformers reads them from the files of a model; the model's own class ignores
them. The published names count them after the other layers: MTP layer ``k`` has the number
``num_hidden_layers + k``.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

SEED = 11


def build(model: Any, spread: float) -> MtpModel | None:
    """Return random layers for a model whose configuration has some."""
    count = getattr(model.config, "num_mtp_layers", None)
    if not count:
        return None
    torch.manual_seed(SEED)
    layers = MtpModel(model, count).eval()
    with torch.no_grad():
        for name, tensor in layers.layers.state_dict().items():
            tensor.normal_(mean=float("norm." in name), std=spread)
    return layers


def name_as_published(layers: MtpModel, first: int) -> dict[str, torch.nn.Parameter | torch.Tensor]:
    """Return the tensors by their published names, with experts stacked as in memory.

    Args:
        first: number of layers of the model itself.
    """
    tensors = {**dict(layers.layers.named_buffers()), **dict(layers.layers.named_parameters())}
    saved = layers.layers.state_dict().keys()
    named = {}
    for name, tensor in tensors.items():
        if name not in saved:
            continue
        number, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        named[f"model.layers.{first + int(number)}.{rest}"] = tensor
    return named


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with separate weights of each expert, as they are published."""
    separate: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or not experts.endswith(".experts"):
            separate[name] = tensor.detach().clone()
            continue
        for number, one in enumerate(tensor.detach()):
            halves = one.chunk(2) if last == "gate_up_proj" else (one,)
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for part, half in zip(parts, halves, strict=True):
                separate[f"{experts}.{number}.{part}.weight"] = half.clone()
    return separate


@torch.no_grad()
def compute_logits(model: Any, layers: MtpModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Compute the logits of each layer, at every position whose next tokens are known."""
    hidden = model.get_decoder()(tokens, use_cache=False).last_hidden_state
    found = []
    for number in range(len(layers.layers)):
        tokens = tokens[:, 1:]
        length = tokens.shape[1]
        hidden = layers.forward_layer(
            number,
            hidden[:, :length],
            torch.arange(length)[None],
            MtpCache(config=model.config.get_mtp_config()),
            input_ids=tokens,
        )
        found.append(layers._project_to_logits(hidden).float())
    return found


def is_of_mtp(name: str, layers: int) -> bool:
    """Return whether a published name is that of a tensor of an MTP layer."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= layers
