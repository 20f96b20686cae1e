"""`reshard.lightning.open_checkpoint`: real Lightning goes on from any checkpoint, at any size.

Every run has the same model, schedule and global batches, also those of DeepSpeed's engine and of
Accelerate, so what resumes must have the state of the save, bitwise, and the losses of an unbroken
run.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import reshard.lightning
from reshard import formats
from reshard.errors import DifferentError, UnsupportedError
from reshard.live.dcp.live_objects import fill_model_state, load_model, load_optimizer
from tests.judges import server

pytest.importorskip("lightning")
pytestmark = pytest.mark.slow

LIGHTNING = server.Judge("tests.judges.lightning_worker", "Lightning", {}, like=server.DEEPSPEED)
ACCELERATE = server.Judge("tests.judges.accelerate_worker", "Accelerate", {}, like=server.DEEPSPEED)
SAVED, STEPS, RATE = 3, 5, 1e-2  # as in `accelerate_worker`
NOISE = 1e-6  # absolute, of losses of about 4.6: another order of summing gradients
ONE_PROCESS = "ignore:torch.distributed is disabled"  # says torch
STRATEGIES = {
    "one": {"strategy": "auto"},
    "ddp": {"strategy": "ddp"},
    "fsdp_full": {"strategy": "fsdp", "type": "full"},
    "fsdp_sharded": {"strategy": "fsdp", "type": "sharded"},
    "fsdp2": {"strategy": "model_parallel", "dcp": True},
    "z1": {"strategy": "deepspeed", "stage": 1},
    "z2": {"strategy": "deepspeed", "stage": 2},
    "z3": {"strategy": "deepspeed", "stage": 3},
}
SAVES = ("ddp", "fsdp_full", "fsdp_sharded", "fsdp2", "z2")
ENGINE, ACCELERATED = "engine", "accelerate"  # which save without Lightning
PLAIN = "plain"  # an engine whose script has no schedule
ODD = "odd"  # saved by a DDP run of `lightning_worker.OddModule`
RESUMED_ODD = (("one", 1), ("ddp", 4), ("fsdp2", 2), ("fsdp_full", 1), ("fsdp_sharded", 4))
RESUMED = (  # what saved, what resumes, at how many ranks
    ("ddp", "fsdp2", 4),
    ("fsdp_full", "fsdp_sharded", 4),  # where a rank has no part of some parameters
    ("fsdp_sharded", "fsdp_full", 1),
    ("fsdp2", "z3", 2),
    ("fsdp2", "ddp", 4),
    ("z2", "one", 1),
    ("z2", "z3", 4),
    (ENGINE, "fsdp2", 4),
    (ENGINE, "z3", 1),
    (PLAIN, "fsdp_full", 2),
    (PLAIN, "z2", 1),
    (ACCELERATED, "ddp", 4),
    (ACCELERATED, "z1", 1),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the path of each save, and what its run held and lost."""
    place = tmp_path_factory.mktemp("saved")
    jobs = {name: (2, STRATEGIES[name]) for name in SAVES}
    jobs[ODD] = (2, {**STRATEGIES["ddp"], "odd": True})
    jobs[ENGINE] = (2, {"engine": True, "stage": 1, "schedule": True})
    jobs[PLAIN] = (2, {"engine": True, "stage": 3, "schedule": False})
    found = LIGHTNING.run(place, jobs)
    found |= ACCELERATE.run(place, {ACCELERATED: (2, {"version": 2, "type": "SHARDED"})})
    for name, seen in found.items():
        assert isinstance(seen, dict), (name, seen)
    names = dict.fromkeys(found, "saved.ckpt") | {ACCELERATED: "saved"}
    return {name: (place / name / names[name], seen) for name, seen in found.items()}


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory):
    """Return what each run held after it had resumed, and lost next."""
    jobs = {
        f"{source}-{name}-{ranks}": (
            ranks,
            {**STRATEGIES[name], "resume": saved[source][0], "live": {}},
        )
        for source, name, ranks in RESUMED
    }
    odd = {"odd": True, "resume": saved[ODD][0], "live": {}}
    jobs |= {f"{ODD}-{name}": (ranks, {**STRATEGIES[name], **odd}) for name, ranks in RESUMED_ODD}
    return LIGHTNING.run(tmp_path_factory.mktemp("resumed"), jobs)


