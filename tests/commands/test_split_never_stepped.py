"""Parameters and whole optimizers that have made no step, written where a state is needed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import reshard
from reshard import formats
from reshard.dcp import StorageReader
from reshard.engine.move.execute import execute
from reshard.engine.move.options import MoveOptions
from reshard.engine.planning.planner import Plan
from reshard.errors import IncompleteError
from reshard.formats.deepspeed import write
from reshard.formats.request import LiveTarget, Request
from reshard.training.state import build_writable_state

WEIGHT, BIAS = "0.weight", "0.bias"
TARGETS = (
    {"to": "ds-universal"},
    {"to": "deepspeed", "zero_stage": 1},
    {"to": "deepspeed", "zero_stage": 3},
)


def save(path, optimizer_of, *, stepped):
    """Save a layer, its optimizer's state by name; only what is in ``stepped`` has a gradient."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    names = [name for name, _ in model.named_parameters()]
    optimizer = optimizer_of(model.parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter) if name in stepped else None
    optimizer.step()
    held = optimizer.state_dict()
    held["state"] = {names[number]: state for number, state in held["state"].items()}
    for group in held["param_groups"]:
        group["params"] = [names[number] for number in group["params"]]
    torch.save({"model": model.state_dict(), "optimizer": held}, path)
    return path


def load_file(root, name):
    (path,) = root.rglob(name)
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("target", TARGETS, ids=["universal", "stage 1", "stage 3"])
def test_a_parameter_that_was_never_stepped_gets_moments_of_zeros(target, tmp_path):
    source = save(tmp_path / "source.pt", torch.optim.AdamW, stepped=(WEIGHT,))
    report = reshard.split(source, tmp_path / "out", world_size=2, **target)
    assert any(f"its state starts at zero: {BIAS}" in note for note in report.notes)
    with reshard.open(tmp_path / "out") as written:
        moments = written.optimizer("exp_avg")
        assert not torch.any(moments[BIAS][...])
        assert torch.all(moments[WEIGHT][...])


def test_groups_of_an_optimizer_without_state_are_not_guessed(tmp_path):
    model = torch.nn.Linear(3, 5)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    held = torch.optim.SGD(groups, lr=0.1).state_dict()
    torch.save({"model": model.state_dict(), "optimizer": held}, tmp_path / "source.pt")
    with pytest.raises(IncompleteError, match="it has none, like SGD without momentum"):
        reshard.split(tmp_path / "source.pt", tmp_path / "out", to="dcp")


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_universal_adam_that_made_no_step_has_the_moments_that_stage_3_loads(amsgrad, tmp_path):
    def adam(parameters):
        return torch.optim.AdamW(parameters, amsgrad=amsgrad)

    source = save(tmp_path / "source.pt", adam, stepped=())
    report = reshard.split(source, tmp_path / "out", to="ds-universal")
    assert any("the Adam has made no step" in note for note in report.notes)
    for slot in ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad):
        value = load_file(tmp_path / "out" / "global_step0_universal" / "zero" / BIAS, f"{slot}.pt")
        assert torch.equal(value["param"], torch.zeros(5))
    held = load_file(tmp_path / "out", "optimizer_state.pt")["optimizer_state_dict"]
    assert held["state"][0]["step"] == 0
    assert held["param_groups"][0]["lr"] == 1e-3


def test_a_sub_group_that_was_never_stepped_has_the_scalars_of_its_group(tmp_path):
    """As an engine at stage 3 with small sub-groups loads it: NAdam fails without mu_product."""
    source = save(tmp_path / "source.pt", torch.optim.NAdam, stepped=(WEIGHT,))
    manifest = formats.read(source)
    config = {"zero_optimization": {"stage": 3, "sub_group_size": 1}}
    state = build_writable_state(manifest)
    request = Request(world_size=2, zero_stage=3, live=LiveTarget(config=config))
    skeleton = write.lay_out(state, request).skeleton
    (tmp_path / "out").mkdir()
    execute(Plan(manifest.entries, skeleton), manifest.files, tmp_path / "out", MoveOptions())
    with reshard.open(tmp_path / "out") as written:
        products = written.optimizer("mu_product")
        assert products[BIAS][...] == products[WEIGHT][...]
        assert 0 < products[BIAS][...] < 1


def test_other_optimizers_that_made_no_step_keep_no_state(tmp_path):
    source = save(tmp_path / "source.pt", torch.optim.NAdam, stepped=())
    report = reshard.split(source, tmp_path / "out", to="ds-universal")
    assert any("write --to deepspeed --zero-stage 3" in note for note in report.notes)
    assert not list(tmp_path.rglob("exp_avg.pt"))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_torch_gets_the_states_that_it_refuses_to_load_a_checkpoint_without(kind, tmp_path):
    """It refuses what it has saved itself, if a parameter was never stepped."""
    source = save(tmp_path / "source.pt", torch.optim.AdamW, stepped=(WEIGHT,))
    report = reshard.split(source, tmp_path / "out", to="fsdp", state_dict_type=kind, world_size=2)
    assert any(f"Adam has no state of {BIAS}" in note for note in report.derived)
    assert any("exp_avg" in kept for kept in report.kept)
    with reshard.open(tmp_path / "out") as written:
        assert not torch.any(written.optimizer("exp_avg_sq")[BIAS][...])
        assert written.manifest.train.optimizer_step == {WEIGHT: 1.0, BIAS: 0.0}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("stepped", [(WEIGHT,), ()], ids=["some", "none"])
def test_torch_continues_from_it(stepped, is_live, tmp_path):
    source = save(tmp_path / "source.pt", torch.optim.AdamW, stepped=stepped)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    state["optim"]["state"][BIAS]["exp_avg"].fill_(7.0)
    if is_live:
        dcp.load(state, storage_reader=StorageReader(source))
    else:
        reshard.split(source, tmp_path / "out", to="dcp")
        dcp.load(state, checkpoint_id=tmp_path / "out")
    set_optimizer_state_dict(model, optimizer, state["optim"])
    held = {name: optimizer.state[p] for name, p in model.named_parameters()}
    for name, each in held.items():
        assert float(each["step"]) == (name in stepped)
        assert torch.all((each["exp_avg"] != 0) == (name in stepped))


def test_a_frozen_base_model_gets_no_states(tmp_path):
    """Its parameters are in the param groups of some scripts that train an adapter."""
    source = save(tmp_path / "source.pt", torch.optim.AdamW, stepped=(BIAS,))
    report = reshard.split(source, tmp_path / "out", to="dcp")
    assert not any("Adam has no state" in note for note in report.derived)
    with reshard.open(tmp_path / "out") as written:
        assert set(written.optimizer("exp_avg")) == {BIAS}
