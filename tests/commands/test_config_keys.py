"""Configs of transformers for Megatron: what a family does not implement is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import reshard
from reshard.errors import DifferentError, UnsupportedError
from reshard.layouts.model_parallel import families
from reshard.layouts.model_parallel.megatron_traits import make_args
from reshard.layouts.model_parallel.traits import Traits
from reshard.naming import config as configs

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
LLAMA_2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN_2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
DEEPSEEK_V3: dict[str, Any] = {  # without its quantization, which has nothing to do with names
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
PUBLISHED: dict[str, dict[str, Any]] = {  # as they lie on the hub, and the family of each
    "Llama-2-7b": {"family": "llama", **LLAMA_2},
    "Llama-3.1-8B": {
        "family": "llama",
        **LLAMA_2,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "Mistral-7B-v0.3": {
        "family": "mistral",
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.0.dev0",
        "use_cache": True,
        "vocab_size": 32768,
    },
    "Qwen2.5-7B": {"family": "qwen2", **QWEN_2_5},
    "Qwen3-8B": {
        "family": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        "family": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mixtral-8x7B-v0.1": {
        "family": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "gpt2": {
        "family": "gpt2",
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "pythia-160m": {
        "family": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "bloom-560m": {
        "family": "bloom",
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["BloomForCausalLM"],
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "masked_softmax_fusion": True,
        "model_type": "bloom",
        "n_embed": 1024,
        "n_inner": None,
        "n_layer": 24,
        "num_attention_heads": 16,
        "offset_alibi": 100,
        "pad_token_id": 3,
        "pretraining_tp": 1,
        "seq_length": 2048,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "transformers_version": "4.20.0",
        "unk_token_id": 0,
        "use_cache": True,
        "vocab_size": 250880,
    },
    "DeepSeek-V3 (bf16)": {"family": "deepseek_v3", **DEEPSEEK_V3},
    "DeepSeek-V2-Lite": {
        "family": "deepseek_v2",
        **DEEPSEEK_V3,
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": None,
        "q_lora_rank": None,
        "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "Kimi-K2-Instruct (bf16)": {
        "family": "deepseek_v3_ungrouped",
        **DEEPSEEK_V3,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "model_type": "kimi_k2",
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "beta_fast": 1.0, "factor": 32.0},
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840,
    },
    "Moonlight-16B-A3B": {
        "family": "deepseek_v3_ungrouped",
        **DEEPSEEK_V3,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "vocab_size": 163840,
    },
    "GLM-4.5-Air": {
        "family": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "partial_rotary_factor": 0.5,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0",
        "use_cache": True,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
}
# The values are those of the releases as other projects keep them: Megatron-Bridge 067f987
# tests/{unit_tests,functional_tests}/**/models/{exaone,falcon_h1,gemma,olmoe,qwen}/*.py (EXAONE 4,
# Falcon-H1, Gemma 3, OLMoE, Qwen3-Next) and 5785262 models/olmo2/olmo2_provider.py; the tests of
# TensorRT-LLM (Llama 4) and imp (OLMo 3); class defaults of transformers 5.23 (MiniMax M2).
# Those of Gemma 1 and of MiniMax' own keys (layernorm_*_beta, mlp_intermediate_size) are not
# confirmed.
PUBLISHED |= json.loads((Path(__file__).parents[1] / "data/published_configs.json").read_text())
REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # -> its config, and what is named
    "granite": ({"embedding_multiplier": 12.0, "attention_multiplier": 0.02}, "embedding_mult"),
    "granite_attention": ({"attention_multiplier": 0.02}, "attention_multiplier is 0.02"),
    "smollm3": ({}, "no_rope_layers is"),
    "cohere2": ({}, "logit_scale is 0.0625"),
    "ernie4_5": ({}, "model_type is 'ernie4_5'"),  # rotates neighbours: no key says so
    "helium": ({}, "model_type is 'helium'"),
    "gemma": ({}, "model_type is 'gemma'"),
    "llama": ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
    "llama_partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "llama_quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "gpt2": ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
}


KNOWN = ("smollm3", "ernie4_5", "gemma")  # families of their own, which are no llama


def family_of(path, config: dict[str, Any], name: str | None = None):
    path.write_text(json.dumps(config))
    return family_of_file(path, name)


def family_of_file(path, name: str | None = None):
    return families.read_config(configs.read_config(path), str(path), name, configs._read_defaults)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_of_its_family(name, tmp_path):
    config = dict(PUBLISHED[name])
    expected = config.pop("family")
    family, found = family_of(tmp_path / "config.json", config)
    assert family.name == expected
    assert found.layers == config.get("num_hidden_layers", config.get("n_layer"))


@pytest.mark.parametrize(
    ("given", "name"),
    [(given, n) for given in (None, "llama") for n in REFUSED if given or n not in KNOWN],
)
def test_a_key_that_changes_the_model_is_refused_by_name(name, given, tmp_path):
    keys, problem = REFUSED[name]
    model_type = {"granite_attention": "granite"}.get(name) or name.removesuffix(
        "_partial"
    ).removesuffix("_quantized")
    config = {**TINY, **keys, "model_type": model_type}
    if model_type == "gpt2":
        config = {"model_type": "gpt2", **keys}
    if given is None and model_type == "helium":
        problem = "describes a helium model, for which reshard has no table"
    if given is None and model_type == "cohere2":
        problem = f"describes a {model_type} model, and Megatron-core has no arguments for"
    with pytest.raises(UnsupportedError, match=problem) as refused:
        family_of(tmp_path / "config.json", config, given)
    assert "--family" not in str(refused.value)


def test_neutral_values_are_accepted(tmp_path):
    config = {
        **TINY,
        "model_type": "smollm3",
        "no_rope_layers": [1, 1, 1, 1],
        "logits_scaling": 1.0,
    }
    family, _ = family_of(tmp_path / "config.json", config)
    assert family.name == "smollm3"


def logits(model_type: str, weights: Any = None, **keys: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, **TINY, head_dim=8, rms_norm_eps=1e-5, tie_word_embeddings=False, **keys
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if weights is not None:
        model.load_state_dict(weights)
    with torch.no_grad():
        return model.state_dict(), model(torch.arange(3, 23)[None]).logits


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("ministral", {}),
        ("granite", {"attention_multiplier": 8**-0.5}),
    ],
)
def test_a_model_type_that_is_alike_computes_the_same(model_type, keys):
    rope = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    weights, wanted = logits("llama", **rope)
    _, found = logits(model_type, weights, **rope, **keys)
    torch.testing.assert_close(found, wanted)
    assert model_type in families.load_families()["llama"].alike


def test_convert_refuses_and_writes_nothing(tmp_path):
    config = transformers.GraniteConfig(**TINY, embedding_multiplier=12.0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    (tmp_path / "hf").mkdir()
    config.save_pretrained(tmp_path / "hf")
    save_file(dict(model.state_dict()), tmp_path / "hf" / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"embedding_multiplier is 12\.0"):
        reshard.split(
            tmp_path / "hf", tmp_path / "out", to="megatron", family="llama", weights_only=True
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("factor", "is_told"), [(8.0, False), (32.0, True)])
def test_a_factor_that_megatron_s_script_ignores_is_told(factor, is_told, tmp_path):
    """Llama 3.2 has 32; gpt_builder of Megatron-LM 0.16.1 builds every model with 8."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = AutoConfig.for_model(
        "llama", **TINY, rope_parameters={**scaling, "rope_theta": 500000.0}
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    report = reshard.split(
        tmp_path / "model", tmp_path / "out", to="megatron", init_optimizer="none"
    )
    told = [note for note in report.notes if "rope_scaling_factor" in note]
    assert bool(told) == is_told, report.notes


