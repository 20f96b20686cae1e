"""The line of a report that says how to load what was written: it does so."""

from __future__ import annotations

from pathlib import Path

import pytest

import reshard
from reshard.commands.merge import upload

LLAMA = Path(__file__).resolve().parents[2] / "examples" / "llama-zero3-4ranks"
NORM = "model.norm.weight"


def load(report):
    """Run the last line of a report as a script would."""
    import safetensors.torch
    import torch

    *_, last = report.lines()
    assert last.split(maxsplit=2) == ["load", "it", report.load_line]
    return eval(report.load_line, {"reshard": reshard, "safetensors": safetensors, "torch": torch})


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_merged_file(name, tmp_path):
    import torch

    state = load(reshard.merge(LLAMA, tmp_path / name, dtype="fp32"))
    with reshard.open(LLAMA) as checkpoint:
        assert torch.equal(state[NORM], checkpoint[NORM][...])


def test_weights_beside_those_of_the_model(tmp_path):
    # transformers would leave out the value head of TRL.
    from safetensors.torch import load_file, save_file

    reshard.merge(LLAMA, tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    state = load_file(path)
    save_file({**state, "v_head.summary.weight": state[NORM].clone()}, path)
    assert "v_head.summary.weight" in load(reshard.merge(tmp_path / "run", tmp_path / "out"))


@pytest.mark.parametrize("name", ["state.pt", "folder"])
def test_a_converted_file(name, tmp_path):
    state = load(reshard.split(LLAMA, tmp_path / name, to="torch"))
    assert state


@pytest.mark.parametrize(
    ("stage", "options"), [(1, ""), (3, ", load_optimizer_states=False")], ids=["1", "3"]
)
def test_weights_alone_are_loaded_without_an_optimizer(stage, options, tmp_path):
    report = reshard.split(LLAMA, tmp_path / "out", zero_stage=stage, weights_only=True)
    call = f'engine.load_checkpoint("{tmp_path}/out", load_module_only=True{options})'
    assert report.load_line == call


def test_a_dry_run_shows_no_line(tmp_path):
    report = reshard.merge(LLAMA, tmp_path / "model.safetensors", dry_run=True)
    assert not any(line.startswith("load it") for line in report.lines())


@pytest.mark.parametrize(("branch", "revision"), [("", ""), ("@dev", ', revision="dev"')])
def test_an_upload_has_the_line_that_loads_from_the_hub(branch, revision, monkeypatch):
    monkeypatch.setattr(upload, "_commit", lambda *_args, **_options: None)
    report = reshard.merge(LLAMA, f"hf://org/name{branch}")
    assert report.destination == f"hf://org/name{branch}"
    expected = f'transformers.AutoModelForCausalLM.from_pretrained("org/name"{revision})'
    *_, timing, last = report.lines()
    assert last.split(maxsplit=2) == ["load", "it", expected]
    assert timing.endswith("; not read back")


def test_output_that_was_not_read_back_names_the_option(tmp_path):
    report = reshard.merge(LLAMA, tmp_path / "model.safetensors", verify=False)
    assert any(line.endswith("; not read back (--no-verify)") for line in report.lines())
