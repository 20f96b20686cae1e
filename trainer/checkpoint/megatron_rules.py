"""How Megatron-core names and cuts the parameters of the Llama family of transformers.

A ``Rule`` works in both directions. The rules of a stage are in the order of Megatron's own
``named_parameters``, which is the order of its optimizer's indices (megatron/core/models/gpt, the
``local`` layer spec, core 0.16).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.errors import CheckpointError

Get = Callable[[int, int, str], Tensor]
"""(tensor rank, expert rank, key) -> that rank's tensor."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine how a model is cut."""

    layers: int
    heads: int
    groups: int
    """Groups of query heads, each with one key head and one value head."""
    vocab: int
    padded_vocab: int
    """Rows of the embeddings on all tensor ranks together."""
    tied: bool
    qkv_bias: bool
    tp: int = 1
    ep: int = 1
    experts: int = 0


@dataclass(frozen=True)
class Rule:
    """One parameter of transformers, or several that Megatron stores as one.

    Attributes:
        names: the names of the parameters in transformers.
        keys: the names in Megatron, with the local numbers of the layer and the experts.
        cut: (whole tensors by ``names``, tensor rank, expert rank) -> this rank's, by ``keys``.
        join: the inverse: a function that gets any rank's tensors -> whole tensors by ``names``.
        expert: whether the ranks of the expert axis have different parts.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...]
    cut: Callable[[Sequence[Tensor], int, int], list[Tensor]]
    join: Callable[[Get], list[Tensor]]
    expert: bool = False


def list_rules(sizes: Sizes, layers: range, *, first: bool, last: bool) -> Iterator[Rule]:
    """Yield the rules of a stage, in Megatron's order.

    Args:
        sizes: the sizes of the model and of the grid.
        layers: numbers in the whole model; Megatron numbers them from 0 in each stage.
        first: whether the stage has the embeddings.
        last: whether the stage has the final norm and the output layer.
    """
    if first:
        yield _vocabulary_rule(
            "model.embed_tokens.weight", "embedding.word_embeddings.weight", sizes
        )
    for number, layer in enumerate(layers):
        yield from _layer_rules(sizes, f"model.layers.{layer}.", f"decoder.layers.{number}.")
    if last:
        yield _whole_rule("model.norm.weight", "decoder.final_layernorm.weight")
        if not sizes.tied:
            yield _vocabulary_rule("lm_head.weight", "output_layer.weight", sizes)


def _layer_rules(sizes: Sizes, hf: str, meg: str) -> Iterator[Rule]:
    attention = meg + "self_attention."
    yield _whole_rule(hf + "input_layernorm.weight", meg + "input_layernorm.weight")
    yield _column_rule(hf + "self_attn.o_proj.weight", attention + "linear_proj.weight", sizes)
    yield _qkv_rule(hf + "self_attn.", attention + "linear_qkv.", "weight", sizes)
    if sizes.qkv_bias:
        yield _qkv_rule(hf + "self_attn.", attention + "linear_qkv.", "bias", sizes)
    yield _whole_rule(hf + "post_attention_layernorm.weight", meg + "pre_mlp_layernorm.weight")
    if sizes.experts:
        yield _whole_rule(hf + "mlp.gate.weight", meg + "mlp.router.weight")
        yield _experts_rule(hf + "mlp.experts.", meg + "mlp.experts.local_experts.", sizes)
    else:
        yield _gated_rule(hf + "mlp.", meg + "mlp.linear_fc1.weight", sizes)
        yield _column_rule(hf + "mlp.down_proj.weight", meg + "mlp.linear_fc2.weight", sizes)


def _whole_rule(name: str, key: str) -> Rule:
    """Return the rule of a parameter that every rank has whole."""

    def join(get: Get) -> list[Tensor]:
        return [get(0, 0, key)]

    return Rule((name,), (key,), lambda wholes, _tp, _ep: [wholes[0]], join)


def _vocabulary_rule(name: str, key: str, sizes: Sizes) -> Rule:
    """Return the rule of a matrix that is padded with rows and cut by rows."""

    def cut(wholes: Sequence[Tensor], tp: int, _: int) -> list[Tensor]:
        (whole,) = wholes
        padding = whole.new_zeros(sizes.padded_vocab - len(whole), *whole.shape[1:])
        return [torch.cat((whole, padding)).chunk(sizes.tp)[tp]]

    def join(get: Get) -> list[Tensor]:
        return [torch.cat([get(tp, 0, key) for tp in range(sizes.tp)])[: sizes.vocab]]

    return Rule((name,), (key,), cut, join)


def _column_rule(name: str, key: str, sizes: Sizes) -> Rule:
    """Return the rule of a matrix that is cut by columns."""

    def cut(wholes: Sequence[Tensor], tp: int, _: int) -> list[Tensor]:
        return [wholes[0].chunk(sizes.tp, 1)[tp]]

    def join(get: Get) -> list[Tensor]:
        return [torch.cat([get(tp, 0, key) for tp in range(sizes.tp)], 1)]

    return Rule((name,), (key,), cut, join)


def _qkv_rule(hf: str, meg: str, leaf: str, sizes: Sizes) -> Rule:
    """Return the rule of the fused QKV: per group its query heads, key and value; cut by rows."""
    names = tuple(f"{hf}{letter}_proj.{leaf}" for letter in "qkv")
    key, ratio = meg + leaf, sizes.heads // sizes.groups

    def cut(wholes: Sequence[Tensor], tp: int, _: int) -> list[Tensor]:
        grouped = [whole.unflatten(0, (sizes.groups, -1)) for whole in wholes]
        return [torch.cat(grouped, 1).flatten(0, 1).chunk(sizes.tp)[tp]]

    def join(get: Get) -> list[Tensor]:
        fused = torch.cat([get(tp, 0, key) for tp in range(sizes.tp)])
        grouped = fused.unflatten(0, (sizes.groups, ratio + 2, -1))
        parts = grouped.split([ratio, 1, 1], 1)
        return [part.flatten(0, 2) for part in parts]

    return Rule(names, (key,), cut, join)


def _gated_rule(hf: str, key: str, sizes: Sizes) -> Rule:
    """Return the rule of the fused MLP input: a rank's rows of the gate above those of up_proj."""

    def cut(wholes: Sequence[Tensor], tp: int, _: int) -> list[Tensor]:
        return [torch.cat([whole.chunk(sizes.tp)[tp] for whole in wholes])]

    def join(get: Get) -> list[Tensor]:
        pairs = [get(tp, 0, key).chunk(2) for tp in range(sizes.tp)]
        return [torch.cat(parts) for parts in zip(*pairs, strict=True)]

    return Rule((hf + "gate_proj.weight", hf + "up_proj.weight"), (key,), cut, join)


