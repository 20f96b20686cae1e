"""The order of a model's parameters: that of ``named_parameters``.

Sources: Megatron-LM core_v0.16.1 ``models/gpt/gpt_model.py``, ``transformer/transformer_layer.py``,
``models/multimodal/llava_model.py``, ``models/T5/t5_model.py``, ``models/bert/bert_model.py``,
``transformer/attention.py``, ``transformer/moe/moe_layer.py``,
``transformer/multi_token_prediction.py``, ``ssm/mamba_mixer.py``, ``ssm/mamba_layer.py``,
``ssm/gated_delta_net.py``, ``transformer/heterogeneous/linear_replacements.py``: the order in
which modules are made; of a module, its own parameters come before those of the modules in it.
Megatron-LM 2.x ``megatron/model/transformer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from reshard.formats.megatron import names
from reshard.formats.megatron.arguments import Arguments

_EMBEDDING = re.compile(r"(language_model\.)?embedding\.")
_IN_LAYER = re.compile(r".*?\.layers\.\d+\.(.+)")
_LAYER = (  # a name sorts by the first of these with which it begins inside its layer
    "mixer.conv1d_",  # since core 0.19
    "mixer.dt_bias",
    "mixer.A_log",
    "mixer.D",
    "mixer.in_proj.layer_norm_",
    "mixer.in_proj.",
    "mixer.conv1d.",
    "mixer.norm.",
    "mixer.out_proj.",
    "norm.",
    "mamba_mixer.dt_bias",  # of Falcon-H1: Megatron-Bridge's falconh1_layer.py
    "mamba_mixer.A_log",
    "mamba_mixer.D",
    "mamba_mixer.in_proj.",
    "mamba_mixer.conv1d.",
    "mamba_mixer.norm.",
    "mamba_mixer.out_proj.",
    "input_layernorm.",
    "self_attention.core_attention.",
    "self_attention.linear_proj.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.layer_norm_",
    "self_attention.linear_kv_up_proj.",
    "self_attention.linear_qkv.layer_norm_",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.kv_layernorm.",
    "self_attention.post_self_attn_layernorm.",  # of GLM-4-0414: mcore-bridge's glm4.py
    "attention.query_key_value.",
    "self_attention.query_key_value.",
    "attention.dense.",
    "self_attention.dense.",
    "self_attention.dt_bias",
    "self_attention.A_log",
    "self_attention.in_proj.layer_norm_",
    "self_attention.in_proj.",
    "self_attention.conv1d.",
    "self_attention.out_norm.",
    "self_attention.out_proj.",
    "self_attention.layer_norm_",  # of a linear layer in the place of attention
    "self_attention.weight",
    "self_attention.bias",
    "pre_cross_attn_layernorm.",  # of T5's decoder
    "cross_attention.linear_proj.",
    "cross_attention.linear_q.",
    "cross_attention.linear_kv.",
    "pre_mlp_layernorm.",
    "post_attention_layernorm.",
    "mlp.router.",
    "mlp.fc1_latent_proj.",
    "mlp.fc2_latent_proj.",
    "mlp.experts.",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
    "mlp.linear_fc1.layer_norm_",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "mlp.post_mlp_layernorm.",
    "mlp.layer_norm_",  # of a linear layer in the place of an MLP
    "mlp.weight",
    "mlp.bias",
    "mlp.dense_h_to_4h.",
    "mlp.dense_4h_to_h.",
)
_MTP = re.compile(r"mtp\.layers\.(\d+)\.(.+)")
_FINAL_NORM = re.compile(r"decoder\.final_(layer)?norm\.")
# Of a hybrid model a layer of MTP has several layers (``models/hybrid/hybrid_block.py``).
_IN_LAYER_OF_MTP = re.compile(r"transformer_layer\.(.+)|mtp_model_layer\.layers\.(\d+)\.(.+)")
_IN_MTP = (
    *("enorm.", "hnorm.", "eh_proj.", "transformer_layer.", "mtp_model_layer."),
    "final_layernorm.",
)
_OUTSIDE = (
    "word_embeddings.",
    "position_embeddings.",
    "tokentype_embeddings.",
    "final_layernorm.",
    "final_norm.",
)

_HEADS = (  # of BERT and T5
    "lm_head.dense.",
    "lm_head.layer_norm.",
    "lm_head.output_layer.",
    "output_layer.",
    "binary_head.",
    "pooler.dense.",
)
_ENCODER = "encoder."  # T5 makes it before the decoder
_TOWERS = ("vision_model.", "vision_projection.")  # made after the language model, in this order

MISPLACED = "misplaced_parameter"  # in ``train.opaque``: see `find_misplaced`

SortKey = tuple[int, ...]


def sort_key(fqn: str) -> SortKey:
    """Return the key by which a parameter sorts into the model's order."""
    layer = names.find_layer(fqn)
    last = fqn.rpartition(".")[2]
    bias = int("bias" in last)
    mtp = _MTP.fullmatch(fqn)
    if mtp is not None:
        number, part = int(mtp[1]), _find_prefix(_IN_MTP, mtp[2])
        inside = _IN_LAYER_OF_MTP.fullmatch(mtp[2])
        if inside is None:
            return (3, number, part, bias)
        return (3, number, part, int(inside[2] or 0), *_sort_in_layer(fqn, inside[1] or inside[3]))
    tower = _find_prefix(_TOWERS, fqn)
    if tower < len(_TOWERS):
        return (5, tower)  # in the order of its file
    match = _IN_LAYER.fullmatch(fqn)
    inner = _sort_in_layer(fqn, match[1] if match else fqn)
    if fqn.startswith(_ENCODER):
        return (1, -1, 1, bias) if layer is None else (1, -1, 0, layer, *inner)
    if layer is None:
        outside = [number for number, part in enumerate(_OUTSIDE) if f".{part}" in f".{fqn}"]
        # GPTModel makes embedding, layers (1), final norm (2), MTP (3) and the output layer (4).
        group = 0 if is_embedding(fqn) else 2 if outside else 4
        head = _find_prefix(_HEADS, fqn)
        return (group, min(outside, default=len(_OUTSIDE)), head, bias)
    return (1, layer, *inner)


