"""Scheduler states for another number of steps per update: real schedulers continue."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch.optim import lr_scheduler as torchs

from reshard.containers.pickles.values import Call
from reshard.core.manifest import TrainState
from reshard.training import schedules

UPDATES, SAVED = 12, 4
MADE = {  # lengths in steps of 2 processes
    "steps": lambda o: torchs.StepLR(o, 6),
    "milestones": lambda o: torchs.MultiStepLR(o, [3, 9, 13]),
    "constant": lambda o: torchs.ConstantLR(o, total_iters=9),
    "linear": lambda o: torchs.LinearLR(o, total_iters=20),
    "exponential": lambda o: torchs.ExponentialLR(o, 0.9),
    "polynomial": lambda o: torchs.PolynomialLR(o, total_iters=20),
    "cosine": lambda o: torchs.CosineAnnealingLR(o, 24),
    "restarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 10),
    "cyclic": lambda o: torchs.CyclicLR(o, 0.01, 0.1, step_size_up=6),
    "cycle": lambda o: torchs.OneCycleLR(o, 0.1, total_steps=30),
    "sequence": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, total_iters=4), torchs.CosineAnnealingLR(o, 20)], [4]
    ),
    "chain": lambda o: torchs.ChainedScheduler(
        [torchs.LinearLR(o, total_iters=4), torchs.ExponentialLR(o, 0.95)]
    ),
}


def begun(make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    return optimizer, make(optimizer)


def rates(optimizer, scheduler, processes, updates):
    """Return the learning rate of each update, as Accelerate steps the scheduler."""
    seen = []
    for _ in range(updates):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for _ in range(processes):
            scheduler.step()
    return seen


def as_read(value):
    """Return the state as the reader of a file has it, which keeps a Counter as a description."""
    if isinstance(value, Counter):
        return Call("collections.Counter", (dict(value),))
    return value


def as_loaded(value):
    return Counter(value.args[0]) if isinstance(value, Call) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("processes", [1, 4, 6])
@pytest.mark.parametrize("name", MADE)
def test_a_schedule_continues_at_another_number_of_processes(name, processes):
    optimizer, scheduler = begun(MADE[name])
    rates(optimizer, scheduler, 2, SAVED)
    held = {key: as_read(value) for key, value in scheduler.state_dict().items()}
    groups = [dict(group, params=[]) for group in optimizer.param_groups]
    made = schedules.scale(held, Fraction(processes, 2))
    again, resumed = begun(MADE[name])
    resumed.load_state_dict({key: as_loaded(value) for key, value in made.state.items()})
    for group, was in zip(again.param_groups, groups, strict=True):
        group.update({key: value for key, value in was.items() if key != "params"})
    wanted = rates(optimizer, scheduler, 2, UPDATES - SAVED)
    assert rates(again, resumed, processes, UPDATES - SAVED) == pytest.approx(wanted, rel=1e-9)
    assert len(set(wanted)) > 1 or name == "constant"


def test_a_period_without_a_whole_equivalent_is_told():
    _, scheduler = begun(lambda o: torchs.StepLR(o, 5))
    made = schedules.scale(scheduler.state_dict(), Fraction(3, 2))
    assert made.inexact == ["step_size 5 x 3/2 is not a whole number"]
    assert schedules.scale(scheduler.state_dict(), Fraction(2)).inexact == []


def test_a_patience_without_a_whole_equivalent_is_told():
    """The state has a ``factor`` as ConstantLR's has, whose length ends a phase."""
    _, scheduler = begun(lambda o: torchs.ReduceLROnPlateau(o, patience=5))
    scaled = schedules.scale(scheduler.state_dict(), Fraction(3, 2))
    assert scaled.inexact == ["patience 5 x 3/2 is not a whole number"]


@pytest.mark.parametrize(
    ("processes", "steps", "updates", "told"),
    [(2, 6, 3, 2), (2, 3, 3, 1), (2, 5, 3, None), (1, 3, 3, 1), (4, None, 3, None)],
)
def test_the_optimizer_tells_how_the_scheduler_is_stepped(processes, steps, updates, told):
    train = TrainState(scheduler={"last_epoch": steps}, optimizer_step={"weight": float(updates)})
    assert schedules.count_steps_per_update(train, processes) == told
