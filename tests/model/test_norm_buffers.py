"""Buffers of batch norms, which a plain state dict does not tell from parameters."""

from __future__ import annotations

import pytest
import torch

import reshard
from reshard.errors import IncompleteError


class Model(torch.nn.Module):
    """Its buffers and its parameters have the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Linear(6, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.head = torch.nn.Linear(5, 5)

    def forward(self, inputs):
        """Return the outputs."""
        return self.head(self.norm(self.rows(inputs)))


def train(model, optimizer, steps=2):
    for step in range(steps):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def save(path, groups=lambda model: model.parameters()):
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model, optimizer


def divide(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("groups", [lambda model: model.parameters(), divide])
def test_an_optimizer_by_index_gets_the_names_of_a_model_with_batch_norm(groups, tmp_path):
    model, optimizer = save(tmp_path / "source.pt", groups)
    report = reshard.split(tmp_path / "source.pt", tmp_path / "out.pt", to="torch")
    assert not report.warnings
    with reshard.open(tmp_path / "source.pt") as source:
        kinds = {entry.fqn for entry in source.manifest.of_kind("buffer")}
        assert kinds == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
        names = {p: name for name, p in model.named_parameters()}
        for slot in ("exp_avg", "exp_avg_sq"):
            moments = source.optimizer(slot)
            for param, state in optimizer.state.items():
                assert torch.equal(moments[names[param]][...], state[slot])
    other = Model()
    other_optimizer = torch.optim.AdamW(groups(other), lr=1e-2)
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    other.load_state_dict(written["model"])
    other_optimizer.load_state_dict(written["optimizer"])
    train(model, optimizer)
    train(other, other_optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_other_buffers_are_still_asked_for(tmp_path):
    """That the buffers of a batch norm are known does not make every other tensor a parameter."""
    model, optimizer = save(tmp_path / "source.pt", lambda model: list(model.named_parameters()))
    weights = {**model.state_dict(), "scale": torch.ones(5)}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "source.pt")
    with pytest.raises(IncompleteError, match="'scale' is a parameter or a buffer"):
        reshard.split(tmp_path / "source.pt", tmp_path / "out", to="fsdp2", world_size=2)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_averaged_statistics_are_named(suffix, tmp_path):
    """A safetensors file does not tell them from parameters."""
    for number in range(2):
        save(tmp_path / f"{number}.pt", divide if number else Model.parameters)
        reshard.merge(tmp_path / f"{number}.pt", tmp_path / f"{number}.safetensors")
    sources = [tmp_path / f"{number}.{suffix}" for number in range(2)]
    report = reshard.average(sources, tmp_path / "mean.safetensors")
    assert any("averaged: norm.running_mean" in note for note in report.warnings), report
