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
from reshard.errors import DifferentError, UnsupportedError, UsageError
from reshard.layouts.model_parallel import families
from reshard.layouts.model_parallel.megatron_traits import make_args
from reshard.layouts.model_parallel.traits import Traits
from reshard.naming import config as configs
from tests.support import guides

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
# Configs as on the Hub, and the family of each; that of DeepSeek V3 lacks its quantization, which
# does not concern names. Where the releases were not at hand, the values are from
# - Megatron-Bridge 067f987 tests/{unit_tests,functional_tests}/**/models/*/*.py (EXAONE 4, Gemma 3,
#   Falcon-H1, OLMoE, Qwen3-Next) and 5785262 models/olmo2/olmo2_provider.py;
# - the tests of TensorRT-LLM (Llama 4) and imp (OLMo 3);
# - the class defaults of transformers 5.23 (MiniMax M2).
# Those of Gemma 1 and of MiniMax' own keys (layernorm_*_beta, mlp_intermediate_size) are not
# confirmed.
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data/published_configs.json").read_text()
)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # -> its config, and what is named
    "granite": ({"embedding_multiplier": 12.0, "attention_multiplier": 0.02}, "embedding_mult"),
    "granite_attention": ({"attention_multiplier": 0.02}, "attention_multiplier is 0.02"),
    "smollm3": ({}, "no_rope_layers is"),
    "cohere2": ({}, "logit_scale is 0.0625"),
    "ernie4_5": ({}, "model_type is 'ernie4_5'"),  # rotates neighbours: no key says so
    "helium": ({}, "model_type is 'helium'"),
    "diffllama": ({}, "model_type is 'diffllama'"),
    "gemma": ({}, "model_type is 'gemma'"),
    "llama": ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
    "llama_partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "gpt2": ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
}


KNOWN = ("smollm3", "ernie4_5", "gemma", "helium")  # families of their own, which are no llama


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
    model_type = {"granite_attention": "granite"}.get(name) or name.removesuffix("_partial")
    config = {**TINY, **keys, "model_type": model_type}
    if model_type == "gpt2":
        config = {"model_type": "gpt2", **keys}
    if given is None and model_type == "diffllama":
        problem = "describes a model of type diffllama, for which reshard has no table"
    if given is None and model_type == "cohere2":
        problem = f"describes a model of type {model_type}, and Megatron-core has no arguments for"
    with pytest.raises(UnsupportedError, match=problem) as refused:
        family_of(tmp_path / "config.json", config, given)
    assert "--family" not in str(refused.value)


def test_neutral_values_are_accepted(tmp_path):
    config = {
        **TINY,
        "model_type": "smollm3",
        "no_rope_layers": [1, 1, 1, 1],
        "logits_scaling": 1.0,
        "quantization_config": {"quant_method": "fp8"},  # the reader decodes the weights
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
        UnsupportedError, match="describes a model of type mamba2, for which reshard has no table"
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
    ("keys", "other"),
    [
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, {"attention_factor": 1.0}),
        ({"mscale": 0.5, "mscale_all_dim": 0.2}, {"mscale": 0.5, "mscale_all_dim": 0.2}),
        ({"mscale": 0.5}, {}),  # transformers ignores one without the other
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, {}),
    ],
)
def test_the_config_of_a_model_with_yarn_is_compared_by_what_it_computes(keys, other, tmp_path):
    paths, scores = [], []
    for name, own in (("hf", keys), ("other", other)):
        rope = {"rope_scaling": {**YARN, **own}, "max_position_embeddings": 128}
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **TINY, **rope)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / name)
        paths.append(tmp_path / name)
        scores.append(model(torch.arange(60)[None]).logits)
    reshard.split(paths[0], tmp_path / "mcore", to="megatron", weights_only=True)
    reshard.merge(tmp_path / "mcore", tmp_path / "back")
    if torch.equal(*scores):
        reshard.merge(tmp_path / "mcore", tmp_path / "again", hf_dir=paths[1])
    else:
        with pytest.raises(UsageError, match="another model than the config: rope_scaling"):
            reshard.merge(tmp_path / "mcore", tmp_path / "again", hf_dir=paths[1])


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


def save_deepseek(place):
    """Save a model of DeepSeek V3 as transformers does, and return it."""
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
    model.save_pretrained(place)
    return model


@pytest.mark.parametrize("added", [0.0, 1.0])
def test_a_copy_of_the_head_beside_mtp_is_stored_once_and_compared(added, tmp_path):
    """Published files of DeepSeek V3 repeat the embedding and the head there."""
    model = save_deepseek(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    copy = f"model.layers.{model.config.num_hidden_layers}.shared_head.head.weight"
    save_file({**load_file(path), copy: model.lm_head.weight.detach() + added}, path)
    told = {"to": "megatron", "weights_only": True, "transformer_impl": "local"}
    if added:
        with pytest.raises(DifferentError, match=r"output_layer\.weight: differs"):
            reshard.split(tmp_path / "hf", tmp_path / "out", **told)
        return
    reshard.split(tmp_path / "hf", tmp_path / "out", **told)
    with reshard.open(tmp_path / "out") as run:
        assert torch.equal(run["output_layer.weight"][: TINY["vocab_size"]], model.lm_head.weight)


def test_a_config_with_layers_of_prediction_that_the_checkpoint_lacks(tmp_path):
    """As transformers saves it: the config states their number."""
    save_deepseek(tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    reshard.split(tmp_path / "hf", tmp_path / "mcore", to="megatron", weights_only=True, tp=2)
    report = reshard.merge(tmp_path / "mcore", tmp_path / "out", hf_dir=tmp_path / "hf")
    lacking = "num_nextn_predict_layers 1, and the checkpoint lacks these layers"
    assert [text for text in report.changes if lacking in text]
    saved, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert merged.keys() == saved.keys()
    assert all(torch.equal(merged[name], value) for name, value in saved.items())


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


def test_the_family_of_the_documentation_goes_to_megatron_and_back(tmp_path):
    """No class of transformers has its ``model_type``."""
    (family,) = guides.find_blocks(guides.DOCS / "extending.md", "yaml")
    rules = tmp_path / "family.yaml"
    rules.write_text(family)
    config = {
        **{key: value for key, value in TINY.items() if key != "pad_token_id"},
        "model_type": "gated",
        "architectures": ["GatedForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "gate_width": 12,
        "gate_dropout": 0.1,
    }
    like = {key: value for key, value in config.items() if not key.startswith("gate")}
    like |= {"model_type": "llama", "architectures": None}
    weights = transformers.LlamaForCausalLM(transformers.LlamaConfig(**like)).state_dict()
    for layer in range(TINY["num_hidden_layers"]):
        weights[f"model.layers.{layer}.self_attn.gate.weight"] = torch.randn(12, 32)
    model = tmp_path / "model"
    model.mkdir()
    save_file(weights, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(config))
    run = tmp_path / "run"
    reshard.split(model, run, to="megatron", tp=2, init_optimizer="none", rules=rules)
    (run / "config.json").unlink()
    reshard.merge(run, tmp_path / "back", rules=rules)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], value) for name, value in weights.items())
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {**written, **config} == {**written, "gate_dropout": 0.1}
    with pytest.raises(UsageError, match="does not recognize this architecture"):
        reshard.split(model, tmp_path / "other", to="megatron", init_optimizer="none")
