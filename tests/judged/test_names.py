"""Megatron's models under Hugging Face's names: transformers loads them, with Megatron's logits."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import reshard
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.megatron.rank import open_args
from tests.judged.conftest import KEPT
from tests.judged.expected import read_expected
from tests.judges.megatron_cases import YARN, Case, Grid
from tests.judges.megatron_gpt import Gpt
from tests.judges.megatron_judge import load_all
from tests.judges.models import llama_config

CASES = {  # -> transformers' class, and the form that is read
    "llama": ("LlamaForCausalLM", "torch"),
    "llama_tp2pp2": ("LlamaForCausalLM", "torch_dist"),
    "llama_pp2vpp2": ("LlamaForCausalLM", "torch"),
    "llama_odd_tp2": ("LlamaForCausalLM", "torch"),
    "llama_distopt_tp2dp2": ("LlamaForCausalLM", "torch_dist_fully_reshardable"),
    "gpt2_tp2": ("GPT2LMHeadModel", "torch"),
    "gpt2_tp2pp2": ("GPT2LMHeadModel", "torch_dist"),
    "qwen2_tp4_sp": ("Qwen2ForCausalLM", "torch"),
    "qwen3_tp2pp2": ("Qwen3ForCausalLM", "torch"),
    "mixtral_ep2": ("MixtralForCausalLM", "torch"),
    "mixtral_grouped_ep2": ("MixtralForCausalLM", "torch_dist"),
    "mixtral_tp2ep4_etp1": ("MixtralForCausalLM", "torch"),
}


def compute_logits(directory, expected):
    """Return the class of a model and its float32 logits, loaded as a user loads it."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    with torch.no_grad():
        return type(model).__name__, model(expected["tokens"][:, :-1]).logits


@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_has_megatron_s_logits(megatron_case, case, tmp_path):
    place, (kind, form) = megatron_case(case), CASES[case]
    expected = read_expected(place)
    words = expected["vocabulary"]
    report = reshard.merge(place / form, tmp_path / "hf", vocab_size=words, dtype="fp32")
    found, ours = compute_logits(tmp_path / "hf", expected)
    assert found == kind
    wanted = expected["logits"][..., :words]
    assert ours.shape == wanted.shape
    exact = expected["params"]["decoder.final_layernorm.weight"].dtype == torch.float32
    if exact:
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    else:  # Megatron computed in 16 bits
        assert (ours - wanted).abs().mean() < 0.01
        assert wanted.abs().mean() > 0.3
    rows = expected["params"]["embedding.word_embeddings.weight"].shape[0]
    taken = [text for text in report.changes if "removed padding rows" in text]
    assert bool(taken) == (rows > words)
    assert all(f"padding rows {words} to {rows - 1}" in text for text in taken)


