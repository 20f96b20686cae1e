"""Families of models between Hugging Face and Megatron, proved by `tests.support.megatron`."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import reshard
from reshard.errors import UsageError
from reshard.layouts.model_parallel.families import load_families, read_config
from tests.support import combinations
from tests.support.megatron import models
from tests.support.megatron import proof as families

pytestmark = pytest.mark.slow

PROVED = (  # neighbours are of one kind: they take turns in the two forms of a checkpoint
    families.CONFIGS["nemotron_h"],
    families.CONFIGS["nemotron_h_moe"],
    "deepseek_v3",
    "glm4_moe",
    "qwen3_moe",
    '{"model_type": "mistral", "sliding_window": 4096}',
    "qwen2",
    "phi3",
    "smollm3",
    "ernie4_5",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    families.CONFIGS["nemotron"],
    "exaone_moe",
)
# Megatron-core does not build these: their names are those of Megatron-Bridge, a fork, or NeMo 2.
NAMED = (
    *("gemma", "gemma3_text", families.CONFIGS["exaone4"], "olmoe", "minimax_m2", "falcon_h1"),
    *("olmo2", "olmo3", "llama4_text", "ernie4_5_moe", "glm4"),
    '{"model_type": "llama4_text", "interleave_moe_layer_step": 2, "use_qk_norm": false}',
)


def choose_forms(grids, turn):
    """Return the grid in one form of checkpoint, or in both with ``--every-combination``."""
    return grids if os.environ.get(combinations.EVERY) else grids[turn : turn + 1]


@pytest.fixture(scope="module")
def proofs(tmp_path_factory):
    """Return the proof of every family, by its name."""
    place, dense, sparse = tmp_path_factory.mktemp("families"), families.DENSE, families.SPARSE
    found = []
    for turn in (0, 1):
        grids = choose_forms(dense[1:], turn), choose_forms(sparse[-2:], turn)
        found += families.begin(PROVED[turn::2], place / f"proved{turn}", *grids)
    found += families.begin(NAMED, place / "named", dense[-1:], sparse[-1:])
    return {proof.name: proof for proof in families.finish(found, place)}


@pytest.mark.parametrize("name", PROVED)
def test_a_family_goes_to_megatron_and_back(proofs, name):
    assert proofs[name].problems == []
    assert proofs[name].refused == {}
    assert proofs[name].verdict == families.PROVED


@pytest.mark.parametrize("model_type", sorted({f.model_type for f in load_families().values()}))
def test_transformers_builds_heads_of_another_width_or_the_family_refuses_them(model_type):
    config = models.shrink(models.read_config(families.CONFIGS.get(model_type, model_type)))
    family, traits = read_config(config.to_dict(), model_type)
    width = 3 * (traits.head_dim or 1)
    changed = traits.with_values({"head_dim": width, "mtp_layers": traits.get("mtp_layers") or 0})
    if family.find_mismatches(changed) or traits.get("kv_lora_rank"):
        return
    config = AutoConfig.for_model(pad_token_id=0, **family.make_config(changed))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rows = {param.shape[0] for param in model.parameters()}
    assert width * traits.heads in rows or width * (traits.heads + 2 * traits.groups) in rows


def test_layers_that_predict_more_tokens_go_with_qwen3_next(tmp_path):
    """As in its release; transformers leaves them out."""
    config = models.shrink(models.read_config("qwen3_next"))
    sources = models.write_sources(config, tmp_path)
    path = sources.model / "model.safetensors"
    weights = load_file(path)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    assert last + "self_attn.q_proj.weight" in weights
    hidden = config.hidden_size
    more = {name.replace(last, "mtp.layers.0."): -w for name, w in weights.items() if last in name}
    more |= {"mtp.fc.weight": torch.randn(hidden, 2 * hidden)}
    more |= {
        f"mtp.{name}.weight": torch.randn(hidden)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    save_file(weights | more, path, {"format": "pt"})
    sizes = {"tp": 2, "pp": 2, "ep": 2, "dp": 2}
    reshard.split(sources.model, tmp_path / "megatron", to="megatron", weights_only=True, **sizes)
    report = reshard.merge(tmp_path / "megatron", tmp_path / "back")
    assert report.warnings == []
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == (weights | more).keys()
    assert all(torch.equal(back[name], value) for name, value in (weights | more).items())


@pytest.mark.parametrize(
    ("name", "sizes", "problem"),
    [
        (
            "qwen3_next",
            {"num_attention_heads": 8, "linear_num_key_heads": 4},
            "size 8: does not divide linear_num_key_heads, which is 4",
        ),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 48},
            "size 6: neither divides num_query_groups, which is 4, nor is a multiple of it",
        ),
        ("nemotron_h", {"n_groups": 1}, "size 2: does not divide mamba_num_groups, which is 1"),
    ],
)
def test_ranks_that_would_share_a_head_are_refused(name, sizes, problem, tmp_path):
    config = models.shrink(models.read_config(name))
    config.update(sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    ranks = int(problem.split(":")[0].removeprefix("size "))
    options = {"to": "megatron", "weights_only": True, "tp": ranks, "pp": 1, "dp": 1}
    with pytest.raises(UsageError, match=problem):
        reshard.split(tmp_path / "model", tmp_path / "out", **options)


@pytest.mark.parametrize("name", NAMED)
def test_a_family_goes_to_the_names_of_another_program_and_back(proofs, name):
    assert proofs[name].problems == []
    assert proofs[name].refused == {}
    assert proofs[name].verdict == families.THERE_AND_BACK


def test_a_16_bit_norm_stays_the_rounded_master(tmp_path):
    """One is taken off the master of a norm; the copy beside it is rounded from the same value."""
    sources = models.write_sources(models.shrink(models.read_config("qwen3_5_text")), tmp_path)
    told = {"to": "megatron", "tp": 2, "adam": "torch", "model": str(sources.model)}
    reshard.split(sources.run, tmp_path / "there", dtype="bf16", **told)
    named = {"names": "hf", "family": "qwen3_5"}
    reshard.split(tmp_path / "there", tmp_path / "ds", to="deepspeed", world_size=2, **named)
    reshard.split(tmp_path / "ds", tmp_path / "again", **told)  # compares copies with masters
    kinds = ["weight", "optimizer"]
    assert reshard.diff(tmp_path / "there", tmp_path / "again", kinds=kinds).same
