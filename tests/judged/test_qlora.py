"""LoRA trained over bitsandbytes' codes, whose real runs are kept in ``tests/data/qlora``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import reshard
from reshard.errors import UsageError
from tests.support.directories import unpack

PACKED = Path(__file__).parents[1] / "data" / "qlora" / "qlora.tar.xz"
RUNS = ("fsdp2", "zero3")
SCALE = 2.0  # lora_alpha / r of both


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return unpack(PACKED, tmp_path_factory.mktemp("qlora"))


def save_base(run, place):
    """Save a model of the run's shapes, with its weights that were not quantised."""
    sizes = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(place)
    state = load_file(place / "model.safetensors")
    with reshard.open(run) as checkpoint:
        for name, value in state.items():
            held = f"base_model.model.{name}"
            kept = checkpoint[held][...] if held in checkpoint else torch.empty(0)
            if kept.dtype == torch.bfloat16 and kept.shape == value.shape:
                state[name] = kept.float()
    save_file(state, place / "model.safetensors", {"format": "pt"})
    return state


@pytest.mark.parametrize("run", RUNS)
def test_the_adapter_is_the_live_one(run, saved, tmp_path):
    reshard.merge(saved / run / "run", tmp_path / "out", adapter="default")
    got = load_file(tmp_path / "out/adapter_model.safetensors")
    live = load_file(saved / run / "live.safetensors")
    assert got.keys() == {name.replace(".default", "") for name in live}
    for name, value in live.items():
        assert torch.equal(got[name.replace(".default", "")], value), name


@pytest.mark.parametrize("run", RUNS)
def test_the_adapter_is_added_to_the_base_that_was_not_quantised(run, saved, tmp_path):
    before = save_base(saved / run / "run", tmp_path / "base")
    live = load_file(saved / run / "live.safetensors")
    reshard.merge(saved / run / "run", tmp_path / "out", merge_lora=tmp_path / "base")
    got = load_file(tmp_path / "out/model.safetensors")
    for name, value in before.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        down, up = (live.get(f"{layer}.lora_{side}.default.weight") for side in "AB")
        added = 0 if down is None else SCALE * up.float() @ down.float()
        assert torch.allclose(got[name], value + added, atol=1e-6), name


@pytest.mark.parametrize("run", RUNS)
def test_codes_are_named_and_not_cast(run, saved, tmp_path):
    report = reshard.merge(saved / run / "run", tmp_path / "out.safetensors")
    assert any("part of a quantised weight" in text for text in report.warnings)
    with pytest.raises(UsageError, match="part of a quantised weight: scales would be rounded"):
        reshard.merge(saved / run / "run", tmp_path / "cast.safetensors", dtype="fp16")
    assert not (tmp_path / "cast.safetensors").exists()


@pytest.mark.parametrize("run", RUNS)
def test_codes_and_scales_are_split_as_they_are(run, saved, tmp_path):
    reshard.split(saved / run / "run", tmp_path / "out", world_size=3)
    assert reshard.diff(saved / run / "run", tmp_path / "out").same


@pytest.mark.parametrize("run", RUNS)
def test_codes_in_a_dtype_of_floats_are_not_taken_for_nan(run, saved):
    assert reshard.verify(saved / run / "run", deep=True).passed


def test_scales_that_modules_save_under_zero_3_are_read(saved):
    with reshard.open(saved / "zero3" / "run") as checkpoint:
        scales = [name for name in checkpoint if name.endswith(".SCB")]
        assert len(scales) == 7
        assert all(torch.all(checkpoint[name][...] > 0) for name in scales)