@pytest.mark.parametrize("family", ["llama_yarn", "llama_yarn_scaled"])
def test_yarn_is_the_same_in_transformers_and_megatron(family, tmp_path):
    case = Case("run", family, Grid(), "fp32", adam="torch", forms=("torch",))
    load_all(tmp_path, {"run": case})
    expected = read_expected(tmp_path / "run")
    reshard.merge(tmp_path / "run" / "torch", tmp_path / "hf", dtype="fp32")
    _, ours = compute_logits(tmp_path / "hf", expected)
    torch.testing.assert_close(ours, expected["logits"], rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["rope_scaling"] = None
    plain = tmp_path / "plain"
    shutil.copytree(tmp_path / "hf", plain)
    (plain / "config.json").write_text(json.dumps(config))
    assert (compute_logits(plain, expected)[1] - ours).abs().max() > 1e-2
    options = {"weights_only": True, "transformer_impl": "local", "tp": 1}
    reshard.split(tmp_path / "hf", tmp_path / "back", to="megatron", **options)
    args = open_args(next((tmp_path / "back").rglob("*.pt"))).values
    wanted = open_args(next((tmp_path / "run" / "torch").rglob("*.pt"))).values
    assert args["position_embedding_type"] == "yarn"
    for name in YARN.keys() - {"yarn_mscale", "yarn_mscale_all_dim"}:
        assert args[name] == wanted[name], name
    assert compute_concentration(args) == pytest.approx(compute_concentration(wanted), abs=1e-12)


def compute_concentration(args):
    """Compute the factor as yarn_rotary_pos_embedding.py of megatron-core does."""
    scale = 0.1 * math.log(args["yarn_rotary_scaling_factor"])
    return (args["yarn_mscale"] * scale + 1) / (args["yarn_mscale_all_dim"] * scale + 1)


def test_padding_is_kept_where_that_is_asked_for(megatron_case, tmp_path):
    place = megatron_case("llama_odd_tp2")
    expected = read_expected(place)
    reshard.merge(place / "torch", tmp_path / "hf", keep_padding=True, dtype="fp32")
    _, ours = compute_logits(tmp_path / "hf", expected)
    assert ours.shape == expected["logits"].shape
    assert (ours - expected["logits"]).abs().mean() < 0.01


def test_one_file_keeps_the_source_s_names_unless_others_are_asked_for(megatron_case, tmp_path):
    place = megatron_case("llama") / "torch"
    reshard.merge(place, tmp_path / "a.safetensors")
    assert "decoder.final_layernorm.weight" in load_file(tmp_path / "a.safetensors")
    reshard.merge(place, tmp_path / "b.safetensors", names="hf")
    assert "model.norm.weight" in load_file(tmp_path / "b.safetensors")
    reshard.merge(place, tmp_path / "c", names="source")
    assert not (tmp_path / "c" / "config.json").exists()
    assert "decoder.final_layernorm.weight" in load_file(tmp_path / "c" / "model.safetensors")


def test_a_family_is_named_or_taken_from_the_given_config(megatron_case, tmp_path):
    place = megatron_case("llama") / "torch"
    reshard.merge(place, tmp_path / "a", family="mistral")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["architectures"] == ["MistralForCausalLM"]
    reshard.merge(place, tmp_path / "b", hf_dir=tmp_path / "a")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config
    with pytest.raises(UnsupportedError, match=r"is not a gpt2 model: positions is rope"):
        reshard.merge(place, tmp_path / "d", family="gpt2")
    with pytest.raises(UsageError, match="family 'helium'"):
        reshard.merge(place, tmp_path / "d", family="helium")
    (tmp_path / "a" / "config.json").write_text(json.dumps({**config, "num_attention_heads": 8}))
    with pytest.raises(UsageError, match="num_attention_heads is 4, but 8 in the config"):
        reshard.merge(place, tmp_path / "d", hf_dir=tmp_path / "a")


def test_every_setting_of_a_given_config_is_compared(tmp_path):
    place = KEPT / "megatron/llama_tp2pp2/ckpt"
    reshard.merge(place, tmp_path / "a", family="mistral")
    file = tmp_path / "a" / "config.json"
    config = json.loads(file.read_text())
    changing = {
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "hidden_act": "gelu",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "mlp_bias": True,
        "num_key_value_heads": 4,
    }
    for key, value in changing.items():
        file.write_text(json.dumps({**config, key: value}))
        with pytest.raises(
            UsageError, match=f"{key} is .*, but {re.escape(str(value))} in the config"
        ):
            reshard.merge(place, tmp_path / "b", hf_dir=tmp_path / "a")
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # of transformers 5
    same = {"rms_norm_eps": 1.00000001e-05, "tie_word_embeddings": True, **rope}
    several = {key: value for key, value in config.items() if not key.startswith("rope")}
    file.write_text(json.dumps({**several, **same, "sliding_window": 4096}))
    report = reshard.merge(place, tmp_path / "b", hf_dir=tmp_path / "a", tied="keep")
    assert any("sliding_window 4096, and the run had None" in text for text in report.changes)


def test_a_model_of_no_family_keeps_its_names_and_says_why(megatron_case, tmp_path):
    place = megatron_case("qwen_moe_ep2") / "torch"
    report = reshard.merge(place, tmp_path / "a")
    assert any("the nearest is" in text for text in report.changes)
    assert not (tmp_path / "a" / "config.json").exists()
    with pytest.raises(UnsupportedError, match="the nearest is"):
        reshard.merge(place, tmp_path / "b", names="hf")


def test_padding_is_removed_under_the_source_s_names_too(megatron_case, tmp_path):
    source = megatron_case("llama_odd_tp2") / "torch"
    report = reshard.merge(source, tmp_path / "a.safetensors", vocab_size=101)
    assert any("padding rows 101 to 111" in text for text in report.changes)
    held = load_file(tmp_path / "a.safetensors")
    assert held["embedding.word_embeddings.weight"].shape == (101, 32)
    assert held["output_layer.weight"].shape == (101, 32)
    with pytest.raises(UsageError, match="has 112 rows"):
        reshard.merge(source, tmp_path / "b.safetensors", vocab_size=500)


GRIDS = {  # case -> the grid that its Hugging Face model is split for, and its form
    "llama_tp2pp2": {"tp": 2, "pp": 2},
    "gpt2_tp2": {"tp": 2, "transformer_impl": "local"},
    "mixtral_ep2": {"ep": 2, "dp": 2, "ckpt_format": "torch_dist"},
}


@pytest.mark.parametrize("case", GRIDS)
def test_a_model_goes_to_megatron_and_back(megatron_case, case, tmp_path):
    reshard.merge(megatron_case(case) / "torch", tmp_path / "hf")
    reshard.split(
        tmp_path / "hf", tmp_path / "megatron", to="megatron", weights_only=True, **GRIDS[case]
    )
    reshard.merge(tmp_path / "megatron", tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_the_optimizer_goes_through_hugging_face_s_names(megatron_case, tmp_path):
    source = megatron_case("llama_tp2pp2") / "torch"
    expected = read_expected(source.parent)
    reshard.merge(source, tmp_path / "hf")
    config = str(tmp_path / "hf")
    reshard.split(source, tmp_path / "torch", to="torch", names="hf", model=config)
    with reshard.open(tmp_path / "torch") as middle:
        moments = middle.optimizer("exp_avg")
        assert "model.layers.0.self_attn.k_proj.weight" in moments
    as_before = {"transformer_impl": "local", "make_vocab_size_divisible_by": 8}
    reshard.split(
        tmp_path / "torch", tmp_path / "back", to="megatron", tp=4, model=config, **as_before
    )
    found = reshard.diff(tmp_path / "back", source, kinds=["weight", "optimizer"])
    assert not found.unequal
    assert not found.only_a
    assert not found.only_b
    assert found.equal == 3 * len(expected["params"])
    with reshard.open(tmp_path / "back") as back:
        assert back.manifest.train.step == expected["step"]
        assert set(back.manifest.train.optimizer_step.values()) == set(expected["steps"].values())


def test_a_model_that_megatron_lacks_is_refused(tmp_path):
    from transformers import BloomConfig

    model = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=16, hidden_size=8, n_layer=1, n_head=2)
    )
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="positions by alibi; a norm of the embedding"):
        reshard.split(tmp_path / "hf", tmp_path / "m", to="megatron", weights_only=True)


