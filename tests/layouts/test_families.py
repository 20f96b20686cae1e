"""Families are data: a file states a config, Megatron's arguments, and what it does not accept."""

from __future__ import annotations

import pytest

from reshard.errors import UnsupportedError, UsageError
from reshard.layouts.model_parallel import config_keys, families, megatron_traits
from reshard.layouts.model_parallel.fields import FORMS, parse_field
from reshard.layouts.model_parallel.rules import add_user_rules, load_table
from reshard.layouts.model_parallel.traits import Traits

LLAMA = load_table("llama")

GATED = """
base: llama
hf:
  "decoder.layers.{i}.self_attention.gate.{p}": "model.layers.{i}.self_attn.gate.{p}"
parameters:
  "decoder.layers.{i}.self_attention.gate.{p}": {cut: column}
families:
  gated:
    when: {positions: rope, norm: rmsnorm, activation: silu, gated: true, linear_bias: false}
    config:
      model_type: gated
      architectures: [GatedForCausalLM]
      hidden_size: "{hidden}"
      intermediate_size: "{ffn}"
      num_hidden_layers: "{layers}"
      num_attention_heads: "{heads}"
      num_key_value_heads: "{groups}"
      hidden_act: "{activation}"
      rms_norm_eps: "{norm_eps}"
      rope_theta: "{rope_theta}"
      max_position_embeddings: "{max_positions}"
      vocab_size: "{rows}"
      gate_width: "{gate_width}"
      gate_every: "{gate_width/gate_unit}"
      gate_unit: "{gate_unit}"
      gates: sigmoid
    args:
      attention_output_gate: true
      gate_ffn_hidden_size: "{gate_width}"
      gate_unit: "{gate_unit}"
    neutral: {gate_dropout: any}
    neutral_args: {softmax_type: [learnable]}
"""
CONFIG = {
    "model_type": "gated",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "vocab_size": 96,
    "gate_width": 12,
    "gate_every": 3,
    "gate_unit": 4,
    "gates": "sigmoid",
}


@pytest.fixture
def gated(tmp_path):
    path = tmp_path / "gated.yaml"
    path.write_text(GATED)
    return path


def test_a_user_s_file_is_a_whole_family_in_both_directions(gated):
    family, traits = families.read_config(CONFIG, "config.json", path=gated)
    assert family.name == "gated"
    args = family.make_args(traits)
    assert (args["gate_ffn_hidden_size"], args["gate_unit"]) == (12, 4)
    assert args["attention_output_gate"] is True
    back, again = families.choose_family(megatron_traits.parse_args(args, "args"), path=gated)
    config = back.make_config(again)
    assert {**config, **CONFIG} == config
    assert config["architectures"] == ["GatedForCausalLM"]
    rule = family.table.find("decoder.layers.1.self_attention.gate.weight", {})
    assert rule is not None
    assert rule.rule.cut == "column"
    with pytest.raises(UnsupportedError, match="a gate behind attention"):
        families.choose_family(megatron_traits.parse_args(args, "args"))


def test_a_setting_that_a_family_does_not_know_is_refused_on_both_sides(gated):
    other = {**CONFIG, "gates": "tanh", "gate_dropout": 0.5, "gate_bias": True}
    with pytest.raises(UnsupportedError, match=r"gates is tanh, not sigmoid; gate_bias is True"):
        families.read_config(other, "config.json", path=gated)
    family, traits = families.read_config(CONFIG, "config.json", path=gated)
    args = family.make_args(traits) | {"softmax_type": "learnable"}
    assert not family.find_mismatches(megatron_traits.parse_args(args, "args"))
    args |= {"softmax_type": "off-by-one", "attention_output_gate": False, "use_mup": True}
    assert family.find_mismatches(megatron_traits.parse_args(args, "args")) == [
        "an attention sink (softmax_type 'off-by-one')",
        "embeddings, attention and logits scaled by width (use_mup True)",
        "attention_output_gate is False, not True",
    ]


@pytest.mark.parametrize("name", config_keys.load_settings().args)
def test_every_setting_of_megatron_is_refused_where_no_family_knows_it(name):
    family = families.load_families()["llama"]
    args = {"num_experts": 4, "swiglu": True, name: "other"}
    found = family.find_mismatches(megatron_traits.parse_args(args, "args"))
    assert any(f"({name} 'other')" in text for text in found), found


