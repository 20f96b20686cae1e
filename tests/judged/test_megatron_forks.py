"""Checkpoints that GPT-NeoX and bigscience's Megatron-DeepSpeed wrote: tests/data/README.md.

``expected.pt`` has what the ranks held, gathered as their own ``partition_dim`` says, and what the
model said of some tokens.
"""

from __future__ import annotations

import re
import shutil
from types import SimpleNamespace

import pytest
import torch

import reshard
from reshard.commands.split.command import split
from reshard.commands.split.options import SplitOptions
from tests.judged.conftest import KEPT
from tests.judged.expected import read_expected

SLOTS = ("exp_avg", "exp_avg_sq")
CASES = ("bloom/tp2pp2", "gpt_neox/tp2pp2", "gpt_neox/tp2pp0")
SUMMED = re.compile(r".*\.(attention\.dense|mlp\.linear2)\.bias")
RANKS = 2
PADDED_TO = 16  # rows of a vocabulary, a multiple: make_vocab_size_divisible_by x ranks


def whole(name, value, case):
    """Return the sums of biases of all ranks, as GPT-NeoX's parallel residual adds equal ones."""
    return value * RANKS if case.startswith("gpt_neox") and SUMMED.fullmatch(name) else value


@pytest.mark.parametrize("case", CASES)
def test_the_state_of_the_ranks_is_read(case):
    expected = read_expected(KEPT / case)
    with reshard.open(KEPT / case / "run") as checkpoint:
        assert set(checkpoint) == set(expected["params"])
        for name, value in expected["params"].items():
            assert torch.equal(checkpoint[name][...].float(), whole(name, value, case)), name
        for slot in SLOTS:
            assert set(checkpoint.optimizer(slot)) == set(expected[slot])
            for name, value in expected[slot].items():
                assert torch.equal(checkpoint.optimizer(slot)[name][...], value), (slot, name)


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_logits_of_the_model(case, tmp_path):
    from transformers import AutoModelForCausalLM

    expected = read_expected(KEPT / case)
    reshard.merge(KEPT / case / "run", tmp_path / "hf", dtype="fp32")
    model, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        found = model.eval()(expected["tokens"]).logits
    noise = 2e-2 if expected["logits"].dtype == torch.bfloat16 or case != CASES[2] else 1e-5
    wanted = expected["logits"].float()
    assert (found - wanted).abs().max() < noise * wanted.abs().max()


def test_each_rank_gets_its_share_of_a_summed_bias(tmp_path):
    """At the same ranks the bytes are as before; on one rank stands the sum."""
    run, expected = KEPT / "gpt_neox/tp2pp2/run", read_expected(KEPT / "gpt_neox/tp2pp2")
    split(run, tmp_path / "same", SplitOptions(tp=2, pp=2, dp=1))
    split(run, tmp_path / "one", SplitOptions(tp=1, pp=2, dp=1))
    name, file = "2.attention.dense.bias", "global_step3/layer_02-model_0{}-model_states.pt"
    held = expected["params"][name].to(torch.bfloat16)
    for place, shown in (("same", held), ("one", RANKS * held)):
        for rank in range(2 if place == "same" else 1):
            found = torch.load(next((tmp_path / place).rglob(file.format(rank)[13:])))
            assert torch.equal(found[name.partition(".")[2]], shown), (place, rank)


NEOX = [case for case in CASES if case.startswith("gpt_neox")]
VALUES = {"kinds": ["weight", "optimizer"]}


def list_tensors(value, path=""):
    """Return every tensor inside an object, by its path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if not isinstance(value, (dict, list, tuple)):
        return {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        key: found
        for at, each in items
        for key, found in list_tensors(each, f"{path}/{at}").items()
    }


@pytest.mark.parametrize("case", NEOX)
def test_a_round_trip_over_one_rank_keeps_every_byte(case, tmp_path):
    """The settings go along, and the sizes are those that GPT-NeoX's loader wants."""
    run, stages = KEPT / case / "run", 2 if case.endswith("pp2") else 1
    report = split(run, tmp_path / "one", SplitOptions(tp=1, pp=stages, dp=1))
    (told,) = [text for text in report.notes if "GPT-NeoX" in text]
    assert "model_parallel_size 1, make_vocab_size_divisible_by 16" in told
    assert "no_load_rng" in told
    split(tmp_path / "one", tmp_path / "two", SplitOptions(tp=2, pp=stages, dp=1))
    reshard.verify(run, write_manifest=tmp_path / "held.json")
    for place, ranks in (("one", 1), ("two", RANKS)):
        copy = tmp_path / place
        (settings,) = run.glob("*/configs/*.yml")
        assert (copy / settings.relative_to(run)).read_bytes() == settings.read_bytes()
        args = torch.load(next(copy.rglob("mp_rank_00_model_states.pt")), weights_only=False)[
            "args"
        ]
        assert args["model_parallel_size"] == ranks
        assert args["make_vocab_size_divisible_by"] * ranks == PADDED_TO
        compared = reshard.diff(run, copy, **VALUES)
        assert compared.same
        assert compared.equal_by_kind["weight"] == len(read_expected(KEPT / case)["params"])
        assert reshard.verify(copy, against=tmp_path / "held.json").exit_code == 0
    for path in run.rglob("*_states.pt"):
        before, after = (
            list_tensors(torch.load(place / path.relative_to(run), weights_only=False))
            for place in (run, tmp_path / "two")
        )
        assert after or "mp_rank" in path.name
        for at, value in after.items():
            assert torch.equal(before.pop(at), value), (path, at)
        assert all("rng" in at for at in before)  # of ranks that are no more


