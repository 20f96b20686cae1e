"""What a checkpoint states twice, by arguments and tensors or by states and param groups."""

from __future__ import annotations

import argparse
import shutil

import pytest
import torch

from reshard import formats
from reshard.checks.identity import check_identity
from reshard.errors import ReshardError
from reshard.formats.megatron.optimizers import dist_flat
from tests.judged import falsified

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


def test_settings_that_differ_between_groups_of_ranks_are_refused():
    """In torch_dist each model-parallel group has the param groups of its optimizer."""
    objects = {
        f"optimizer.distributed.dp_group_idx_{number}.optimizer": [
            {"param_groups": [{"wd_mult": 1.0, "lr": 0.1}, {"wd_mult": 0.0, "lr": rate}]}
        ]
        for number, rate in enumerate((0.1, 0.1, 0.2))
    }
    with pytest.raises(ReshardError, match=r"lr of a param group is 0\.2 .* group 2, but 0\.1"):
        dist_flat.find_group_states(objects, None, "run")
    objects.popitem()
    assert len(dist_flat.find_group_states(objects, None, "run")) == 1
