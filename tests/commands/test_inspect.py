"""What inspect says, on the checkpoint of real DeepSpeed that the examples ship."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import reshard

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llama-zero3-4ranks"


@pytest.fixture(scope="module")
def document():
    return reshard.inspect(EXAMPLE, tensors=True).to_dict()


def test_it_says_who_wrote_what(document):
    assert document["format"] == "deepspeed"
    assert document["detail"] == "ZeRO stage 3"
    assert document["versions"] == {"deepspeed": "0.19.8"}
    assert document["mesh"] == {"world": 4, "dp": 4}
    assert (document["step"], document["precision"]) == (4, "bfloat16")


def test_it_counts_parameters_once(document):
    wanted = sum(
        tensor.numel()
        for tensor in torch.nn.ModuleList(
            [
                torch.nn.Embedding(211, 32),
                *(
                    torch.nn.Linear(*dims, bias=False)
                    for dims in 2 * [(32, 32), (32, 16), (32, 16), (32, 32), (32, 64), (32, 64)]
                ),
                *(torch.nn.Linear(64, 32, bias=False) for _ in range(2)),
                *(torch.nn.RMSNorm(32) for _ in range(5)),
            ]
        ).parameters()
    )
    assert document["parameters"] == wanted


def test_it_lists_kinds_with_bytes(document):
    assert set(document["kinds"]) == {"master", "exp_avg", "exp_avg_sq"}
    assert document["kinds"]["master"]["bytes"] == 4 * document["parameters"]
    assert document["disk_bytes"] > document["logical_bytes"]


def test_it_names_tied_weights_and_the_optimizer(document):
    assert document["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert document["optimizer"] is True
    assert document["scheduler"] == {"last_batch_iteration": 3}
    assert document["client"] == {"epoch": 0}
    assert document["complete"] is True


def test_json_is_one_document():
    command = [sys.executable, "-m", "reshard", "inspect", str(EXAMPLE), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["schema"] == 1
    assert done.stderr == ""


def test_repeated_layers_are_folded():
    text = "\n".join(reshard.inspect(EXAMPLE, tensors=True).lines())
    assert "model.layers.{0-1}.self_attn.q_proj.weight" in text
    assert text.count("q_proj") == 1


def test_layers_with_gaps_are_not_folded_into_a_range(tmp_path):
    save_file({f"h.{i}.w": torch.ones(2) for i in (0, 1, 3)}, tmp_path / "x.safetensors")
    text = "\n".join(reshard.inspect(tmp_path / "x.safetensors", tensors=True).lines())
    assert "h.{0,1,3}.w" in text


def test_numbers_far_apart_cost_nothing_and_long_ones_are_no_index(tmp_path):
    names = ("h.0.w", "h.999999999.w", f"k.{'1' * 5000}.w", f"k.{'2' * 5000}.w")
    save_file({name: torch.ones(2) for name in names}, tmp_path / "x.safetensors")
    text = "\n".join(reshard.inspect(tmp_path / "x.safetensors", tensors=True).lines())
    assert "h.{0,999999999}.w" in text


def test_layers_of_different_shapes_are_listed_apart(tmp_path):
    save_file({"h.0.w": torch.ones(2), "h.1.w": torch.ones(3)}, tmp_path / "x.safetensors")
    text = "\n".join(reshard.inspect(tmp_path / "x.safetensors", tensors=True).lines())
    assert "h.0.w" in text
    assert "h.1.w" in text


def test_a_parameter_without_state_is_not_called_frozen(tmp_path):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("used", "idle")})
    optimizer = torch.optim.AdamW(model.named_parameters())
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
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
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "x.pt")
    lines = list(reshard.inspect(tmp_path / "x.pt").lines())
    assert "  momentum_buffer 2 tensors, 12 B (float32)" in lines
    assert len({line[17] == " " and line[18] != " " for line in lines[1:]}) == 1


def test_an_optimizer_that_is_left_out_is_not_denied(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    held = optimizer.state_dict()
    for state in held["state"].values():  # as an optimizer that packs its moments
        state["exp_avg"] = {"codes": torch.zeros(8, dtype=torch.uint8)}
        del state["exp_avg_sq"]
    torch.save({"model": model.state_dict(), "optimizer": held}, tmp_path / "x.pt")
    inspection = reshard.inspect(tmp_path / "x.pt")
    assert "  optimizer   stored, but left out" in inspection.lines()
    assert not inspection.to_dict()["optimizer"]
    assert any("left out" in warning for warning in inspection.to_dict()["warnings"])


def test_one_tensor_is_in_the_singular(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    text = str(reshard.inspect(tmp_path / "x.safetensors"))
    assert "2 in 1 tensor\n" in text
    assert "1 tensors" not in text


def test_a_long_train_state_ends_with_the_number_of_values_that_are_not_shown(tmp_path):
    scheduler = {"base_lrs": [0.1] * 4, "last_epoch": 4} | {f"a_long_name_{n}": n for n in range(9)}
    model = torch.nn.Linear(2, 2)
    state = {"model": model.state_dict(), "scheduler": scheduler, "epoch": 1}
    torch.save(state, tmp_path / "state.pt")
    (line,) = [x for x in reshard.inspect(tmp_path / "state.pt").lines() if "base_lrs" in x]
    assert line.endswith(", ... 6 more")
