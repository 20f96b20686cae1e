"""Runs with AutoEP that DeepSpeed wrote (`tests/data`), against what their live engines held."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import reshard
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from tests.support.directories import unpack

PACKED = Path(__file__).parents[1] / "data" / "autoep_0.19.8" / "qwen2_ep2.tar.xz"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("autoep")
    unpack(PACKED, place)
    return place / "qwen2_ep2"


@pytest.fixture
def copied(saved, tmp_path):
    """Return a copy of a run that may be damaged, and one of its files."""

    def copy(run, name):
        shutil.copytree(saved / run, tmp_path / run)
        return tmp_path / run, next((tmp_path / run).rglob(name))

    return copy


@pytest.mark.parametrize("run", ["stage2", "stage3", "universal"])
def test_the_state_has_the_names_and_values_of_the_model_without_autoep(run, saved):
    expected = torch.load(saved / f"expected_{'stage3' if run == 'stage3' else 'stage2'}.pt")
    with reshard.open(saved / run) as checkpoint:
        assert checkpoint.keys() == expected["weight"].keys()
        for fqn, value in expected.pop("weight").items():
            assert torch.equal(checkpoint[fqn][...], value), fqn
        for slot, values in expected.items():
            held = checkpoint.optimizer(slot)
            assert all(torch.equal(held[fqn][...], value) for fqn, value in values.items())
        (group,) = checkpoint.manifest.train.param_groups
        assert set(group.fqns) == set(checkpoint)
        assert not group.hyper.keys() & {"moe"}
        assert not checkpoint.manifest.frozen
        assert any("must not enable expert_parallel" in w for w in checkpoint.manifest.warnings)


def test_moments_are_those_that_deepspeed_converts(saved):
    """``ds_to_universal`` of DeepSpeed 0.19.8 made the universal checkpoint from stage 2."""
    assert reshard.diff(saved / "stage2", saved / "universal").same


def test_merge_writes_what_transformers_loads_and_split_a_run_without_autoep(saved, tmp_path):
    transformers = pytest.importorskip("transformers", "5.0", "4 has other names in memory")
    for run in ("stage2", "stage3"):
        shutil.copytree(saved / run, tmp_path / run)
        shutil.copy(saved / "config.json", tmp_path / run)
        reshard.merge(tmp_path / run, tmp_path / f"{run}_hf", dtype="fp32")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / f"{run}_hf", output_loading_info=True, dtype=torch.float32
        )
        assert not any(info.values())
        expected = torch.load(saved / f"expected_{run}.pt")["weight"]
        assert all(torch.equal(value, expected[fqn]) for fqn, value in model.state_dict().items())
        out = tmp_path / f"{run}_3"
        config = str(saved / "config.json")
        reshard.split(saved / run, out, world_size=3, zero_stage=3, model=config)
        assert reshard.diff(saved / run, out).same
        state = torch.load(next(out.rglob("zero_pp_rank_0_*model_states.pt")), weights_only=False)
        assert not state.keys() & {"universal_checkpoint_info"}
        assert not state.get("ds_autoep_layers")


def edit(path, key, value):
    held = torch.load(path, weights_only=False)
    if callable(value):
        value(held[key])
    else:
        held[key] = value
    torch.save(held, path)


def test_a_missing_expert_is_named(copied):
    run, path = copied("stage2", "layer_0_expert_3_*")
    path.unlink()
    with pytest.raises(
        IncompleteError, match=r"layer_0_expert_3_mp_rank_00_model_states\.pt is mis"
    ):
        reshard.inspect(run)


def test_a_run_without_zero_is_refused(copied):
    run, path = copied("stage2", "*zero_pp_rank_0_*optim_states.pt")
    for each in path.parent.glob("*optim_states.pt"):
        each.unlink()
    with pytest.raises(UnsupportedError, match="AutoEP without ZeRO"):
        reshard.inspect(run)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        (
            "ds_autoep_layers",
            lambda layers: layers[0].update(num_local_experts=3),
            CorruptError,
            "4 experts of 'model.layers.0.mlp' on 2 ranks with 3 each",
        ),
        (
            "ds_autoep_layers",
            lambda layers: layers[0].update(num_experts=2 << 40, num_local_experts=1 << 40),
            CorruptError,
            "states 2199023255552 for num_experts",
        ),
        (
            "ds_autoep_layers",
            lambda layers: layers[0]["expert_placement"]["ranks"][0].update(experts=[1, 0]),
            UnsupportedError,
            "in another order",
        ),
        ("ds_autoep_layers", ["model.layers.0.mlp"], CorruptError, "ds_autoep_layers"),
        (
            "ds_config",
            lambda config: config["expert_parallel"].update(expert_w1="gate"),
            UnsupportedError,
            r"a setting for names \(expert_w1\)",
        ),
    ],
)
def test_what_is_not_as_deepspeed_writes_it_is_refused(key, value, error, message, copied):
    run, path = copied("stage2", "*mp_rank_00_model_states.pt")
    edit(path.parent / "mp_rank_00_model_states.pt", key, value)
    with pytest.raises(error, match=message):
        reshard.inspect(run)