@pytest.mark.parametrize(
    ("family", "released"),
    [
        ("phi3", {"attention_bias": False}),
        ("mixtral", {"mlp_bias": False}),
        ("gpt_oss", {"experts_per_token": 4, "initial_context_length": 4096}),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}),
        ("nemotron_h", {"norm_eps": 1e-5, "rope_theta": 10000}),
        ("dots1", {"scoring_func": "noaux_tc", "moe_layer_freq": 1, "max_window_layers": 62}),
        ("exaone_moe", {"num_nextn_predict_layers": 1, "first_k_dense_replace": 1}),
        ("glm4_moe_lite", {"first_k_dense_replace": 1, "partial_rotary_factor": 1.0}),
    ],
)
def test_settings_of_released_models_that_transformers_ignores_are_accepted(family, released):
    """Phi-4, GPT-OSS, Nemotron 3, dots.llm1 and others state them."""
    own = families.load_families()[family]
    assert not [*config_keys.find_changing_keys(released, own.config, own.neutral, {})]


def test_a_list_of_balancing_losses_does_not_change_a_model():
    family = families.load_families()["mixtral"]
    args = {**SMOLLM3, "no_rope_freq": None, "num_experts": 4, "moe_router_topk": 2}
    for kinds, mismatches in (
        (["aux_loss", "seq_aux_loss"], []),
        ("none", []),
        (
            "sinkhorn",
            ["routing by Sinkhorn's algorithm (moe_router_load_balancing_type 'sinkhorn')"],
        ),
    ):
        own = {**args, "moe_router_load_balancing_type": kinds}
        assert family.find_mismatches(megatron_traits.parse_args(own, "args")) == mismatches


def test_gated_units_of_bigscience_are_no_family_s():
    args = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "glu_activation": "geglu"}
    for family in families.load_families().values():
        mismatches = family.find_mismatches(megatron_traits.parse_args(args, "args"))
        assert "gated linear units (glu_activation geglu)" in mismatches


def test_a_file_without_what_a_family_needs_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("families: {mine: {config: {model_type: mine}}}")
    with pytest.raises(
        UsageError, match="family 'mine' must have the sections 'when' and 'config'"
    ):
        families.load_families(path)
    path.write_text("base: nothing\nfamilies: {mine: {config: {model_type: mine}, when: {}}}")
    families.load_families.cache_clear()
    with pytest.raises(UsageError, match="extends the unknown table 'nothing'"):
        families.load_families(path)


@pytest.mark.parametrize(
    ("form", "values"),
    [("count_first", [(), (0, 1)]), ("not", [False, True]), ("or_none", [0, 3]), ("in_list", [5])],
)
def test_a_form_is_its_own_way_back(form, values):
    assert [FORMS[form].read(FORMS[form].write(value)) for value in values] == values


def test_dense_layers_that_are_not_the_first_ones_have_no_count():
    with pytest.raises(ValueError, match="are not the first layers"):
        FORMS["count_first"].write((0, 2))


def test_a_word_for_each_layer_states_the_dense_ones():
    line = parse_field("{dense_layers|dense_types}")
    assert line is not None
    words = ["dense", "sparse", "dense", "sparse"]
    assert line.fill("types", Traits(source="a", layers=4, dense_layers=(0, 2))) == words
    assert line.read(words, lambda _: 4) == (0, 2)
    with pytest.raises(ValueError, match="layers of type 'moe' are none of dense and sparse"):
        line.read(["moe"], lambda _: 1)


def test_an_item_of_a_mapping_is_a_setting_of_its_own():
    line = parse_field("{rope_scaling.factor=1}")
    assert line is not None
    scaled = Traits(source="a", rope_scaling={"factor": 4.0})
    assert line.fill("factor", scaled) == 4.0
    assert line.fill("factor", Traits(source="a")) == 1
    assert line.read(4.0, lambda _: {"beta": 2}) == {"beta": 2, "factor": 4.0}
    kind = parse_field("{rope_scaling.rope_type=rope}")
    assert kind is not None
    assert kind.read("rope", lambda _: None) is None
    assert kind.read("yarn", lambda _: None) == {"rope_type": "yarn"}


SMOLLM3 = {
    "num_layers": 8,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "ffn_hidden_size": 48,
}


@pytest.mark.parametrize("pattern", [4, [0, 0, 0, 1] * 2])
def test_a_pattern_of_layers_is_a_number_or_a_list(pattern):
    traits = megatron_traits.parse_args({**SMOLLM3, "no_rope_freq": pattern}, "args")
    family, found = families.choose_family(traits)
    assert family.name == "smollm3"
    assert family.make_config(found)["no_rope_layers"] == [1, 1, 1, 0] * 2
    assert family.make_args(found)["no_rope_freq"] == [0, 0, 0, 1] * 2


