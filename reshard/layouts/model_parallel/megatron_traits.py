"""The traits of a model in the arguments of Megatron-LM and its forks, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.core.schema import NUMBER, TEXT, expect, fields, maybe
from reshard.errors import UnsupportedError
from reshard.layouts.model_parallel import yarn
from reshard.layouts.model_parallel.traits import Traits

_POSITIONS = {"learned_absolute": "learned", "absolute": "learned", "rope": "rope", "yarn": "rope"}
_ENUMERATED = {1: "rope", 2: "learned", 3: "alibi"}  # bigscience's enums.py, PositionEmbeddingType
OWN_BUILDER = "model_builder_class"  # of our own: what builds layers that args do not describe
DROPOUTS = {  # argument -> the keys of configs that state it
    "attention_dropout": (
        *("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob"),
    ),
    "hidden_dropout": (
        *("hidden_dropout", "resid_pdrop", "resid_dropout", "residual_dropout"),
        "hidden_dropout_prob",
    ),
}
_FAST_GELU = "fast_gelu"  # core/activations.py: the tanh approximation
# The letters of a hybrid model's layers since core 0.17, and before.
_PATTERN, _OLD_PATTERN = "hybrid_layer_pattern", "hybrid_override_pattern"
_KNOWN_LETTERS = frozenset("M*-E|")
_ARGUMENTS = fields(
    **dict.fromkeys(("rotary_base", "rope_theta", "rotary_percent"), maybe(NUMBER)),
    **dict.fromkeys(("norm_epsilon", "layernorm_epsilon"), maybe(NUMBER)),
    normalization=maybe(TEXT),
)


def parse_args(args: Mapping[str, Any], source: str) -> Traits:
    """Return the traits that the arguments of Megatron-LM, or of a fork, state.

    Args:
        args: plain values; an enum is ``{"class": ..., "args": (number,)}``.

    Sources: Megatron-LM core_v0.16.1 ``training/arguments.py`` (defaults, and
    ``core_transformer_config_from_args``), ``core/transformer/mlp.py`` (which activation runs);
    deepspeedai Megatron-DeepSpeed 4efb479 ``megatron/arguments.py``; bigscience's 8387ae1.
    """
    expect(source, args, _ARGUMENTS, "args")
    heads, hidden = _get_number(args, "num_attention_heads"), _get_number(args, "hidden_size")
    head_dim = _get_number(args, "kv_channels") or (hidden // heads if heads and hidden else None)
    gated = bool(args.get("swiglu") or args.get("gated_linear_unit"))
    linear_bias = args.get("add_bias_linear", True) is not False
    experts = _get_experts(args.get("num_experts"))
    ffn = _get_number(args, "ffn_hidden_size") or (4 * hidden if hidden and not gated else None)
    return Traits(
        source=source,
        layers=_get_number(args, "num_layers"),
        hidden=hidden,
        heads=heads,
        groups=_get_groups(args, heads),
        head_dim=head_dim,
        ffn=ffn,
        vocab=_get_vocabulary(args),
        padded_vocab=_get_number(args, "padded_vocab_size"),
        positions=_get_positions(args),
        max_positions=_get_number(args, "max_position_embeddings"),
        rope_theta=float(args.get("rotary_base") or args.get("rope_theta") or 10000),
        rotary_percent=float(args.get("rotary_percent") or 1.0),
        rope_scaling=_make_rope_scaling(args),
        window=_get_window(args),
        activation=_get_activation(args, gated=gated, linear_bias=linear_bias),
        gated=gated,
        norm=str(args.get("normalization") or "layernorm").lower(),
        norm_eps=float(args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5),
        linear_bias=linear_bias,
        qkv_bias=linear_bias or bool(args.get("add_qkv_bias")),
        qk_norm=bool(args.get("qk_layernorm")),
        embedding_norm=bool(args.get("embed_layernorm")),
        residual_after_norm=bool(args.get("apply_residual_connection_post_layernorm")),
        experts=experts,
        dense_layers=_list_dense_layers(args) if experts else (),
        top_k=_get_number(args, "moe_router_topk") if experts else None,
        expert_ffn=(_get_number(args, "moe_ffn_hidden_size") or ffn) if experts else None,
        shared_ffn=_get_number(args, "moe_shared_expert_intermediate_size") if experts else None,
        shared_gate=bool(
            args.get("moe_use_shared_expert_gate") or args.get("moe_shared_expert_gate")
        ),
        renormalised=not args.get("moe_router_pre_softmax"),
        aux_loss=_get_aux_loss(args),
        tied=not args.get("untie_embeddings_and_output_weights"),
        unsupported=tuple(_list_unsupported(args)),
        args=_list_patterns(args),
    )


def _list_patterns(args: Mapping[str, Any]) -> dict[str, Any]:
    # Source: Megatron-LM core_v0.16.1 ``transformer_config.py`` (N of ``no_rope_freq``: every N-th
    # layer is without rotary positions), ``transformer/utils.py`` ``is_layer_window_attention`` (N
    # of ``window_attn_skip_freq``: every N-th layer is without a window), ``models/gpt/
    # experimental_attention_variant_module_specs.py`` (N of ``linear_attention_freq``: every N-th
    # layer is of full attention); core_v0.19.2 ``models/hybrid/hybrid_layer_allocation.py`` (bars
    # of ``hybrid_layer_pattern`` divide the layers among stages).
    layers, listed = _get_number(args, "num_layers") or 0, dict(args)
    # The option --apply-layernorm-1p sets a field of the configuration.
    names = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
    listed |= dict.fromkeys(names, next(filter(None, map(args.get, names)), False))
    letters = args.get(_PATTERN)
    if isinstance(letters, str) and _KNOWN_LETTERS.issuperset(letters):
        listed |= {_OLD_PATTERN: letters.replace("|", ""), _PATTERN: None}
    for name, at_nth in (
        ("no_rope_freq", 1),
        ("window_attn_skip_freq", 0),
        ("linear_attention_freq", 0),
    ):
        every = args.get(name)
        if type(every) is int and every > 0:
            listed[name] = [
                at_nth if number % every == 0 else 1 - at_nth for number in range(1, layers + 1)
            ]
    return listed


def make_args(traits: Traits) -> dict[str, Any]:
    """Return the arguments with which Megatron-core builds such a model; see `parse_args`."""
    scaling = dict(traits.rope_scaling or {})
    kind = scaling.get("rope_type", scaling.get("type"))
    _refuse_what_megatron_lacks(traits, scaling, kind)
    gelu = not traits.gated and traits.activation.startswith("gelu")
    args = {
        "num_layers": traits.layers,
        "hidden_size": traits.hidden,
        "ffn_hidden_size": traits.ffn,
        "num_attention_heads": traits.heads,
        "kv_channels": traits.head_dim,
        "group_query_attention": traits.grouped,
        "num_query_groups": traits.groups if traits.grouped else 1,
        "max_position_embeddings": traits.max_positions,
        "position_embedding_type": _get_position_type(traits, kind),
        "rotary_base": _to_int(traits.rope_theta or 10000),
        "rotary_percent": traits.rotary_percent,
        "rotary_interleaved": False,
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": scaling.get("factor", 8.0) if kind == "llama3" else 8.0,
        "rotary_seq_len_interpolation_factor": scaling["factor"] if kind == "linear" else None,
        # transformers counts the token itself, Megatron only the tokens before it.
        "window_size": (traits.window - 1, 0) if traits.window else None,
        "swiglu": traits.gated and traits.activation == "silu",
        "squared_relu": traits.activation == "relu2",
        "bias_gelu_fusion": gelu and traits.activation != "gelu",  # the fused one is approximate
        "normalization": "RMSNorm" if traits.norm == "rmsnorm" else "LayerNorm",
        "norm_epsilon": traits.norm_eps,
        "layernorm_epsilon": traits.norm_eps,
        "add_bias_linear": traits.linear_bias,
        "add_qkv_bias": traits.qkv_bias and not traits.linear_bias,
        "qk_layernorm": traits.qk_norm,
        "untie_embeddings_and_output_weights": not traits.tied,
        "vocab_size": traits.vocab,
        "num_experts": traits.experts,
        # Megatron's default is 0.1.
        **{name: traits.get(name) or 0.0 for name in DROPOUTS},
    }
    if traits.gated and traits.activation == "gelu_pytorch_tanh":
        args |= {"gated_linear_unit": True, "activation_func": _FAST_GELU}
    if kind == yarn.KIND:
        args |= yarn.make_args(scaling, traits.max_positions)
    if traits.experts:
        dense = [int(number not in traits.dense_layers) for number in range(traits.layers or 0)]
        args |= {
            "moe_layer_freq": dense if traits.dense_layers else 1,
            "moe_router_topk": traits.top_k,
            "moe_router_pre_softmax": not traits.renormalised,
            "moe_ffn_hidden_size": traits.expert_ffn,
            "moe_shared_expert_intermediate_size": traits.shared_ffn,
            "moe_shared_expert_gate": traits.shared_gate,
            "moe_aux_loss_coeff": traits.aux_loss,
            "moe_grouped_gemm": True,  # where the layers are Transformer Engine's
        }
    return args


def _refuse_what_megatron_lacks(traits: Traits, scaling: Mapping[str, Any], kind: Any) -> None:
    lacking = [
        *traits.unsupported,
        *(
            ["positions by " + traits.positions]
            * (traits.positions not in ("rope", "learned", "none"))
        ),
        *(["a norm of the embedding"] * traits.embedding_norm),
        *(["norms before residual connections"] * traits.residual_after_norm),
        *(["attention beside the feed-forward layer"] * traits.parallel_residual),
    ]
    if kind == yarn.KIND:
        lacking += yarn.list_obstacles(scaling, traits.max_positions, traits.rotary_percent)
    elif scaling and (kind not in ("llama3", "linear") or not _is_built_in(scaling)):
        lacking.append(f"rotations scaled as {scaling}")
    if lacking:
        raise UnsupportedError(
            traits.source, f"has features that Megatron-core does not support: {'; '.join(lacking)}"
        )


def _get_position_type(traits: Traits, kind: Any) -> str:
    if traits.positions != "rope":
        return "none" if traits.positions == "none" else "learned_absolute"
    return yarn.KIND if kind == yarn.KIND else "rope"


def _to_int(value: float) -> float:
    """Return a number as an int where it is one: ``--rotary-base`` is an int on a command line."""
    return int(value) if float(value).is_integer() else value


def _is_built_in(scaling: Mapping[str, Any]) -> bool:
    """Return whether Megatron-core has these numbers built in, all but the factor."""
    known = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    return all(scaling.get(name, value) == value for name, value in known.items())


def _get_number(args: Mapping[str, Any], name: str) -> int | None:
    value = args.get(name)
    return value if type(value) is int and value > 0 else None


def _get_experts(value: Any) -> int | None:
    """Return the number of experts; Megatron-DeepSpeed has a list, ``[1]`` for none."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return value if type(value) is int and value > 1 else None


