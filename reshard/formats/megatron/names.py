"""Megatron's names of a parameter: local to a rank, global to the model, stacked in torch_dist.

A manifest has the names that the saving model has on one rank: layers and experts are numbered
through the whole model. Experts are one tensor each, also where a rank keeps them side by side.

Sources: Megatron-LM core_v0.16.1 ``transformer/transformer_block.py``,
``transformer/moe/experts.py`` (sharded_state_dict), ``transformer/mlp.py``
(apply_swiglu_sharded_factory),
``models/gpt/gpt_layer_specs.py`` (sharded_state_dict_keys_map).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container

from reshard.formats.megatron.arguments import Arguments
from reshard.layouts.model_parallel.patterns import Pattern
from reshard.layouts.model_parallel.rules import RuleMatch, Table

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
LEGACY_EMBEDDING = "language_model.embedding.word_embeddings.weight"
LEGACY_OUTPUT = "word_embeddings_for_head.weight"
COPIES = {EMBEDDING: OUTPUT, LEGACY_EMBEDDING: LEGACY_OUTPUT}  # of a tied embedding

# T5Model has these modules a second time, under another name (``core/models/T5/t5_model.py``).
SECOND_NAMES = {
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "output_layer.bias": "lm_head.output_layer.bias",
    "output_layer.weight": "lm_head.output_layer.weight",
}
# Pipeline stages share the layers of language; those of a vision tower are all on the first stage
# (``core/models/multimodal/llava_model.py``).
_LAYER = re.compile(
    r"(^(?!vision_model\.)(?:.*?\.)?(?:decoder|encoder|transformer)\.layers\.)(\d{1,9})(?=\.)"
)
_EXPERT = re.compile(  # a module for each expert (SequentialMLP), or numbered tensors of one module
    r"(\.local_experts\.)(\d{1,9})(?=\.)|(\.experts\.linear_fc[12]\.\w+?)(\d{1,9})$"
)
_STACK = re.compile(r"((?:^|\.)(?:decoder|encoder)\.layers)\.(?!\d+\.)(.+)")
_DIST_EXPERT = re.compile(
    r"(.*\.mlp\.experts)\.experts\.(?:(\d{1,9})\.)?(linear_fc[12])"
    r"\.((?:lora_[AB]\.default\.)?weight|bias)(_[wv])?"
)
_LATENT = re.compile(r"\.self_attention\.linear_(q|kv)_down_proj\.weight$")
_EXTRA = "_extra_state"
# The layer inside of a layer of multi-token prediction (MTP) before core 0.17 and since. torch_dist
# keeps the first name (``transformer/multi_token_prediction.py``, sharded_state_dict), but not for
# the layers of a hybrid model.
_MTP_INNER = re.compile(
    r"^(mtp\.layers\.\d{1,9}\.)(transformer_layer|mtp_model_layer)\.(?!layers\.)"
)
MTP_SINCE_017 = "mtp_since_017"  # in ``train.opaque``: the source has the second name
# The convolution of a Mamba layer is a module before core 0.19; since then, both parameters are the
# layer's own. torch_dist keeps the first names (``ssm/mamba_mixer.py``, sharded_state_dict).
_CONVOLUTION = re.compile(r"(\.mixer\.conv1d)[._](weight|bias)$")
CONVOLUTION_SINCE_019 = "mamba_conv1d_since_019"  # an argument of our own: the second names
# A state dict does not tell buffers from parameters: these are the router's and rotary ones.
_BUFFER = re.compile(r"(^|\.)(expert_bias|local_tokens_per_expert|inv_freq)$")


def find_second_names(fqns: Container[str]) -> dict[str, str]:
    """Return second name -> name of the parameters that a model has under two names."""
    return {
        second: name for second, name in SECOND_NAMES.items() if second in fqns and name in fqns
    }


def find_tied_output(fqns: Container[str], args: Arguments) -> dict[str, str]:
    """Return the name of the output layer -> that of the embedding, if only the embedding is saved.

    Megatron saves the last stage's copy of a tied embedding under the key of the embedding.
    """
    is_tied = args.tied and EMBEDDING in fqns and OUTPUT not in fqns
    return {OUTPUT: EMBEDDING} if is_tied else {}


def find_latent_width(name: str, args: Arguments) -> int:
    """Return the rows of a down projection of latent attention (MLA); 0 for other parameters.

    Source: ``core/transformer/multi_latent_attention.py`` (MLASelfAttention.__init__).
    """
    match = _LATENT.search(name)
    if match is None:
        return 0
    if match[1] == "q":
        return args.number("q_lora_rank")
    rank, rotary = args.number("kv_lora_rank"), args.number("qk_pos_emb_head_dim")
    return rank + rotary if rank and rotary else 0


def find_layer(name: str) -> int | None:
    """Return the number of the transformer layer in a name, or None."""
    match = _LAYER.search(name)
    return int(match[2]) if match else None


def find_expert(name: str, table: Table | None = None) -> int | None:
    """Return the number of a parameter's expert; None for a parameter that every rank has.

    Args:
        table: rules that may number experts (``{e}``) of modules that Megatron itself lacks.
    """
    match = _EXPERT.search(name)
    if match:
        return int(match[2] or match[4])
    rule = _find_expert_by_rule(name, table)
    return int(rule.fields["e"]) if rule else None


def shift_numbers(name: str, *, layers: int, experts: int, table: Table | None = None) -> str:
    """Return a local name with layer and expert numbers of the whole model.

    Args:
        layers, experts: how many layers and experts precede those of the rank.
    """
    name = _LAYER.sub(lambda m: f"{m[1]}{int(m[2]) + layers}", name, count=1)
    if _EXPERT.search(name):
        return _EXPERT.sub(lambda m: f"{m[1] or m[3]}{int(m[2] or m[4]) + experts}", name, count=1)
    rule = _find_expert_by_rule(name, table)
    if rule is None:
        return name
    fields = {**rule.fields, "e": int(rule.fields["e"]) + experts}
    whole = rule.pattern.fill(fields)
    return f"{whole.rpartition('.')[0]}.{_EXTRA}" if is_extra(name) else whole


def _find_expert_by_rule(name: str, table: Table | None) -> RuleMatch | None:
    if table is None:
        return None
    if is_extra(name):
        name = f"{name.rpartition('.')[0]}.weight"
    rule = table.find(name, {})
    return rule if rule and "e" in rule.fields else None


def is_buffer(name: str) -> bool:
    """Return whether a tensor of the state dict is a buffer, by its name."""
    return _BUFFER.search(name) is not None


def is_extra(name: str) -> bool:
    """Return whether a value is the extra state of a Transformer Engine module, by its name."""
    return _EXTRA in name


def spell_mtp(name: str, *, since_017: bool = False) -> str:
    """Return a local name with the name of the layer inside of an MTP layer, before 0.17 or since.

    >>> spell_mtp("mtp.layers.0.mtp_model_layer.mlp.linear_fc1.weight")
    'mtp.layers.0.transformer_layer.mlp.linear_fc1.weight'
    """
    inner = "mtp_model_layer" if since_017 else "transformer_layer"
    return _MTP_INNER.sub(rf"\1{inner}.", name)


def spell_encoder(name: str) -> str:
    """Return a local name as later versions have it: once the encoder was a transformer.

    >>> spell_encoder("language_model.transformer.layers.0.attention.dense.weight")
    'language_model.encoder.layers.0.self_attention.dense.weight'
    """
    name = re.sub(r"^language_model\.transformer\.", "language_model.encoder.", name)
    return re.sub(r"^(language_model\.encoder\..*)\.attention\.", r"\1.self_attention.", name)


def spell_convolution(name: str, *, since_019: bool = False) -> str:
    """Return a local name with the name of a Mamba layer's convolution, before 0.19 or since.

    >>> spell_convolution("decoder.layers.0.mixer.conv1d_weight")
    'decoder.layers.0.mixer.conv1d.weight'
    """
    return _CONVOLUTION.sub(r"\1_\2" if since_019 else r"\1.\2", name)


def is_convolution(name: str) -> bool:
    """Return whether a parameter is that of a Mamba layer's convolution."""
    return _CONVOLUTION.search(name) is not None