OLD = {  # Megatron-DeepSpeed's words -> megatron-core's
    "tied_modules.embed.": "embedding.",
    "query_key_value": "linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "dense_h_to_4h": "linear_fc1",
    "dense_4h_to_h": "linear_fc2",
}


def test_a_pipeline_of_megatron_deepspeed_is_a_gpt2(tmp_path):
    """Compare with DeepSpeed's own universal form, whose names begin with numbers of layers."""
    case = Path(__file__).parents[1] / "data" / "megatron_deepspeed" / "tp2pp2dp2"
    reshard.merge(case / "run", tmp_path / "hf", dtype="fp32")
    held = {}
    for name, tensor in read_expected(case)["params"].items():
        number, _, rest = name.partition(".")
        own = name
        if number.isdigit():
            inside = f"decoder.layers.{int(number) - 2}.{rest}"
            own = inside if "." in rest else f"decoder.final_layernorm.{rest}"
        for old, new in OLD.items():
            own = own.replace(old, new)
        held[own] = tensor.float()
    expected = {"tokens": torch.arange(18).reshape(2, 9) * 5}
    kind, ours = compute_logits(tmp_path / "hf", expected)
    judge = Gpt(4, 4, rms=False, gated=False, positions="learned")
    wanted = judge.logits(held, expected["tokens"][:, :-1])
    assert (kind, ours.shape[-1]) == ("GPT2LMHeadModel", 122)  # as DeepSpeed says there, too
    torch.testing.assert_close(ours, wanted[..., :122], rtol=1e-4, atol=1e-4)


