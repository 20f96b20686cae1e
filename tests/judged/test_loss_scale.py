"""A converted loss scaler raises its scale at the same step as the original."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.training import loss_scale

WINDOW = 5
MODEL = "tests.judges.library_models:net_frozen"
HISTORY = st.lists(st.booleans(), max_size=30).filter(
    lambda overflows: sum(overflows) < 20  # after 20 DeepSpeed is at its least scale and gives up
)


class Torch:
    """The real ``GradScaler``, of which a step tells only whether it overflowed."""

    def __init__(self, state=None):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=WINDOW)
        if state is not None:
            self.scaler.load_state_dict(state)
        self.scaler.scale(torch.ones(()))  # makes its tensors

    def step(self, *, overflow):
        found = torch.tensor(float(overflow))
        state = self.scaler.state_dict()
        torch._amp_update_scale_(
            self.scaler._scale,
            self.scaler._growth_tracker,
            found,
            state["growth_factor"],
            state["backoff_factor"],
            state["growth_interval"],
        )

    def state(self):
        return self.scaler.state_dict()

    def scale(self):
        return self.scaler.get_scale()


class DeepSpeed:
    """The real ``DynamicLossScaler``."""

    def __init__(self, state=None):
        from deepspeed.runtime.fp16 import loss_scaler

        loss_scaler.dist = SimpleNamespace(get_rank=lambda: 1)  # it logs on rank 0 of a live group
        self.scaler = loss_scaler.DynamicLossScaler(
            2.0**20, WINDOW, 1, 1, consecutive_hysteresis=False
        )
        vars(self.scaler).update(state or {})

    def step(self, *, overflow):
        self.scaler.update_scale(overflow)

    def state(self):
        return {k: v for k, v in vars(self.scaler).items() if k != "dtype"}

    def scale(self):
        return self.scaler.cur_scale


def steps_until_raised(scaler):
    before = scaler.scale()
    for count in range(1, 3 * WINDOW):
        scaler.step(overflow=False)
        if scaler.scale() > before:
            return count, scaler.scale()
    return None


def after(scaler, history):
    for overflow in history:
        scaler.step(overflow=overflow)
    return scaler


@given(HISTORY)
def test_deepspeeds_scaler_continues_in_torch(history):
    before = after(DeepSpeed(), history)
    state = loss_scale.convert_to_torch(before.state())
    assert steps_until_raised(Torch(state)) == steps_until_raised(before)


@given(HISTORY)
def test_torchs_scaler_continues_in_deepspeed(history):
    before = after(Torch(), history)
    state = loss_scale.convert_to_deepspeed(before.state(), len(history))
    assert steps_until_raised(DeepSpeed(state)) == steps_until_raised(before)


@given(HISTORY)
def test_a_round_trip_restores_the_source(history):
    before = after(Torch(), history).state()
    assert (
        loss_scale.convert_to_torch(loss_scale.convert_to_deepspeed(before, len(history))) == before
    )


def test_scalers_without_another_form_are_dropped():
    assert loss_scale.convert_to_torch({"cur_scale": 128.0, "dynamic": False}) is None
    uneven = Torch().state() | {"backoff_factor": 0.25}
    assert loss_scale.convert_to_deepspeed(uneven, 3) is None


@pytest.mark.parametrize("to", ["torch", "dcp", "accelerate"])
def test_the_scaler_is_converted_from_deepspeed(made, to, tmp_path):
    source = made / "z2_fp16_overflow/run"
    with reshard.open(source) as checkpoint:
        held = checkpoint.manifest.train.scaler
    report = reshard.split(source, tmp_path / "out", to=to, world_size=2)
    assert any("GradScaler" in note for note in report.notes)
    with reshard.open(tmp_path / "out") as checkpoint:
        found = checkpoint.manifest.train.scaler
    assert Torch(found).state() == found == loss_scale.convert_to_torch(held)
    assert found["scale"] == held["cur_scale"]


def test_the_scaler_is_converted_to_deepspeed(libraries, tmp_path):
    source = libraries / "acc_single/ckpt"
    with reshard.open(source) as checkpoint:
        held = checkpoint.manifest.train.scaler
    report = reshard.split(
        source, tmp_path / "out", to="deepspeed", zero_stage=2, dtype="fp16", model=MODEL
    )
    assert any("GradScaler" in note for note in report.notes)
    with reshard.open(tmp_path / "out") as checkpoint:
        found = checkpoint.manifest.train.scaler
    assert found["cur_scale"] == held["scale"]
    assert DeepSpeed(found).scale() == held["scale"]


def test_a_run_without_scaling_reports_the_dropped_scaler(libraries, tmp_path):
    source = libraries / "acc_single/ckpt"
    report = reshard.split(
        source, tmp_path / "out", to="deepspeed", zero_stage=2, dtype="bf16", model=MODEL
    )
    assert any("no loss scaler" in note for note in report.notes)
