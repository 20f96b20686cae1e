"""Weights of shape [0] are refused, unless the model is known to have no elements there."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.core import keys
from reshard.errors import IncompleteError

NAMES = [f"layers.{n}.{name}" for n in range(4) for name in ("wq", "norm", "dummy")]


def saved(path, hollow):
    state = {name: torch.ones(0 if name in hollow else 4) for name in NAMES}
    save_file(state, path / "model.safetensors")
    return path / "model.safetensors"


def merge(path, **options):
    return reshard.merge(path, path.parent / "out.safetensors", overwrite=True, **options)


@pytest.mark.parametrize("hollow", [["layers.1.wq", "layers.3.wq"], ["layers.2.wq"]])
def test_placeholders_are_refused_by_merge_and_split(tmp_path, hollow):
    path = saved(tmp_path, hollow)
    with pytest.raises(IncompleteError, match=f"{len(hollow)} of 12 weights .* size 0"):
        merge(path)
    with pytest.raises(IncompleteError, match=f"{len(hollow)} of 12 weights .* size 0"):
        reshard.split(path, tmp_path / "out", to="dcp", init_optimizer="none")
    assert reshard.inspect(path).manifest.warnings


def test_placeholders_that_are_left_out_do_not_matter(tmp_path):
    path = saved(tmp_path, ["layers.1.wq", "layers.3.wq"])
    report = merge(path, edits=keys.Edits(exclude=[r"\.wq$"]))
    assert report.tensors == 8


def test_one_weight_of_a_name_of_its_own_may_be_empty_and_is_told_of(tmp_path):
    save_file({"w": torch.ones(4), "device_probe": torch.ones(0)}, tmp_path / "model.safetensors")
    report = merge(tmp_path / "model.safetensors")
    (text,) = report.warnings
    assert text.startswith("1 weight of size 0 (device_probe)")


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_the_config_beside_says_which_weights_are_empty(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, mlp_bias=True, intermediate_size=0)
    model = AutoModelForCausalLM.from_config(config)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    empty = [name for name, value in state.items() if value.shape == (0,)]
    assert len(empty) > 1
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert merge(tmp_path / "model.safetensors").tensors >= len(empty)
    state["model.norm.weight"] = torch.ones(0)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(IncompleteError, match=r"1 of .* size 0 \(model.norm.weight\)"):
        merge(tmp_path / "model.safetensors")
