"""Checkpoints of libraries that CI does not run: what each wrote, kept in ``tests/data``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.errors import UnsupportedError

DATA = Path(__file__).parents[1] / "data"
WHOLE = ["composer", "olmo_core"]  # their optimizers' states are plain tensors
COMPUTED = ["torchao", "torchao_fsdp2"]  # theirs are of a class that computes them


def truth(library):
    return torch.load(DATA / library / "truth.pt", weights_only=False)


@pytest.mark.parametrize("library", [*WHOLE, *COMPUTED])
def test_weights_are_merged_as_they_were(library, tmp_path):
    reshard.merge(DATA / library / "ckpt", tmp_path / "model.safetensors")
    got, want = load_file(tmp_path / "model.safetensors"), truth(library)["model"]
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("library", WHOLE)
def test_the_optimizer_is_split_for_other_ranks(library, tmp_path):
    reshard.split(DATA / library / "ckpt", tmp_path / "out", to="dcp", world_size=3)
    want = truth(library)["state"]
    with reshard.open(tmp_path / "out") as checkpoint:
        for slot in ("exp_avg", "exp_avg_sq"):
            held = checkpoint.optimizer(slot)
            assert held.keys() == want.keys()
            for name, state in want.items():
                assert torch.equal(held[name][...], state[slot])
        steps = checkpoint.manifest.train.optimizer_step
        assert steps == {name: float(state["step"]) for name, state in want.items()}


def test_composer_links_to_the_last_of_a_run():
    with reshard.open(DATA / "composer" / "ckpt") as checkpoint:
        warnings = checkpoint.manifest.warnings
    assert [note.split()[0] for note in warnings] == ["ep0-ba2", "ep0-ba3"]


def test_olmo_core_keeps_a_learning_rate_in_a_tensor_for_each_parameter():
    with reshard.open(DATA / "olmo_core" / "ckpt") as checkpoint:
        groups = checkpoint.manifest.train.param_groups
    assert [(group.fqns, group.hyper["weight_decay"]) for group in groups] == [
        (("0.bias",), 0.0),
        (("0.weight", "1.weight"), 0.01),
    ]
    assert all(group.hyper["lr"] == torch.tensor(1e-3).item() for group in groups)


@pytest.mark.parametrize("library", COMPUTED)
def test_torchaos_moments_are_reported_and_never_dropped(library, tmp_path):
    source = DATA / library / "ckpt"
    assert not reshard.inspect(source).manifest.frozen
    with pytest.raises(UnsupportedError, match=r"stores 'exp_avg' of '0\.weight' as an object"):
        reshard.split(source, tmp_path / "out", to="dcp", world_size=2)
    assert not (tmp_path / "out").exists()


def test_verl_fsdp1_wrapping_follows_from_its_config(tmp_path):
    """By transformers' own blocks, as verl does by default: no --wrap, and the moments are read."""
    actor = DATA / "verl" / "verl_sample" / "ckpt" / "global_step_3" / "actor"
    with reshard.open(actor) as found, reshard.open(actor, wrap="LlamaDecoderLayer") as told:
        for slot in ("exp_avg", "exp_avg_sq"):
            ours, wanted = found.optimizer(slot), told.optimizer(slot)
            assert ours.keys() == wanted.keys()
            assert len(ours) == 12
            assert all(torch.equal(ours[name][...], wanted[name][...]) for name in wanted)