@pytest.mark.parametrize(
    "pattern",
    [
        {"hybrid_override_pattern": "M-M*"},
        {"hybrid_override_pattern": None, "hybrid_layer_pattern": "M-|M*"},  # since core 0.17
    ],
)
def test_letters_of_a_hybrid_model_may_have_bars_between_stages(pattern):
    mamba = {"mamba_state_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_num_groups": 2}
    relu2 = {"squared_relu": True, "swiglu": False, "position_embedding_type": "none"}
    args = {**SMOLLM3, **mamba, **relu2, "num_layers": 4, "is_hybrid_model": True, **pattern}
    untied = {"untie_embeddings_and_output_weights": True}
    family, found = families.choose_family(megatron_traits.parse_args({**args, **untied}, "args"))
    assert family.name == "nemotron_h"
    assert family.make_config(found)["layers_block_type"] == [
        *("linear_attention", "mlp", "linear_attention", "full_attention"),
    ]
    assert family.make_args(found)["hybrid_override_pattern"] == "M-M*"


def test_layers_of_another_kind_are_named():
    config = {"model_type": "gpt_oss", "layer_types": ["linear_attention"] * 2}
    with pytest.raises(UnsupportedError, match="layer_types: layers of type 'linear_attention'"):
        families.read_config(config, "config.json")


def test_a_config_has_lists_as_json_has_them():
    """Transformers refuses a config with a tuple in place of a list."""
    family = families.load_families()["qwen3_moe"]
    sizes = dict.fromkeys(("layers", "hidden", "heads", "groups", "head_dim", "experts"), 4)
    more = dict.fromkeys(("top_k", "expert_ffn", "ffn", "vocab", "max_positions"), 4)
    traits = Traits(source="x", **sizes, **more, rope_theta=1.0, norm_eps=1.0, dense_layers=(0, 2))
    assert family.make_config(traits)["mlp_only_layers"] == [0, 2]


@pytest.mark.parametrize("name", ["exaone4", "olmo2", "olmo3", "olmoe", "llama4_text"])
def test_arguments_of_another_program_s_model_name_its_family(name):
    """Without an option: a plainer family fits them but for the arguments of our own."""
    family = families.load_families()[name]
    sizes = {"layers": 4, "hidden": 64, "heads": 4, "groups": 4, "head_dim": 16, "ffn": 96}
    sizes |= {"vocab": 128, "max_positions": 64, "norm_eps": 1e-6, "rope_theta": 500000.0}
    of_layers = {"windowed": (0,) * 4 if name == "exaone4" else (1, 1, 1, 0), "window": None}
    of_layers |= {"window": 8} if name == "olmo3" else {}
    sparse = {"experts": 4, "top_k": 1, "expert_ffn": 32, "dense_layers": ()}
    sparse |= {"no_rope": (0, 0, 0, 1), "chunk": 8, "qk_l2_norm": True, "temperature": True}
    sparse |= {"temperature_floor": 8, "temperature_scale": 0.1}
    required = {k: v for k, v in family.when.items() if not isinstance(v, list) and v != "any"}
    required = {
        k: v for k, v in required.items() if not isinstance(getattr(Traits, k, 0), property)
    }
    is_sparse = name in ("olmoe", "llama4_text")
    more = {**required, **sizes, **of_layers, **(sparse if is_sparse else {})}
    traits = Traits(source="model", args=None).with_values(more)
    args = family.make_args(traits)
    assert families.choose_family(megatron_traits.parse_args(args, "args"))[0].name == name