@pytest.mark.parametrize(("source", "name", "ranks"), RESUMED)
def test_the_trainer_continues(source, name, ranks, saved, resumed):
    got, wanted = resumed[f"{source}-{name}-{ranks}"], saved[source][1]
    assert isinstance(got, dict), got
    assert got["losses"] == pytest.approx(wanted["losses"][SAVED:], abs=NOISE)
    assert (got["step"], got["last_epoch"], got["epoch"]) == (SAVED, SAVED, 0)
    assert set(got["steps"].values()) == {SAVED}
    if source == ACCELERATED:  # its worker keeps no tensors
        return
    # Without a state of the schedule, the source's rate is that of the next update.
    assert got["lr"] == (RATE if source == PLAIN else saved["ddp"][1]["lr"])
    for part in ("params", "buffers"):
        assert_same(got[part], name_in_module(wanted.get(part, {})))
    moments = name_in_module(wanted["optimizer"])
    assert moments
    for fqn, slots in moments.items():
        assert_same(got["optimizer"][fqn], slots)


@pytest.mark.parametrize(("source", "name", "ranks"), RESUMED)
def test_callbacks_and_hooks_get_their_values_from_lightning_alone(source, name, ranks, resumed):
    got, steps = resumed[f"{source}-{name}-{ranks}"], STEPS - SAVED
    is_own = source not in (ENGINE, PLAIN, ACCELERATED)
    assert got["own"] == ({"tokens": 96} if is_own else {})
    assert got["count"] == steps + (SAVED if is_own else 0)


@pytest.mark.parametrize(("name", "ranks"), RESUMED_ODD)
def test_the_live_param_groups_tell_which_numbers_are_whose(name, ranks, saved, resumed):
    got, wanted = resumed[f"{ODD}-{name}"], saved[ODD][1]
    assert isinstance(got, dict), got
    assert got["losses"] == pytest.approx(wanted["losses"][SAVED:], abs=NOISE)
    assert (got["rates"], got["idle"]) == (wanted["rates"], ["idle.weight"])


def name_in_module(tensors):
    """Return the names in a LightningModule, whose attribute ``model`` is the model."""
    return {f"model.{fqn.removeprefix('model.')}": value for fqn, value in tensors.items()}


def assert_same(got, wanted):
    for fqn, value in wanted.items():
        assert torch.equal(got[fqn], value), fqn


def test_lists_in_the_state_dict_are_refused_by_name(tmp_path):
    """As a metric of torchmetrics has that keeps every batch: their lengths belong to a run."""
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    state = {"w": torch.zeros(2), "auc.value": [torch.zeros(3)]}
    manifest = formats.read(tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedError, match=r"has lists in its state dict.*'auc\.value'"):
        fill_model_state(state, manifest)


@pytest.mark.filterwarnings(ONE_PROCESS)
def test_a_module_without_a_stored_weight_is_refused_unless_it_is_not_strict(tmp_path):
    save_file({"weight": torch.ones(1, 2), "more.weight": torch.ones(2)}, tmp_path / "m")
    module, manifest = torch.nn.Linear(2, 1, bias=False), formats.read(tmp_path / "m")
    with pytest.raises(DifferentError, match=r"has 'more\.weight'") as told:
        load_model(module, manifest, strict=True)
    assert "strict_loading" in told.value.remedy
    load_model(module, manifest, strict=False)
    assert module.weight.tolist() == [[1, 1]]


@pytest.mark.filterwarnings(ONE_PROCESS)
def test_a_live_group_keeps_what_differs_in_the_source(tmp_path):
    model = torch.nn.Linear(2, 1)
    groups = [{"params": [each], "lr": each.numel() / 10} for each in model.parameters()]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "saved.pt")
    live = torch.optim.AdamW(model.parameters(), lr=0.5)
    (warning,) = load_optimizer(model, live, formats.read(tmp_path / "saved.pt"))
    assert "several values of lr in the source: the group keeps its own, 0.5" in warning
    for parameter in model.parameters():
        assert torch.equal(live.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_a_scheduler_of_another_form_starts_at_its_beginning(caplog):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    stored = parts[0].state_dict()
    live = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [1])
    config = SimpleNamespace(scheduler=live, interval="step", frequency=1)
    trainer = SimpleNamespace(lr_scheduler_configs=[config], is_global_zero=True)
    checkpoint = {"lr_schedulers": [stored], "global_step": 3}
    reshard.lightning._set_schedulers(trainer, checkpoint)
    assert caplog.messages[0].endswith("its SequentialLR starts at its beginning")
    live.load_state_dict(checkpoint["lr_schedulers"][0])
