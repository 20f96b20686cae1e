"""The command line with which Megatron-LM's own script builds a written model.

Sources: Megatron-LM core_v0.16.1 ``training/arguments.py`` and ``core/transformer/
transformer_config.py``, whose fields are options; ``training/checkpointing.py``
(``load_args_from_checkpoint``); ``pretrain_gpt.py``, ``pretrain_mamba.py``.
"""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator, Mapping
from typing import Any

VERSION = "Megatron-LM 0.16.1"
_GPT, _HYBRID = "pretrain_gpt.py", "pretrain_mamba.py"
_HYBRID_SPEC = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
_PATTERN = "hybrid_override_pattern"

# Arguments of the new run besides those of the model, and of the model -> the value that needs no
# option, because it is the default. None is always such a value.
_RUN: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
    "transformer_impl": None,
    "use_distributed_optimizer": False,
    "bf16": False,
    "fp16": False,
    "ckpt_format": "torch_dist",
    "padded_vocab_size": None,
}
_DEFAULTS: dict[str, Any] = {
    "group_query_attention": False,
    "num_query_groups": 1,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "swiglu": False,
    "squared_relu": False,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "bias_gelu_fusion": True,
    "softmax_type": "vanilla",
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "untie_embeddings_and_output_weights": False,
    "is_hybrid_model": False,
    "multi_latent_attention": False,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "moe_layer_freq": 1,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_gate": False,
    "moe_aux_loss_coeff": 0.0,
    "moe_grouped_gemm": False,
    "moe_apply_probs_on_input": False,
}
_VALUES = tuple(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels max_position_embeddings
    position_embedding_type rotary_seq_len_interpolation_factor window_size window_attn_skip_freq
    no_rope_freq activation_func_clamp_value attention_dropout
    hidden_dropout num_experts moe_router_topk moe_ffn_hidden_size
    moe_shared_expert_intermediate_size moe_router_num_groups moe_router_group_topk
    moe_router_topk_scaling_factor moe_latent_size q_lora_rank kv_lora_rank qk_head_dim
    qk_pos_emb_head_dim v_head_dim rope_type mtp_num_layers experimental_attention_variant
    linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads hybrid_override_pattern mamba_state_dim
    mamba_head_dim mamba_num_groups mamba_num_heads
    """.split()
)
# What no option sets -> the value that the model then has.
_FIXED: dict[str, Any] = {
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "gated_linear_unit": False,
    "activation_func": None,
}
# The tokenizer states the vocabulary; the others repeat arguments under a second name.
_OTHERS = frozenset(("vocab_size", "norm_epsilon", "apply_layernorm_1p"))
_OPTIONS = {
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "add_bias_linear": "--disable-bias-linear",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
}
_INTEGERS = ("rotary_base", "rotary_seq_len_interpolation_factor")  # an option takes nothing else
_POSITIONS = ("learned_absolute", "rope", "none")
_GATED = ("swiglu", "quick_geglu")

RESTORED = frozenset(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups
    group_query_attention kv_channels max_position_embeddings position_embedding_type rotary_base
    rotary_percent rotary_interleaved add_bias_linear add_qkv_bias squared_relu swiglu
    untie_embeddings_and_output_weights normalization attention_dropout hidden_dropout
    hybrid_override_pattern num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk
    moe_router_pre_softmax moe_grouped_gemm moe_shared_expert_intermediate_size
    moe_router_score_function moe_router_enable_expert_bias moe_router_topk_scaling_factor
    mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads is_hybrid_model moe_latent_size
    padded_vocab_size ckpt_format
    """.split()
)
"""The arguments that ``--use-checkpoint-args`` takes from a checkpoint."""


def make_line(args: Mapping[str, Any], *, loads_random_states: bool) -> str:
    """Return the script, and every option that shapes the model; ``{path}`` is the checkpoint."""
    known = _complete(args)
    parts = [_HYBRID if known.get(_PATTERN) else _GPT, "--load {path}"]
    parts += [] if loads_random_states else ["--no-load-rng"]
    parts += (_spell(name, known[name]) for name in _list_needed(known))
    return " ".join([*parts, *([_HYBRID_SPEC] if known.get(_PATTERN) else [])])


def describe_gaps(args: Mapping[str, Any], model: Container[str]) -> Iterator[str]:
    """Yield notes on what ``--use-checkpoint-args`` does not restore, and what no option sets.

    Args:
        model: the names of the arguments that state the model.
    """
    known = _complete(args)
    needed = [_spell(name, known[name]) for name in _list_needed(known) if name not in RESTORED]
    needed += [_HYBRID_SPEC] if known.get(_PATTERN) else []
    if needed:
        yield (
            f"--use-checkpoint-args of {VERSION} does not restore {' '.join(needed)}: pass them, or"
            " Megatron builds another model, and may do so without an error"
        )
    unset = [
        f"{name}={value}"
        for name, value in known.items()
        if name in model and _lacks_option(name, value)
    ]
    if unset:
        yield (
            f"{VERSION} has no option for {', '.join(unset)}: set them in the configuration of the"
            " model that your script builds"
        )


def _complete(args: Mapping[str, Any]) -> dict[str, Any]:
    known = dict(args)
    if known.get("expert_tensor_parallel_size") == known.get("tensor_model_parallel_size"):
        known["expert_tensor_parallel_size"] = None  # its default
    if known.get("num_experts") and (known.get("tensor_model_parallel_size") or 1) > 1:
        known["sequence_parallel"] = (
            True  # required in training (core/transformer/moe/moe_layer.py)
        )
    if any(map(known.get, _GATED)):
        known["bias_gelu_fusion"] = None  # acts in other activations alone
    if known.get(_PATTERN):
        known["is_hybrid_model"] = True
    return known


def _list_needed(known: Mapping[str, Any]) -> Iterator[str]:
    defaults = {**_RUN, **dict.fromkeys(_VALUES), **_DEFAULTS}
    for name, default in defaults.items():
        value = known.get(name)
        if value is not None and value != default and not _lacks_option(name, value):
            yield name


def _lacks_option(name: str, value: Any) -> bool:
    if value is None or name in _OTHERS or name in _RUN:
        return False
    if name in _FIXED:
        return bool(value != _FIXED[name])
    if name == "position_embedding_type":
        return value not in _POSITIONS
    if name in _INTEGERS:
        return not float(value).is_integer()
    return name not in _VALUES and name not in _DEFAULTS


def _spell(name: str, value: Any) -> str:
    option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
    if isinstance(value, bool):  # a switch, for the value that is not the default
        return option
    if name == "window_size":
        text = ",".join(map(str, value))
    elif isinstance(value, (list, tuple)):
        text = "[" + ",".join(map(str, value)) + "]"
    else:
        text = str(int(value) if name in _INTEGERS else value)
    return f"{option} {shlex.quote(text)}"