def _get_groups(args: Mapping[str, Any], heads: int | None) -> int | None:
    # ``num_query_groups`` is 1 by default, and counts only with ``group_query_attention``.
    if args.get("group_query_attention"):
        return _get_number(args, "num_query_groups")
    return _get_number(args, "num_key_value_heads") or heads


def _get_vocabulary(args: Mapping[str, Any]) -> int | None:
    # ``vocab_size`` is the tokenizer's, and most often None; NullTokenizer counts one more for its
    # end of document (``core/tokenizers/text/libraries/null_tokenizer.py``).
    size = _get_number(args, "vocab_size")
    if size is None:
        return None
    size += args.get("tokenizer_type") == "NullTokenizer"
    return min(size, _get_number(args, "padded_vocab_size") or size)


def _list_dense_layers(args: Mapping[str, Any]) -> tuple[int, ...]:
    # ``moe_layer_freq`` is N for experts in every N-th layer, or a list of 0 and 1.
    value, layers = args.get("moe_layer_freq"), _get_number(args, "num_layers") or 0
    if isinstance(value, (list, tuple)):
        return tuple(number for number, sparse in enumerate(value) if not sparse)
    every = value if type(value) is int and value > 0 else 1
    return tuple(number for number in range(layers) if number % every)


def _get_positions(args: Mapping[str, Any]) -> str:
    if args.get("use_rotary_position_embeddings") or args.get("use_alibi_position_embeddings"):
        return "rope" if args.get("use_rotary_position_embeddings") else "alibi"
    value = args.get("position_embedding_type")
    if isinstance(value, Mapping):
        numbers = value.get("args")
        return _ENUMERATED.get(numbers[0], "unknown") if numbers else "unknown"
    if value is None:
        return "learned" if args.get("add_position_embedding", True) else "none"
    return _POSITIONS.get(str(value), str(value))


