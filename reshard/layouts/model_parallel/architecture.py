"""The few numbers of a model that a rule needs, and a model as a target needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reshard.errors import UsageError
from reshard.layouts.model_parallel.rules import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes that rules need to cut fused or permuted tensors; None for what is unknown.

    Args:
        source: the file or option that states the sizes, for messages.
        groups: number of key-value heads, each of which a group of attention heads shares.
        vocab: rows of the embedding without padding.
        tied: whether the output layer is the embedding.
        delta: key heads, value heads, elements of a key head and of a value head of gated delta
            nets; empty if there are none.
    """

    source: str
    layers: int | None = None
    heads: int | None = None
    groups: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    experts: int | None = None
    tied: bool | None = None
    delta: tuple[int, ...] = ()

    def require(self, name: str) -> int:
        """Return a size that a rule requires.

        Raises:
            UsageError: the size is not known.
        """
        value = getattr(self, name)
        if value is None:
            raise UsageError(
                self.source,
                f"does not state the model's number of {name}, which its fused tensors need",
                "give the model's config: --model config.json|DIR",
            )
        size: int = value
        return size


@dataclass(frozen=True, slots=True)
class Described:
    """The model of a training state, as far as its files or the user describe it.

    Args:
        args: arguments of the run, under the target's names.
    """

    table: Table
    architecture: Architecture
    args: Mapping[str, Any]
