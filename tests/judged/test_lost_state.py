"""State of an optimizer that is gone in all ranks, and settings and values that none can have."""

from __future__ import annotations

import math

import pytest
import torch

import reshard
from reshard.dcp import StorageReader
from reshard.errors import CorruptError, IncompleteError, ReshardError

OPTIM = "*optim_states.pt"


def find_adam(root):
    """Return torch's part of a file of DeepSpeed's, or of a script."""
    held = root.get("optimizer_state_dict", root.get("optimizer", root))
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        held = held.get(key, held)
    return held


def drop_slot(name):
    def edit(held):
        for slots in held["state"].values():
            slots.pop(name)

    return edit


def keep_step(held):
    held["state"] = {key: {"step": slots["step"]} for key, slots in held["state"].items()}


def set_hyper(name, value):
    return lambda held: held["param_groups"][0].update({name: value})


def count_to_infinity(held):
    for slots in held["state"].values():
        slots["step"] = torch.tensor(math.inf)


def negate(held):
    for slots in held["state"].values():
        slots["exp_avg_sq"].neg_().sub_(1e-6)


DAMAGES = {
    "a sub-group": ("z3_subgroups", lambda held: held["state"].pop(1), "no state of .* but of"),
    "a group": ("z2_groups_decay", lambda held: held["state"].pop(1), "no state of .* but of"),
    "all of stage 3": ("z3_bf16", lambda held: held["state"].clear(), "after 3 updates"),
    "all of stage 2": ("z2_bf16", lambda held: held["state"].clear(), "after 3 updates"),
    "all of stage 0": ("z0_fp32", lambda held: held["state"].clear(), "after 3 updates"),
    "all but steps": ("z3_fp32", keep_step, "no state of .* but its number of updates"),
    "a moment of stage 3": ("z3_fp32", drop_slot("exp_avg"), "no exp_avg of"),
    "a moment of stage 1": ("z1_fp32", drop_slot("exp_avg_sq"), "no exp_avg_sq of"),
    "a moment of stage 0": ("z0_fp32", drop_slot("exp_avg"), "no exp_avg of"),
    "a beta": ("z2_fp32", set_hyper("betas", (1.9, 0.999)), "betas of param group 0 is .1.9"),
    "a rate": ("z3_fp32", set_hyper("lr", math.nan), "lr of param group 0 is nan"),
    "a count": ("z1_fp32", count_to_infinity, "step of .* is inf"),
    "squares": ("z1_fp32", negate, "exp_avg_sq of .* is below zero"),
}
READERS = [
    lambda path, out: reshard.split(path, out, world_size=2),
    lambda path, out: reshard.split(path, out, to="dcp"),
    lambda path, _out: StorageReader(path),
]


@pytest.mark.parametrize(("case", "edit", "said"), DAMAGES.values(), ids=DAMAGES)
def test_it_is_refused(copied, tmp_path, case, edit, said):
    run = copied(case)
    pattern = "mp_rank_00_model_states.pt" if "z0" in case else OPTIM
    for path in run.rglob(pattern):
        root = torch.load(path, weights_only=False)
        edit(find_adam(root))
        torch.save(root, path)
    expected = CorruptError if " is " in said else IncompleteError
    for read in READERS:
        with pytest.raises(ReshardError, match=said) as caught:
            read(run, tmp_path / "out")
        assert isinstance(caught.value, expected)
    report = reshard.verify(run)
    assert report.exit_code == expected.exit_code
    assert report.check("slots").failures
