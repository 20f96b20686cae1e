"""The hints of `diff` for differences that a merge, or another number of ranks, always brings."""

from __future__ import annotations

from pathlib import Path

import pytest

import reshard
from reshard.checks.train import StateDifference
from reshard.commands.diff import DiffReport

RUN = Path(__file__).parents[1] / "data" / "megatron" / "llama_tp2pp2" / "ckpt"


def test_a_model_without_an_optimizer_is_compared_by_its_weights(tmp_path):
    reshard.merge(RUN, tmp_path / "model.safetensors")
    for a, b, without in ((RUN, "model.safetensors", "B"), ("model.safetensors", RUN, "A")):
        report = reshard.diff(tmp_path / a, tmp_path / b)
        assert not report.same
        assert report.notes == [
            f"{without} has no optimizer state; --kind weight compares only the weights"
        ]
        assert reshard.diff(tmp_path / a, tmp_path / b, kinds=["weight"]).same


def test_other_names_of_the_same_model_are_explained(tmp_path):
    reshard.split(RUN, tmp_path / "dcp", to="dcp")
    report = reshard.diff(RUN, tmp_path / "dcp")
    (note,) = report.notes
    assert note.startswith("no weight has the same name in both")
    reshard.split(tmp_path / "dcp", tmp_path / "megatron", to="megatron", tp=2)
    reshard.split(tmp_path / "megatron", tmp_path / "back", to="dcp")
    report = reshard.diff(tmp_path / "dcp", tmp_path / "back", kinds=["weight", "optimizer"])
    assert (report.same, report.notes) == (True, [])


@pytest.mark.parametrize("dp", [2, 1])
def test_random_states_of_other_ranks_are_named_with_the_way_to_leave_them_out(dp, tmp_path):
    reshard.split(RUN, tmp_path / "one", tp=1, pp=1, dp=dp)
    report = reshard.diff(RUN, tmp_path / "one")
    assert [value.name for value in report.train] == ["rng"]
    assert any("--ignore rng leaves them out" in note for note in report.notes)
    same = reshard.diff(RUN, tmp_path / "one", ignore=["rng"])
    assert same.same
    assert not same.notes


def test_of_two_dicts_the_values_inside_that_differ_are_shown():
    a = {"base_lrs": [0.1, 0.2], "last_epoch": 3, "same": 1, "inner": {"x": 1}}
    b = {"base_lrs": [0.1, 0.3], "last_epoch": 4, "same": 1, "inner": {"x": 1, "y": 2}}
    assert StateDifference("scheduler", a, b).describe() == (
        "scheduler.base_lrs[1]: 0.2 and 0.3; scheduler.last_epoch: 3 and 4;"
        " scheduler.inner.y: None and 2"
    )
    many = StateDifference("x", dict.fromkeys(range(9), 0), dict.fromkeys(range(9), 1))
    assert many.describe().endswith("x.3: 0 and 1; 5 more")


def test_random_states_alone_are_not_called_different():
    report = DiffReport("a", "b", train=[StateDifference("rng", [1], [2])])
    assert next(report.lines()) == "a and b: the same, except random states"
    assert (report.exit_code, bool(report)) == (1, False)
    report.train.append(StateDifference("step", 1, 2))
    assert next(report.lines()) == "a and b: DIFFERENT"
