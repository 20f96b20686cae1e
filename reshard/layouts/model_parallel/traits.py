"""The traits of a model, by which the equal model of transformers is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from reshard.core import counts
from reshard.layouts.model_parallel.architecture import Architecture

# Sizes of gated delta nets, in the order of `Architecture.delta`.
_DELTA = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The traits of a decoder; None for what is unknown.

    Args:
        source: the file that states the traits, for messages.
        positions: ``rope``, ``learned``, ``alibi`` or ``none``.
        activation: transformers' name of it; ``gated`` is whether it gates a second projection.
        norm: ``rmsnorm`` or ``layernorm``.
        grouped: whether several heads share a key and a value.
        linear_bias: whether all projections have biases; ``qkv_bias``: whether those of attention's
            input do.
        parallel_residual: whether attention and feed-forward layer see the same input.
        dense_layers: numbers of the layers without experts, in a model with experts.
        renormalised: whether the chosen experts' weights add up to one.
        unsupported: descriptions of features that no family has.
        more: traits that only the tables of families name.
        args: arguments of Megatron, or of a fork, that state the model; None: nothing of the kind,
            for a model that a config describes.
    """

    source: str
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    groups: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    padded_vocab: int | None = None
    positions: str = "learned"
    max_positions: int | None = None
    rope_theta: float | None = None
    rotary_percent: float = 1.0
    rope_scaling: Mapping[str, Any] | None = None
    window: int | None = None
    activation: str = "gelu"
    gated: bool = False
    norm: str = "layernorm"
    norm_eps: float | None = None
    linear_bias: bool = True
    qkv_bias: bool = True
    qk_norm: bool = False
    embedding_norm: bool = False
    residual_after_norm: bool = False
    parallel_residual: bool = False
    experts: int | None = None
    dense_layers: tuple[int, ...] = ()
    top_k: int | None = None
    expert_ffn: int | None = None
    shared_ffn: int | None = None
    shared_gate: bool = False
    renormalised: bool = True
    aux_loss: float = 0.0
    tied: bool = False
    unsupported: tuple[str, ...] = field(default=())
    more: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse sizes that no model has.

        Raises:
            CorruptError: a size is not a number, is zero, or is larger than any model's.
        """
        sizes = {
            "layers": self.layers or None,
            "experts": self.experts or None,
            "heads": self.heads,
            "heads of keys": self.groups,
            "elements of a head": self.head_dim,
            "elements of a position": self.hidden,
        }
        for what, size in sizes.items():
            if size is not None:
                counts.check_count(self.source, f"the number of {what}", size)

    def get(self, name: str) -> Any:
        """Return a trait by its name, one of `more` too; None if it is unknown."""
        return self.more.get(name) if name in self.more else getattr(self, name, None)

    def with_values(self, values: Mapping[str, Any]) -> Traits:
        """Return the traits with other values; those without a field of the class go to `more`."""
        own = {name: value for name, value in values.items() if name in OWN}
        more = {name: value for name, value in values.items() if name not in OWN}
        return replace(self, **own, more={**self.more, **more})

    @property
    def usual(self) -> Mapping[str, Any]:
        """The values of traits that most families have, and do not state."""
        divided = self.hidden // self.heads if self.hidden and self.heads else None
        return {"parallel_residual": False, "head_dim": divided}

    @property
    def grouped(self) -> bool:
        """Whether several heads share a key and a value head."""
        return self.groups != self.heads

    @property
    def four_times(self) -> bool:
        """Whether the feed-forward layer is four times as wide as the model."""
        return self.hidden is not None and self.ffn == 4 * self.hidden

    @property
    def has_window(self) -> bool:
        """Whether layers have a sliding window."""
        return self.window is not None

    @property
    def is_sparse(self) -> bool:
        """Whether its layers have experts."""
        return self.experts is not None

    @property
    def is_all_sparse(self) -> bool:
        """Whether every layer has experts."""
        return self.is_sparse and not self.dense_layers

    @property
    def has_shared_expert(self) -> bool:
        """Whether every token goes through one expert besides those that are chosen."""
        return self.shared_ffn is not None

    @property
    def shared_width(self) -> int | None:
        """Width of the shared expert; that of the others where a config has no key for it."""
        is_stated = self.shared_ffn is not None or self.args is not None
        return self.shared_ffn if is_stated else self.expert_ffn

    @property
    def has_expert_layers(self) -> bool:
        """Whether a hybrid model has layers of experts, by the letters of its layers."""
        return "E" in (self.get("hybrid_pattern") or "")

    @property
    def rope_kind(self) -> str | None:
        """The ``rope_type`` of scaled rotary positions; None if they are not scaled."""
        return (self.rope_scaling or {}).get("rope_type")

    @property
    def has_one_mscale(self) -> bool:
        """Whether one of YaRN's mscales is set alone, so that transformers ignores it."""
        scaling = self.rope_scaling or {}
        one, other = scaling.get("mscale"), scaling.get("mscale_all_dim")
        return bool(other) if not one else one != 1 and not other

    @property
    def rows(self) -> int | None:
        """Rows of the vocabulary as far as they are known: without padding, else with it."""
        return self.vocab or self.padded_vocab

    def make_architecture(self) -> Architecture:
        """Return the sizes that rules need."""
        return Architecture(
            source=self.source,
            layers=self.layers,
            heads=self.heads,
            groups=self.groups,
            head_dim=self.head_dim,
            vocab=self.vocab,
            experts=self.experts,
            tied=self.tied,
            delta=tuple(filter(None, map(self.get, _DELTA))),
        )


OWN = frozenset(trait.name for trait in fields(Traits))