def test_padding_that_the_target_may_change_is_reported(tmp_path):
    run = shutil.copytree(KEPT / NEOX[1] / "run", tmp_path / "run")
    for path in run.rglob("*model_states.pt"):
        states = torch.load(path, weights_only=False)
        states["args"]["make_vocab_size_divisible_by"] = 1  # times 2 ranks: no multiple of 4
        torch.save(states, path)
    report = split(run, tmp_path / "out", SplitOptions(tp=4, dp=1, dry_run=True))
    assert any("results in the 64 rows" in text for text in report.notes)


@pytest.mark.parametrize("case", NEOX)
def test_a_lost_sum_of_biases_is_detected(case, tmp_path):
    """The same files without what says that ranks add up: another state."""
    copy = shutil.copytree(KEPT / case / "run", tmp_path / "run")
    shutil.rmtree(next(copy.glob("*/configs")))
    found = reshard.diff(KEPT / case / "run", copy, **VALUES)
    names = {name for name in read_expected(KEPT / case)["params"] if SUMMED.fullmatch(name)}
    assert {each.fqn for each in found.unequal} == names != set()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_deepspeed_loads_each_ranks_share_of_a_universal_checkpoint(ranks, tmp_path):
    """Every rank gets what the file holds; the sum over ranks is the same at the size it is for."""
    case, name = "gpt_neox/tp2pp2", "2.attention.dense.bias"
    split(KEPT / case / "run", tmp_path / "native", SplitOptions(tp=ranks, pp=2, dp=1))
    report = split(tmp_path / "native", tmp_path / "out", SplitOptions(to="ds-universal"))
    told = [text for text in report.notes if "load it at a tensor-parallel size" in text]
    assert told
    assert all(f"size of {ranks}" in text for text in told)
    expected = read_expected(KEPT / case)
    (folder,) = tmp_path.glob(f"out/*/zero/{name}")
    for kind, factor in (("params", RANKS), *((slot, ranks) for slot in SLOTS)):
        added = sum(load_with_deepspeed(folder, rank, ranks)[kind] for rank in range(ranks))
        assert torch.equal(added, factor * expected[kind][name]), kind
    with reshard.open(tmp_path / "out") as checkpoint:
        assert torch.equal(checkpoint[name][...], RANKS * expected["params"][name])
    assert reshard.diff(KEPT / case / "run", tmp_path / "out", **VALUES).same


def load_with_deepspeed(folder, rank, ranks):
    """Return what DeepSpeed's loader gives one rank of a parameter that every rank has whole."""
    from deepspeed.checkpoint import universal_checkpoint

    shape = torch.load(folder / "fp32.pt", weights_only=False)["param"].shape
    held, param = torch.empty(shape), torch.nn.Parameter(torch.empty(shape))
    address = SimpleNamespace(start=0, numel=held.numel())
    param._hp_mapping = SimpleNamespace(
        lp_fragment_address=address, get_hp_fragment=lambda: held, optim_fragment={}
    )
    universal_checkpoint.load_hp_checkpoint_state(param, str(folder), rank, ranks)
    return {"params": held, **param._hp_mapping.optim_fragment}


def test_missing_settings_are_reported_as_assumptions(tmp_path):
    copy = shutil.copytree(KEPT / "gpt_neox/tp2pp2/run", tmp_path / "run")
    shutil.rmtree(next(copy.glob("*/configs")))
    with reshard.open(copy) as checkpoint:
        (told,) = [text for text in checkpoint.manifest.warnings if "gpt_j_residual" in text]
        value = checkpoint["2.attention.dense.bias"][...].float()
    assert "configs/" in told
    assert torch.equal(
        value, read_expected(KEPT / "gpt_neox/tp2pp2")["params"]["2.attention.dense.bias"]
    )


@pytest.mark.parametrize("kinds", ["local", "sparse_fixed"])
def test_attention_that_transformers_lacks_keeps_its_names(kinds, tmp_path):
    """``flash`` computes what ``global`` does."""
    copy = shutil.copytree(KEPT / "gpt_neox/tp2pp2/run", tmp_path / "run")
    (path,) = copy.glob("*/configs/*.yml")
    text = path.read_text()
    for kind, has_config in (("flash", True), (kinds, False)):
        setting = f'"attention_config": [[["global", "{kind}"], "all"]]'
        path.write_text(f"{text.rstrip().removesuffix('}')}, {setting}}}")
        report = reshard.merge(copy, tmp_path / kind)
        assert (tmp_path / kind / "config.json").exists() is has_config
        assert has_config or any("sparse attention" in text for text in report.changes)
