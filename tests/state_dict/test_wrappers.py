"""Wrappers of modules in names: what is one, what only looks like one, and where names stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import reshard
from reshard import formats
from reshard.commands.split.command import split
from reshard.commands.split.options import SplitOptions
from reshard.core.keys import Edits, edit
from reshard.live.names import use_live_names

RUNS = {
    2: Path(__file__).parents[1] / "data/deepspeed_0.8.3/z2_apexadam/run",
    3: Path(__file__).parents[1] / "data/deepspeed_0.14.5/z3_mics_ws4/run",
}


def renamed(run, to, rename, sections):
    """Copy a DeepSpeed run and give its parameters other names in these sections."""
    pytest.importorskip("deepspeed")  # the files hold pickled objects of its classes
    shutil.copytree(run, to)
    for path in to.glob("*/*.pt"):
        states = torch.load(path, weights_only=False)
        held = states.get("optimizer_state_dict") or {}
        for root in (states, held if isinstance(held, dict) else {}):
            for key in sections & root.keys():
                value = root[key] or {}
                if key == "buffer_names":
                    root[key] = [rename(name) for name in value]
                    continue
                if key == "shared_params":
                    root[key] = {rename(alias): rename(kept) for alias, kept in value.items()}
                    continue
                groups = value if isinstance(value, list) else [value]
                made = [{rename(name): item for name, item in group.items()} for group in groups]
                root[key] = made if isinstance(value, list) else made[0]
        torch.save(states, path)
    return to


LISTED = {"param_shapes", "frozen_param_shapes", "frozen_param_fragments", "buffer_names"}
LISTED |= {"shared_params"}


def wrapped_name(name):
    return f"_checkpoint_wrapped_module.{name}"


@pytest.mark.judge
@pytest.mark.parametrize("stage", RUNS)
def test_a_part_under_checkpoint_wrapper_is_one_part(stage, tmp_path):
    """It hides itself from state_dict alone: DeepSpeed lists other names than its module has."""
    run = renamed(RUNS[stage], tmp_path / "run", wrapped_name, LISTED)
    reshard.merge(RUNS[stage], tmp_path / "plain.safetensors")
    reshard.merge(run, tmp_path / "wrapped.safetensors")
    plain, wrapped = (load_file(tmp_path / f"{name}.safetensors") for name in ("plain", "wrapped"))
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(plain[name], wrapped[name]) for name in plain)
    report = split(run, tmp_path / "out", SplitOptions(world_size=3))
    assert report.optimizer_tensors_in == report.optimizer_tensors_out > 0


def test_a_universal_checkpoint_of_such_a_run_is_read_too(tmp_path):
    split(RUNS[2], tmp_path / "plain", SplitOptions(to="ds-universal"))
    run = renamed(tmp_path / "plain", tmp_path / "run", wrapped_name, LISTED)
    for folder in [path for path in run.glob("*/zero/*") if path.is_dir()]:
        folder.rename(folder.with_name(wrapped_name(folder.name)))
    with reshard.open(tmp_path / "plain") as plain, reshard.open(run) as wrapped:
        assert plain.keys() == wrapped.keys()
        assert plain.manifest.train.optimizer_step == wrapped.manifest.train.optimizer_step


@pytest.mark.judge
@pytest.mark.parametrize("stage", RUNS)
def test_a_compiled_run_of_deepspeed_keeps_its_names(stage, tmp_path):
    run = renamed(
        RUNS[stage], tmp_path / "run", lambda name: f"_orig_mod.{name}", LISTED | {"module"}
    )
    split(run, tmp_path / "out", SplitOptions(world_size=3))
    model = next((tmp_path / "out").glob("*/*model_states.pt"))
    assert all(name.startswith("_orig_mod.") for name in torch.load(model)["module"])
    report = split(run, tmp_path / "dcp", SplitOptions(to="dcp"))
    assert any("without wrapper prefixes, e.g. _orig_mod." in text for text in report.derived)
    with reshard.open(tmp_path / "dcp") as checkpoint:
        assert not any("_orig_mod" in name for name in checkpoint)


@pytest.mark.judge
@pytest.mark.parametrize(("version", "is_wrapped"), [("1.7.7", True), ("2.6.0", False)])
def test_lightning_1_wraps_the_model_for_deepspeed_as_for_ddp(version, is_wrapped, tmp_path):
    run = renamed(RUNS[2], tmp_path / "run", lambda name: f"module.{name}", LISTED | {"module"})
    for path in run.glob("*/*model_states.pt"):
        states = torch.load(path, weights_only=False)
        torch.save({**states, "pytorch-lightning_version": version}, path)
    reshard.merge(RUNS[2], tmp_path / "plain.safetensors")
    reshard.merge(run, tmp_path / "wrapped.safetensors")
    plain, found = (load_file(tmp_path / f"{name}.safetensors") for name in ("plain", "wrapped"))
    assert set(found) == {name if is_wrapped else f"module.{name}" for name in plain}


def merged_names(names, tmp_path):
    save_file(
        {name: torch.full((2,), float(at)) for at, name in enumerate(names)},
        tmp_path / "a.safetensors",
    )
    reshard.merge(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    return sorted(load_file(tmp_path / "b.safetensors"))


def test_a_part_that_is_called_module_is_none(tmp_path):
    names = ["b.module.bias", "b.module.weight", "b.norm.weight", "module.weight", "w.weight"]
    assert merged_names(names, tmp_path) == names


def test_ddp_around_a_part_is_one(tmp_path):
    names = ["module.a.module.x", "module.a.module.y", "module.b.z"]
    assert merged_names(names, tmp_path) == ["a.x", "a.y", "b.z"]


@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("parent", ["encoder.layer", "0", "encoder.stages.0.layers.1"])
def test_a_module_inside_of_layers_is_a_part(parent, wrapper, tmp_path):
    """As in LeViT of transformers 5.23, whose residual layers have nothing else."""
    names = [f"{parent}.module.bias", f"{parent}.module.weight"]
    assert merged_names([wrapper + name for name in names], tmp_path) == names


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (["module.a", "module.b"], ["module.a", "module.b"]),
        (["module.a", "module.b"], ["a", "b"]),
        (["a", "b"], ["module.a", "module.b"]),
        (["net.module.a", "net.module.b"], ["_orig_mod.net.module.a", "_orig_mod.net.module.b"]),
        (["module.net.module.a"], ["model.module.net.module.a"]),
        (["module.net.module.a"], ["net.module.a"]),
    ],
)
def test_a_live_model_states_which_module_is_a_part_of_it(stored, live, tmp_path):
    save_file({name: torch.ones(2) for name in stored}, tmp_path / "a.safetensors")
    named, _ = use_live_names(formats.read(tmp_path / "a.safetensors"), live, ())
    names = [entry.fqn for entry in edit(named, Edits()).manifest.entries.values()]
    assert names == [name.removeprefix("_orig_mod.") for name in live]


def test_averaged_weights_have_a_counter_beside(tmp_path):
    assert merged_names(["module.x", "module.y", "n_averaged"], tmp_path) == [
        "n_averaged",
        "x",
        "y",
    ]


def test_what_an_optimizer_keeps_in_python_follows_the_new_names(tmp_path):
    """It stayed under the wrapped name, where nothing looked for it."""
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW([(f"module.{n}", p) for n, p in model.named_parameters()])
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["trust"] = 0.25
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": wrapped, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    split(tmp_path / "a.pt", tmp_path / "out", SplitOptions(to="torch"))
    got = torch.load(tmp_path / "out/checkpoint.pt", weights_only=False)
    assert got["model"].keys() == model.state_dict().keys()
    assert [state["trust"] for state in got["optimizer"]["state"].values()] == [0.25, 0.25]