def spell(fqn: str, args: Arguments) -> str:
    """Return the name by which a parameter sorts in the version that saved the run."""
    return names.spell_convolution(fqn, since_019=args.flag(names.CONVOLUTION_SINCE_019))


def has_place(fqn: str) -> bool:
    """Return whether Megatron's modules determine the position of a layer's parameter."""
    mtp, match = _MTP.fullmatch(fqn), _IN_LAYER.fullmatch(fqn)
    inside = _IN_LAYER_OF_MTP.fullmatch(mtp[2]) if mtp else None
    if mtp is not None and inside is None:
        return _find_prefix(_IN_MTP, mtp[2]) < len(_IN_MTP)
    if mtp is None and match is None:
        return True  # outside of layers, by groups
    inner = inside[1] or inside[3] if inside else match[1] if match else ""
    return _find_prefix(_LAYER, inner) < len(_LAYER)


def find_misplaced(fqns: Iterable[str]) -> str | None:
    """Return the first of a file's parameters that this order has elsewhere; None if there is none.

    The file is of a model whose modules are made in another order than those known here.
    """
    listed = list(fqns)
    pairs = zip(listed, sorted(listed, key=sort_key), strict=True)
    return next((fqn for fqn, expected in pairs if fqn != expected), None)


def _sort_in_layer(fqn: str, inner: str) -> SortKey:
    bias = int("bias" in fqn.rpartition(".")[2])
    at = _find_prefix(_LAYER, inner)
    expert, second = names.find_expert(fqn), int("linear_fc2" in inner)
    if at == len(_LAYER) or (expert is None and inner.startswith("mlp.experts.")):
        return (at,)  # a module that Megatron lacks keeps the order of its file
    if expert is None:  # a norm behind a row parallel layer is a module inside it
        return (at, int(".post_layernorm." in inner), bias)
    if ".local_experts." in fqn:  # a module each
        return (at, expert, second, bias)
    return (at, second, bias, expert)  # Transformer Engine's: weight0, weight1 ...


def is_embedding(fqn: str) -> bool:
    """Return whether the first stage holds a parameter before its layers."""
    return _EMBEDDING.match(fqn) is not None


def find_part(fqn: str) -> Literal["embedding", "norm", "mtp", "head"]:
    """Return the part of the model that has a parameter outside the layers."""
    if is_embedding(fqn):
        return "embedding"
    if _MTP.fullmatch(fqn):
        return "mtp"
    return "norm" if _FINAL_NORM.match(fqn) else "head"


def _find_prefix(prefixes: Sequence[str], name: str) -> int:
    positions = (number for number, prefix in enumerate(prefixes) if name.startswith(prefix))
    return next(positions, len(prefixes))