def test_a_config_that_holds_an_infinity_is_read(tmp_path):
    """A config of transformers has it as {"__float__": "Infinity"}."""
    transformers.Mamba2Config().save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    with pytest.raises(
        UnsupportedError, match="describes a mamba2 model, for which reshard has no table"
    ):
        family_of_file(tmp_path / "config.json")


YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"mscale": 0.5, "mscale_all_dim": 0.2, "truncate": False},
        {"mscale": 0.5},
        {"attention_factor": 1.0},
        {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2},
    ],
)
def test_yarn_of_transformers_is_megatron_s(keys, tmp_path):
    """As Megatron computes the factor of cos and sin, it is that of transformers."""
    config = {**TINY, "model_type": "llama", "max_position_embeddings": 128}
    config["rope_scaling"] = {**YARN, **keys}
    _, found = family_of(tmp_path / "config.json", config)
    args = make_args(found)
    loaded = AutoConfig.from_pretrained(tmp_path / "config.json")
    wanted = ROPE_INIT_FUNCTIONS["yarn"](loaded, "cpu")[1]
    scale = 0.1 * math.log(args["yarn_rotary_scaling_factor"])
    factor = (args["yarn_mscale"] * scale + 1) / (args["yarn_mscale_all_dim"] * scale + 1)
    assert factor == pytest.approx(wanted, abs=1e-12)
    assert args["position_embedding_type"] == "yarn"
    assert args["yarn_original_max_position_embeddings"] == 32
    assert args["yarn_beta_fast"] == keys.get("beta_fast", 32)
    assert args["yarn_correction_range_round_to_int"] is keys.get("truncate", True)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"low_freq_factor": 1.0}, "YaRN's low_freq_factor 1.0"),
        ({"factor": "4"}, "YaRN's factor '4'"),
        ({"factor": 0.5}, "YaRN with factor 0.5"),
        ({"factor": 1, "attention_factor": 1.2}, "attention_factor 1.2 at factor 1"),
    ],
)
def test_yarn_that_megatron_lacks_is_refused_by_name(keys, problem):
    said = Traits(source="a", positions="rope", rope_scaling={**YARN, **keys})
    with pytest.raises(UnsupportedError, match=problem):
        make_args(said)


