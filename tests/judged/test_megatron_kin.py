"""Checkpoints that GPT-NeoX and bigscience's Megatron-DeepSpeed wrote: tests/data/README.md.

``reference.pt`` has what the ranks held, gathered as their own ``partition_dim`` says, and what the
model said of some tokens.
"""

from __future__ import annotations

import re
import shutil

import pytest
import torch

import reshard
from reshard.commands.split.command import split
from reshard.commands.split.options import SplitOptions
from tests.judged.conftest import KEPT

SLOTS = ("exp_avg", "exp_avg_sq")
CASES = ("bloom/tp2pp2", "gpt_neox/tp2pp2", "gpt_neox/tp2pp0")
SUMMED = re.compile(r".*\.(attention\.dense|mlp\.linear2)\.bias")
RANKS = 2


def reference_of(case):
    return torch.load(KEPT / case / "reference.pt", weights_only=False)


def whole(name, value, case):
    """GPT-NeoX's parallel residual adds the biases of all ranks, which hold the same."""
    return value * RANKS if case.startswith("gpt_neox") and SUMMED.fullmatch(name) else value


@pytest.mark.parametrize("case", CASES)
def test_what_the_ranks_held_is_read(case):
    reference = reference_of(case)
    with reshard.open(KEPT / case / "run") as checkpoint:
        assert set(checkpoint) == set(reference["params"])
        for name, value in reference["params"].items():
            assert torch.equal(checkpoint[name][...].float(), whole(name, value, case)), name
        for slot in SLOTS:
            assert set(checkpoint.optimizer(slot)) == set(reference[slot])
            for name, value in reference[slot].items():
                assert torch.equal(checkpoint.optimizer(slot)[name][...], value), (slot, name)


@pytest.mark.parametrize("case", CASES)
def test_transformers_says_what_the_model_said(case, tmp_path):
    from transformers import AutoModelForCausalLM

    reference = reference_of(case)
    reshard.merge(KEPT / case / "run", tmp_path / "hf", dtype="fp32")
    model, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        found = model.eval()(reference["tokens"]).logits
    noise = 2e-2 if reference["logits"].dtype == torch.bfloat16 or case != CASES[2] else 1e-5
    wanted = reference["logits"].float()
    assert (found - wanted).abs().max() < noise * wanted.abs().max()


def test_each_rank_gets_its_share_of_a_summed_bias(tmp_path):
    """At the same ranks the bytes are as before; on one rank stands the sum."""
    run, reference = KEPT / "gpt_neox/tp2pp2/run", reference_of("gpt_neox/tp2pp2")
    split(run, tmp_path / "same", SplitOptions(tp=2, pp=2, dp=1))
    split(run, tmp_path / "one", SplitOptions(tp=1, pp=2, dp=1))
    name, file = "2.attention.dense.bias", "global_step3/layer_02-model_0{}-model_states.pt"
    held = reference["params"][name].to(torch.bfloat16)
    for place, shown in (("same", held), ("one", RANKS * held)):
        for rank in range(2 if place == "same" else 1):
            found = torch.load(next((tmp_path / place).rglob(file.format(rank)[13:])))
            assert torch.equal(found[name.partition(".")[2]], shown), (place, rank)


def test_without_its_settings_the_report_says_what_was_assumed(tmp_path):
    copy = shutil.copytree(KEPT / "gpt_neox/tp2pp2/run", tmp_path / "run")
    shutil.rmtree(next(copy.glob("*/configs")))
    with reshard.open(copy) as checkpoint:
        (told,) = [text for text in checkpoint.manifest.warnings if "gpt_j_residual" in text]
        value = checkpoint["2.attention.dense.bias"][...].float()
    assert "configs/" in told
    assert torch.equal(value, reference_of("gpt_neox/tp2pp2")["params"]["2.attention.dense.bias"])