@pytest.mark.parametrize(
    "name",
    [
        *("cwm", "dots1", "exaone_moe", "glm4", "glm4_moe_lite", "hy_v3", "jais2", "solar_open"),
        *("stablelm", "youtu"),
    ],
)
def test_a_config_is_the_same_after_the_way_to_megatron_and_back(name):
    family = families.load_families()[name]
    required = {k: v for k, v in family.when.items() if not isinstance(v, list) and v != "any"}
    sizes = {"layers": 4, "hidden": 64, "heads": 4, "groups": 4, "head_dim": 16, "ffn": 96}
    sizes |= {"vocab": 128, "max_positions": 64, "norm_eps": 1e-6, "rope_theta": 500000.0}
    sizes |= {"windowed": (1, 1, 1, 0), "window": 8, "rotary_percent": 0.5}
    sizes |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    sizes |= {"v_head_dim": 16}
    if family.when["is_sparse"]:
        sizes |= {"experts": 4, "top_k": 2, "expert_ffn": 32, "shared_ffn": 64, "router_scale": 2.5}
        sizes |= {"dense_layers": () if "is_all_sparse" in family.when else (0,), "mtp_layers": 1}
    own = {k: v for k, v in required.items() if not isinstance(getattr(Traits, k, 0), property)}
    config = family.make_config(Traits(source="model").with_values(sizes | own))
    _, traits = families.read_config(config, "config.json")
    args = family.make_args(traits)
    _, again = families.choose_family(megatron_traits.parse_args(args, "args"), name)
    assert family.make_config(again) == config


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"no_rope_freq": None}, "no_rope_freq and window_attn_skip_freq do not fit together"),
        ({"no_rope_freq": 2}, "no_rope_freq and window_attn_skip_freq do not fit together"),
        ({"window_size": None}, "has_window is False, not True"),
    ],
)
def test_the_layers_of_k_exaone_with_a_window_are_those_with_rotary_positions(changes, problem):
    family = families.load_families()["exaone_moe"]
    args = {"window_attn_skip_freq": [1, 1, 1, 0], "no_rope_freq": [0, 0, 0, 1]}
    args |= {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "window_size": (7, 0)}
    assert problem not in family.find_mismatches(megatron_traits.parse_args(args, "args"))
    args |= changes
    assert problem in family.find_mismatches(megatron_traits.parse_args(args, "args"))


@pytest.mark.parametrize("model_type", config_keys.load_settings().lacking)
def test_what_megatron_lacks_is_named(model_type):
    with pytest.raises(UnsupportedError, match=r"Megatron-core has no arguments for \w+"):
        families.read_config({"model_type": model_type}, "config.json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("families: 3", "families is 3, expected a dict"),
        ("families: {x: {when: {}, config: 3}}", r"families\['x'\].config is 3"),
        ("families: {x: {when: {}, config: {model_type: x}, args: 3}}", r"\.args is 3"),
        ("families: {x: {when: {}, config: {model_type: x}, alike: 3}}", r"\.alike is 3"),
        ("families: {x: {when: {}, config: {model_type: x}, neutral: {a: 3}}}", r"neutral\['a'\]"),
        ("numbers: 3\nparameters: {a: column}", "numbers is 3"),
        ("copies: [1]\nhf: {a: b}", r"copies is \[1\]"),
        ("repeated: 3\nparameters: {a: column}", "repeated is 3"),
        ("parameters: {a: {cut: column, segments: 3}}", r"parameters\['a'\].segments is 3"),
    ],
)
def test_a_user_s_file_of_another_structure_is_named(text, problem, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=problem) as refused:
        (families.load_families(file), add_user_rules(LLAMA, file))
    assert refused.value.where == str(file)


def test_a_user_s_family_may_have_neutral_values_of_any_argument(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        "families: {mine: {when: {positions: rope}, config: {model_type: mine},"
        " neutral_args: {router_dtype: [fp32]}}}"
    )
    (mine,) = families.get_families("mine", file)
    for dtype, mismatches in (("fp32", []), ("fp64", ["router_dtype 'fp64'"])):
        traits = megatron_traits.parse_args({**SMOLLM3, "router_dtype": dtype}, "args")
        assert mine.find_mismatches(traits) == mismatches


@pytest.mark.parametrize(("tokens", "window"), [((-1, 0), None), ((0, 0), 1), ((7, 0), 8)])
def test_a_window_counts_the_token_itself(tokens, window):
    traits = megatron_traits.parse_args({**SMOLLM3, "window_size": tokens}, "args")
    assert traits.window == window
    assert window is None or megatron_traits.make_args(traits)["window_size"] == tokens


@pytest.mark.parametrize(
    ("name", "own", "unusual", "problem"),
    [
        ("llama", {}, {"parallel_residual": True}, "parallel_residual is True, not False"),
        ("stablelm", {"norm": "layernorm"}, {"head_dim": 16}, "head_dim is 16, not 8"),
    ],
)
def test_a_family_has_the_usual_value_of_a_trait_that_it_does_not_state(
    name, own, unusual, problem
):
    """A family whose other traits fit the model would compute something else."""
    usual = {"hidden": 32, "heads": 4, "head_dim": 8, "positions": "rope", "activation": "silu"}
    usual |= {"norm": "rmsnorm", "gated": True, "linear_bias": False, "qkv_bias": False}
    traits = Traits(source="args", groups=2, args=None, **usual).with_values(own)
    assert families.choose_family(traits)[0].name == name
    with pytest.raises(UnsupportedError, match=problem):
        families.choose_family(traits.with_values(unusual), name)