@pytest.mark.parametrize("added", [0.0, 1.0])
def test_a_copy_of_the_head_beside_mtp_is_stored_once_and_compared(added, tmp_path):
    """Published files of DeepSeek V3 repeat the embedding and the head there."""
    config = transformers.DeepseekV3Config(
        **TINY | {"num_key_value_heads": TINY["num_attention_heads"]},
        moe_intermediate_size=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    copy = f"model.layers.{config.num_hidden_layers}.shared_head.head.weight"
    save_file({**load_file(path), copy: model.lm_head.weight.detach() + added}, path)
    told = {"to": "megatron", "weights_only": True, "transformer_impl": "local"}
    if added:
        with pytest.raises(DifferentError, match=r"output_layer\.weight: differs"):
            reshard.split(tmp_path / "hf", tmp_path / "out", **told)
        return
    reshard.split(tmp_path / "hf", tmp_path / "out", **told)
    with reshard.open(tmp_path / "out") as run:
        assert torch.equal(run["output_layer.weight"][: config.vocab_size], model.lm_head.weight)


def test_what_another_program_computes_differently_is_said(tmp_path):
    """Megatron-Bridge routes Ernie 4.5's tokens by a sigmoid; names and values are as they were."""
    sizes = {"head_dim": 8, "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2}
    config = AutoConfig.for_model("ernie4_5_moe", **TINY, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    sizes = {"tp": 2, "ep": 2, "dp": 2}
    report = reshard.split(
        tmp_path / "hf", tmp_path / "out", to="megatron", weights_only=True, **sizes
    )
    said = "Megatron-Bridge chooses experts by a sigmoid of their scores"
    assert any(said in text for text in report.notes)
    reshard.merge(tmp_path / "out", tmp_path / "back")
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("hf", "back"))
    bias = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    assert before[bias].shape == (1, 4)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], value) for name, value in after.items())
