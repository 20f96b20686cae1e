"""What inspect says, on the checkpoint of real DeepSpeed that the examples ship."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import reshard

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llama-zero3-4ranks"


@pytest.fixture(scope="module")
def document():
    return reshard.inspect(EXAMPLE, tensors=True).to_dict()


def test_it_says_what_the_checkpoint_has(document):
    wanted = {
        "format": "deepspeed",
        "detail": "ZeRO stage 3",
        "versions": {"deepspeed": "0.19.8"},
        "mesh": {"world": 4, "dp": 4},
        "step": 4,
        "precision": "bfloat16",
        "parameters": 25_344,  # of transformers' model
        "tied": {"lm_head.weight": "model.embed_tokens.weight"},
        "optimizer": True,
        "scheduler": {"last_batch_iteration": 3},
        "client": {"epoch": 0},
        "complete": True,
    }
    assert {key: document[key] for key in wanted} == wanted
    assert set(document["kinds"]) == {"master", "exp_avg", "exp_avg_sq"}
    assert document["kinds"]["master"]["bytes"] == 4 * document["parameters"]
    assert document["disk_bytes"] > document["logical_bytes"]


def test_repeated_layers_are_folded():
    text = "\n".join(reshard.inspect(EXAMPLE, tensors=True).lines())
    assert "model.layers.{0-1}.self_attn.q_proj.weight" in text
    assert text.count("q_proj") == 1


@pytest.mark.parametrize(
    ("shapes", "listed"),
    [
        ({f"h.{n}.w": 2 for n in (0, 1, 3)}, ["h.{0,1,3}.w"]),
        # Numbers far apart cost nothing, and long ones are no index.
        (
            {"h.0.w": 2, "h.999999999.w": 2, f"k.{'1' * 5000}.w": 2, f"k.{'2' * 5000}.w": 2},
            ["h.{0,999999999}.w"],
        ),
        ({"h.0.w": 2, "h.1.w": 3}, ["h.0.w", "h.1.w"]),
        ({"w": 2}, ["2 in 1 tensor\n"]),
    ],
    ids=["gaps", "far apart", "other shapes", "one"],
)
def test_layers_are_folded_where_they_are_alike(shapes, listed, tmp_path):
    state = {name: torch.ones(size) for name, size in shapes.items()}
    save_file(state, tmp_path / "x.safetensors")
    text = str(reshard.inspect(tmp_path / "x.safetensors", tensors=True))
    assert [name for name in listed if name not in text] == []


def train(optimizer_of, **layers):
    """Return a state of these layers, of which the first was trained for a step."""
    model = torch.nn.ModuleDict(layers)
    optimizer = optimizer_of(model.named_parameters())
    for parameter in next(iter(layers.values())).parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_a_parameter_without_state_is_not_called_frozen(tmp_path):
    state = train(torch.optim.AdamW, used=torch.nn.Linear(2, 2), idle=torch.nn.Linear(2, 2))
    torch.save(state, tmp_path / "state.pt")
    inspection = reshard.inspect(tmp_path / "state.pt")
    assert inspection.never_updated == ["idle.bias", "idle.weight"]
    assert not inspection.frozen
    assert "frozen      " not in "\n".join(inspection.lines())


class Config:
    """A class of the user's own."""


def test_unknown_classes_are_listed(tmp_path):
    torch.save({"w": torch.ones(2), "mine": Config()}, tmp_path / "x.pt")
    found = reshard.inspect(tmp_path / "x.pt")
    assert found.to_dict()["unknown_globals"] == [f"{Config.__module__}.Config"]
    assert "no known framework writes" in "\n".join(found.lines())


def test_a_long_label_widens_the_column(tmp_path):
    """The first column was 11 letters wide, so ``momentum_buffer`` moved its text."""
    state = train(partial(torch.optim.SGD, lr=0.1, momentum=0.9), a=torch.nn.Linear(2, 1))
    torch.save(state, tmp_path / "x.pt")
    lines = list(reshard.inspect(tmp_path / "x.pt").lines())
    assert "  momentum_buffer 2 tensors, 12 B (float32)" in lines
    assert len({line[17] == " " and line[18] != " " for line in lines[1:]}) == 1


def test_an_optimizer_that_is_left_out_is_not_denied(tmp_path):
    saved = train(torch.optim.Adam, a=torch.nn.Linear(4, 4))
    for state in saved["optimizer"]["state"].values():  # as an optimizer that packs its moments
        state["exp_avg"] = {"codes": torch.zeros(8, dtype=torch.uint8)}
        del state["exp_avg_sq"]
    torch.save(saved, tmp_path / "x.pt")
    inspection = reshard.inspect(tmp_path / "x.pt")
    assert "  optimizer   stored, but left out" in inspection.lines()
    assert not inspection.to_dict()["optimizer"]
    assert any("left out" in warning for warning in inspection.to_dict()["warnings"])


def test_a_long_train_state_ends_with_the_number_of_values_that_are_not_shown(tmp_path):
    scheduler = {"base_lrs": [0.1] * 4, "last_epoch": 4} | {f"a_long_name_{n}": n for n in range(9)}
    model = torch.nn.Linear(2, 2)
    state = {"model": model.state_dict(), "scheduler": scheduler, "epoch": 1}
    torch.save(state, tmp_path / "state.pt")
    (line,) = [x for x in reshard.inspect(tmp_path / "state.pt").lines() if "base_lrs" in x]
    assert line.endswith(", ... 6 more")