def _make_rope_scaling(args: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``rope_scaling`` of Llama 3.1 (numbers built in), YaRN, or interpolation."""
    if args.get("position_embedding_type") == yarn.KIND:
        return yarn.parse_args(args)
    if args.get("use_rope_scaling"):
        return {
            "rope_type": "llama3",
            "factor": float(args.get("rope_scaling_factor") or 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    factor = args.get("rotary_seq_len_interpolation_factor")
    return {"rope_type": "linear", "factor": float(factor)} if factor else None


def _get_window(args: Mapping[str, Any]) -> int | None:
    # transformers counts the token itself, Megatron only the tokens before it.
    window = args.get("window_size")
    if isinstance(window, (list, tuple)) and window and type(window[0]) is int and window[0] >= 0:
        return int(window[0]) + 1
    return None


def _get_activation(args: Mapping[str, Any], *, gated: bool, linear_bias: bool) -> str:
    if gated:
        is_gelu = args.get("activation_func") == _FAST_GELU and not args.get("swiglu")
        return "gelu_pytorch_tanh" if is_gelu else "silu"
    if args.get("squared_relu"):
        return "relu2"
    # The fused kernel, which works only with a bias, computes the tanh approximation.
    fused = bool(args.get("bias_gelu_fusion")) and linear_bias
    return "gelu_pytorch_tanh" if fused or args.get("openai_gelu") else "gelu"


def _get_aux_loss(args: Mapping[str, Any]) -> float:
    value = args.get("moe_aux_loss_coeff")
    value = value[0] if isinstance(value, list) and value else value
    return float(value) if isinstance(value, (int, float)) else 0.0


def _list_unsupported(args: Mapping[str, Any]) -> list[str]:
    unsupported = []
    is_yarn = args.get("position_embedding_type") == yarn.KIND
    if is_yarn and yarn.parse_args(args) is None:
        unsupported.append("positions by YaRN that args do not state (yarn_rotary_scaling_factor)")
    activation = args.get("activation_func")  # of Megatron-Bridge; Megatron-LM has switches
    if activation not in (None, _FAST_GELU) or (activation and not args.get("gated_linear_unit")):
        unsupported.append(f"the activation {activation}, for which Megatron-LM has no argument")
    if args.get("gated_linear_unit") and not (activation or args.get("swiglu")):
        unsupported.append("gated linear units with an activation that args do not state")
    if args.get("glu_activation"):  # bigscience's fork, which gates with the second half
        unsupported.append(f"gated linear units (glu_activation {args['glu_activation']})")
    if args.get(OWN_BUILDER):
        unsupported.append(f"layers that {args[OWN_BUILDER]} of Megatron-Bridge builds")
    return unsupported