def parse_stacked(key: str) -> str | None:
    """Return the name with ``{}`` for the layer if torch_dist stacks the layers, else None."""
    match = _STACK.fullmatch(key)
    return f"{match[1]}.{{}}.{match[2]}" if match else None


def parse_dist_expert(key: str) -> tuple[str, int | None] | None:
    """Return the name of an expert in torch_dist, with ``{}`` for its number, and the number.

    The number is None if experts are stacked. The result is None if the key is not an expert's.
    """
    match = _DIST_EXPERT.fullmatch(key)
    if match is None:
        return None
    number = int(match[2]) if match[2] else None
    return f"{match[1]}.local_experts.{{}}.{match[3]}.{match[4]}{match[5] or ''}", number


def find_te_pattern(found: RuleMatch, fqns: Container[str]) -> Pattern | None:
    """Return Transformer Engine's name; None for a norm without a linear layer behind it.

    The norm of a layer may have several names, by the linear layer that the model has.

    Args:
        fqns: the names of the model's parameters.
    """
    for pattern in found.rule.get_patterns("te"):
        linear, is_norm, _ = pattern.fill(found.fields).partition(".layer_norm_")
        if not is_norm or f"{linear}.weight" in fqns:
            return pattern
    return None


def find_norms(table: Table, fqns: Collection[str]) -> tuple[str | None, str | None]:
    """Return the name of a norm inside a linear layer, and of one before it in a module of its own.

    The first is a name of Transformer Engine's layers, the second one of Megatron-core's own.
    """
    inside = apart = None
    for fqn in fqns:
        found = table.find(fqn, {})
        if found is None or "te" not in found.rule.others or find_expert(fqn) is not None:
            continue
        if found.pattern in found.rule.get_patterns("te"):
            inside = inside or fqn
        elif found.pattern == found.rule.name and find_te_pattern(found, fqns):
            apart = apart or fqn
    return inside, apart


def spell_for_dist(table: Table, name: str, fqns: Container[str]) -> str:
    """Return the name that torch_dist has for a parameter's name in the table.

    Experts keep the table's name, see `spell_as_saved`.
    """
    found = table.find(name, {})
    if found is None or find_expert(name) is not None:
        return name
    pattern = find_te_pattern(found, fqns)
    return pattern.fill(found.fields) if pattern else name


def spell_as_saved(table: Table, name: str, args: Arguments) -> str:
    """Return the saving model's name for a name of torch_dist."""
    rule = table.find(name, {})
    if rule is None:
        return name
    if find_expert(name) is None:
        # torch_dist has Transformer Engine's names also for a model of Megatron's own layers.
        return name if args.te else rule.name
    grouped = args.flag("moe_grouped_gemm") and not args.flag("moe_use_legacy_grouped_gemm")
    return rule.spell("te", {}) if args.te and grouped else rule.name
