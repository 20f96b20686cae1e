"""The few numbers of a model that a rule needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reshard.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a fused or permuted tensor is made of; None where nobody says.

    Args:
        source: who says so.
        heads: attention heads; ``groups`` of them share a key and a value head.
        head_dim: elements of a head.
        vocab: rows of the embedding that are words; the rest is padding.
        tied: whether the output layer is the embedding.
    """

    source: str
    layers: int | None = None
    heads: int | None = None
    groups: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    experts: int | None = None
    tied: bool | None = None

    def need(self, name: str) -> int:
        """A number that a rule cannot do without.

        Raises:
            UsageError: nobody says it.
        """
        value = getattr(self, name)
        if value is None:
            raise UsageError(
                self.source,
                f"does not say the model's number of {name}, which its fused tensors need",
                "give the model's config: --model config.json|DIR",
            )
        found: int = value
        return found


def of_config(config: Mapping[str, Any], source: str) -> Architecture:
    """The numbers in a transformers ``config.json``, under any of the names that models use."""
    heads = _number(config, "num_attention_heads", "n_head", "num_heads")
    hidden = _number(config, "hidden_size", "n_embd", "d_model")
    head_dim = _number(config, "head_dim")
    if head_dim is None and heads and hidden:
        head_dim = hidden // heads
    tied = config.get("tie_word_embeddings")
    return Architecture(
        source=source,
        layers=_number(config, "num_hidden_layers", "n_layer", "num_layers"),
        heads=heads,
        groups=_number(config, "num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab=_number(config, "vocab_size"),
        experts=_number(config, "num_local_experts", "num_experts", "n_routed_experts"),
        tied=tied if isinstance(tied, bool) else None,
    )


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return None
