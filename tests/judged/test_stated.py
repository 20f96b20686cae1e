"""What a checkpoint states twice, by arguments and tensors or by states and param groups."""

from __future__ import annotations

import argparse
import shutil

import pytest
import torch

from reshard import formats
from reshard.checks.identity import check_identity
from reshard.errors import ReshardError
from tests.judged import falsified
from tests.judged.mutations import list_sources

ARGUMENTS = {  # of Megatron, that its tensors show too; the value that is not true
    "llama_tp2pp2": {
        "ffn_hidden_size": 49,
        "add_qkv_bias": True,
        "add_bias_linear": True,
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
    },
    "qwen3_tp2pp2": {"qk_layernorm": False},
    "gpt2_tp2": {
        "max_position_embeddings": 17,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
    "mixtral_ep2": {"moe_ffn_hidden_size": 49, "num_experts": 8},
    "latent_tp2pp2vpp2ep2_etp1": {"kv_lora_rank": 21, "multi_latent_attention": False},
}


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_contradict_the_tensors_are_refused(megatron_case, tmp_path, case, form):
    run = shutil.copytree(megatron_case(case) / form, tmp_path / "run")
    paths = [*run.rglob("model_optim_rng.pt"), *run.rglob("common.pt")]
    states = {path: falsified.load(path) for path in paths}
    for name, value in ARGUMENTS[case].items():
        for path, state in states.items():
            args = argparse.Namespace(**{**vars(state["args"]), name: value})
            torch.save({**state, "args": args}, path)
        with pytest.raises(ReshardError):
            check_identity(formats.read(run))


@pytest.mark.parametrize(
    ("case", "file", "text"),
    [
        ("fsdp1_full_orig", "optim.pt", "'odd', which no param group lists, and one lists 'oddx'"),
        ("plain_named", "checkpoint.pt", "parameter 0, which no param group lists"),
    ],
)
def test_a_state_that_no_param_group_lists_is_refused(torch_made, tmp_path, case, file, text):
    """Of several groups; the state of a single one is added to it."""
    path = next(shutil.copytree(torch_made / case / "ckpt", tmp_path / "ckpt").rglob(file))
    state = falsified.load(path)
    groups = state.get("optimizer", state)["param_groups"]
    assert len(groups) > 1
    members = groups[0]["params"]
    members[0] = falsified.falsify(members[0])
    torch.save(state, path)
    told = next(e for e in list_sources(torch_made.parent) if e.name == f"torch {case}").told
    with pytest.raises(ReshardError, match=text):
        formats.read(tmp_path / "ckpt", **told)