def test_deepspeeds_optimizer_gets_megatrons_groups_and_scheduler(made, tmp_path):
    """DeepSpeed decays all of one group; Megatron has norms and biases apart, and a schedule."""
    source, out = made / "hf_z2" / "run", tmp_path / "megatron"
    expected = read_expected(made / "hf_z2")
    report = reshard.split(source, out, to="megatron", tp=2, pp=1, dp=1)
    assert any("weight decay follows Megatron's rule" in note for note in report.notes)
    assert any("created at 36 samples" in note for note in report.notes)
    with reshard.open(out) as checkpoint:
        decayed, plain = checkpoint.manifest.train.param_groups
        assert (decayed.hyper["weight_decay"], plain.hyper["weight_decay"]) == (0.01, 0.0)
        assert {fqn for fqn in checkpoint if "norm" in fqn} == set(plain.fqns)
        assert set(decayed.fqns) == set(checkpoint) - set(plain.fqns)
        assert set(checkpoint.manifest.train.optimizer_step.values()) == {3.0}
        for own, theirs in (
            ("decoder.layers.1.self_attention.linear_proj", "model.layers.1.self_attn.o_proj"),
            ("decoder.layers.0.mlp.linear_fc2", "model.layers.0.mlp.down_proj"),
            ("decoder.final_layernorm", "model.norm"),
        ):
            for slot in ("exp_avg", "exp_avg_sq"):
                held = torch.as_tensor(checkpoint.optimizer(slot)[f"{own}.weight"][...])
                assert torch.equal(held, expected["slots"][slot][f"{theirs}.weight"]), (slot, own)
    for path in out.rglob("model_optim_rng.pt"):
        scheduler = torch.load(path, weights_only=False)["opt_param_scheduler"]
        assert (scheduler["num_steps"], scheduler["max_lr"]) == (36, 0.001)
        assert (scheduler["start_wd"], scheduler["lr_decay_style"]) == (0.01, "constant")


def test_state_that_megatron_cannot_store_is_reported(tmp_path):
    model = AutoModelForCausalLM.from_config(llama_config(96))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8).reshape(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["trust"] = 0.25
    model.config.save_pretrained(tmp_path)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    scaler = torch.amp.GradScaler("cpu").state_dict()
    torch.save({**saved, "scaler": scaler}, tmp_path / "a.pt")
    told = {"to": "megatron", "model": str(tmp_path), "dry_run": True}
    report = reshard.split(tmp_path / "a.pt", tmp_path / "out", **told)
    assert "not copied: 'trust', which the optimizer keeps for each parameter" in report.notes
    assert "not copied: the loss scaler, which a run in float32 does not have" in report.notes


@pytest.mark.parametrize("given", [True, False])
def test_a_run_is_converted_to_deepspeed_with_hugging_face_names(megatron_case, tmp_path, given):
    """In the model's order: of the config that is given, else of what the run says of its model."""
    source = megatron_case("llama_tp2pp2") / "torch"
    reshard.merge(source, tmp_path / "hf")
    model = {"model": str(tmp_path / "hf")}
    reshard.split(source, tmp_path / "torch", to="torch", names="hf", **model)
    reshard.split(tmp_path / "torch", tmp_path / "two", to="deepspeed", world_size=2, **model)
    reshard.split(
        source,
        tmp_path / "one",
        to="deepspeed",
        names="hf",
        world_size=2,
        **(model if given else {}),
    )
    found = reshard.diff(tmp_path / "one", tmp_path / "two")
    assert found.same, found
    assert found.equal > 0
