"""The few numbers of a model that a rule needs."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes that rules need to cut fused or permuted tensors; None for what is unknown.

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

    def require(self, name: str) -> int:
        """Return a size that a rule cannot do without.

        Raises:
            UsageError: nobody says it.
        """
        value = getattr(self, name)
        if value is None:
            raise UsageError(
                self.source,
                f"does not state the model's number of {name}, which its fused tensors need",
                "give the model's config: --model config.json|DIR",
            )
        found: int = value
        return found
