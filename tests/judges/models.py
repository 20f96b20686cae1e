"""Functions and a module that the models of all judges share."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import LlamaConfig


def llama_config(
    vocabulary: int,
    *,
    tied: bool = False,
    hidden: int = 32,
    intermediate: int | None = None,
    layers: int = 2,
) -> LlamaConfig:
    """Return a tiny Llama with fewer key and value heads than queries.

    Attention is eager because fused CPU kernels lack float16.
    """
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate or hidden * 3 // 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        use_cache=False,
    )


def named(model: nn.Module, *, every: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters with their names in ``state_dict``, without ``checkpoint_wrapper``'s part.

    Args:
        every: all names of a tied one.
    """
    for name, param in model.named_parameters(remove_duplicate=not every):
        unwrapped = name.replace("_checkpoint_wrapped_module.", "")
        yield unwrapped.removeprefix("pretrained_model."), param


def ties(model: nn.Module) -> dict[str, str]:
    """Return alias -> the name under which an unwrapped model lists the parameter first."""
    first = {id(p): name for name, p in named(model)}
    return {name: first[id(p)] for name, p in named(model, every=True) if first[id(p)] != name}


class Enclosing(nn.Module):
    """A model whose only part has the name that DDP gives to the model that it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.module(input_ids)
        return loss