def _experts_rule(hf: str, meg: str, sizes: Sizes) -> Rule:
    """Return the rule of stacked experts, which Megatron has singly, cut by expert and tensor."""
    local = sizes.experts // sizes.ep
    keys = tuple(f"{meg}{e}.linear_fc{n}.weight" for e in range(local) for n in (1, 2))

    def cut(wholes: Sequence[Tensor], tp: int, ep: int) -> list[Tensor]:
        gate_up, down = (whole[ep * local : (ep + 1) * local] for whole in wholes)
        pieces = []
        for expert in range(local):
            pair = gate_up[expert].chunk(2)
            pieces.append(torch.cat([half.chunk(sizes.tp)[tp] for half in pair]))
            pieces.append(down[expert].chunk(sizes.tp, 1)[tp])
        return pieces

    def join(get: Get) -> list[Tensor]:
        ups, downs = [], []
        for ep in range(sizes.ep):
            for up, down in zip(keys[::2], keys[1::2], strict=True):
                pairs = [get(tp, ep, up).chunk(2) for tp in range(sizes.tp)]
                ups.append(
                    torch.cat([half for halves in zip(*pairs, strict=True) for half in halves])
                )
                downs.append(torch.cat([get(tp, ep, down) for tp in range(sizes.tp)], 1))
        return [torch.stack(ups), torch.stack(downs)]

    return Rule((hf + "gate_up_proj", hf + "down_proj"), keys, cut, join, expert=True)


def derive_sizes(config: Any, *, padded_vocab: int, tp: int, ep: int) -> Sizes:
    """Return the sizes of a model with this configuration of transformers.

    Raises:
        CheckpointError: the ranks do not divide a size that Megatron's layout cuts evenly.
    """
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    experts = getattr(config, "num_local_experts", 0) or 0
    divided = {
        "num_key_value_heads": (groups, tp),
        "intermediate_size": (config.intermediate_size, tp),
        "num_local_experts": (experts, ep),
    }
    for name, (size, ranks) in divided.items():
        if size % ranks:
            raise CheckpointError(
                f"Megatron-LM's layout cuts {name} evenly, and {ranks} ranks do not divide {size}",
                "use --state-dict-type sharded, or another --tp and --ep",
            )
    return Sizes(
        layers=config.num_hidden_layers,
        heads=heads,
        groups=groups,
        vocab=config.vocab_size,
        padded_vocab=padded_vocab,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bool(getattr(config, "attention_bias", False) or config.model_type == "qwen2"),
        tp=tp,
        ep=ep,
        experts=experts,
    )
