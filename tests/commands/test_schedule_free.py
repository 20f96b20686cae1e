"""Merges of runs with schedule-free optimizers, compared with the package's own ``eval()``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import reshard
from reshard.errors import IncompleteError

schedulefree = pytest.importorskip("schedulefree")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

KINDS = {
    "adamw": lambda groups: schedulefree.AdamWScheduleFree(groups, lr=0.05, weight_decay=0.1),
    "betas": lambda groups: schedulefree.AdamWScheduleFree(groups, lr=0.05, betas=(0.6, 0.9)),
    "radam": lambda groups: schedulefree.RAdamScheduleFree(groups, lr=0.05),
    "sgd": lambda groups: schedulefree.SGDScheduleFree(groups, lr=0.05, momentum=0.8),
    "reference": lambda groups: schedulefree.AdamWScheduleFreeReference(groups, lr=0.05),
}


class Tied(nn.Module):
    """A head that is tied to the embedding, and a layer that no gradient reaches."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6, dtype=dtype)
        self.body = nn.Linear(6, 6, dtype=dtype)
        self.unused = nn.Linear(6, 5, dtype=dtype)
        self.head = nn.Linear(6, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def train(kind, dtype=torch.float32, steps=8):  # RAdam changes nothing at first
    model = Tied(dtype)
    optimizer = KINDS[kind](model.parameters())
    optimizer.train()
    for step in range(steps):
        model(torch.arange(11) + 0).pow(2).mean().add(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(model, optimizer, path, form):
    """Save in train mode, and return what eval() makes of the weights."""
    if form == "dcp":
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=path)
    else:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    optimizer.eval()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("form", ["file", "dcp"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_merge_writes_the_averaged_weights(tmp_path, kind, form, dtype):
    model, optimizer = train(kind, dtype)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    averaged = save(model, optimizer, tmp_path / "a.pt", form)
    report = reshard.merge(tmp_path / "a.pt", tmp_path / "x.safetensors", tied="keep")
    assert any("averages x of the schedule-free optimizer" in text for text in report.changes)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == averaged.keys()
    assert not torch.equal(averaged["body.weight"], trained["body.weight"])
    for name, value in averaged.items():
        assert torch.equal(found[name], value), name
    stored = tmp_path / "y.safetensors"
    report = reshard.merge(tmp_path / "a.pt", stored, tied="keep", schedule_free="y")
    assert any("as stored" in text for text in report.changes)
    assert all(torch.equal(value, trained[name]) for name, value in load_file(stored).items())


def test_a_run_saved_in_eval_mode_is_written_as_it_is(tmp_path):
    model, optimizer = train("adamw")
    optimizer.eval()
    averaged = save(model, optimizer, tmp_path / "a.pt", "file")
    report = reshard.merge(tmp_path / "a.pt", tmp_path / "x.safetensors")
    assert not any("schedule-free" in text for text in report.changes)
    assert torch.equal(
        load_file(tmp_path / "x.safetensors")["body.weight"], averaged["body.weight"]
    )


def test_an_average_is_that_of_the_averaged_weights(tmp_path):
    averaged = []
    for number in (4, 8):
        model, optimizer = train("adamw", steps=number)
        averaged.append(save(model, optimizer, tmp_path / f"{number}.pt", "file")["body.weight"])
    reshard.average([tmp_path / "4.pt", tmp_path / "8.pt"], tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")["body.weight"]
    assert torch.equal(found, (averaged[0].double() + averaged[1].double()).div(2).float())


def build_twins():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_weights_without_the_names_of_their_optimizer_are_refused(tmp_path):
    """Accelerate's safetensors do not keep the order of the model."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = build_twins()
    model, optimizer = accelerator.prepare(model, KINDS["adamw"](model.parameters()))
    optimizer.train()
    for _ in range(3):
        model(torch.ones(1, 4)).pow(2).mean().backward()
        optimizer.step()
    accelerator.save_state(str(tmp_path / "a"))
    with pytest.raises(
        IncompleteError, match=r"(?s)schedule-free optimizer in train mode.*--model"
    ):
        reshard.merge(tmp_path / "a", tmp_path / "x.safetensors")
    reshard.merge(tmp_path / "a", tmp_path / "x.safetensors", model=f"{__name__}:build_twins")
    optimizer.eval()
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
