"""A script's own values: what a target writes again is what the script saved."""

from __future__ import annotations

import datetime as dt
import pickle
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch

import reshard
from reshard.containers.pickles.canonical import Canonicalizer
from reshard.containers.pickles.pickler import Pickler
from reshard.containers.pickles.unpickle import loads
from reshard.errors import UnsafeError
from reshard.live.safe_load import load_extra_state
from reshard.state_dict.own_values import keep_own_values
from reshard.state_dict.tree import join_trees

VALUES = {
    "an OrderedDict": OrderedDict([("b", 2), ("a", OrderedDict(x=1))]),
    "a defaultdict": defaultdict(list, {"a": [1]}),
    "a defaultdict without a factory": defaultdict(None, {"a": 1}),
    "a Counter": Counter("aab"),
    "a deque": deque([1, 2]),
    "a deque with a greatest length": deque([1, 2], maxlen=5),
    "nested": [OrderedDict(z=1), {"q": (OrderedDict(), Counter())}],
}


def load(value):
    return loads(pickle.dumps({"own": value}, protocol=2), where="here.pt").value


def keep(value):
    root = load(value)
    return keep_own_values(root, root)


def test_a_container_inside_itself_is_not_kept():
    value = OrderedDict()
    value["self"] = value
    assert keep(value) == {}


def test_plain_containers_are_not_kept_twice():
    assert keep({"a": [1, (2,)]}) == {}


def split(tmp_path, own, **options):
    """Save an object with torch, split it, and load the result with torch."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, **own}, tmp_path / "one.pt")
    report = reshard.split(tmp_path / "one.pt", tmp_path / "two.pt", to="torch", **options)
    return torch.load(tmp_path / "two.pt", weights_only=False), report


@pytest.mark.parametrize("beside", [None, np.arange(3)], ids=["alone", "beside an array"])
def test_a_split_keeps_the_classes_of_containers(tmp_path, beside):
    """The reader copies every container of a pickle, and those beside arrays once more."""
    found, _ = split(tmp_path, {"own": VALUES, "beside": beside})
    assert repr(found["own"]) == repr(VALUES)


def test_values_of_several_ranks_keep_their_classes():
    trees = [load(VALUES), load({**VALUES, "a deque": deque([1, 3])})]
    root, differing = join_trees(trees, ["0.pt", "1.pt"])
    assert differing == {("own", "a deque", 1): (3, "1.pt", 2, "0.pt")}
    pickler = Pickler("there.pt")
    pickler.write(Canonicalizer().convert(keep_own_values(root, root)))
    assert repr(pickle.loads(pickler.finish())["own"]) == repr(VALUES)


def test_a_live_load_restores_the_classes(tmp_path):
    """Live loads accept what torch.load accepts with weights_only, which extends only lists."""
    torch.save({"model": {"w": torch.ones(2)}, "own": VALUES}, tmp_path / "one.pt")
    with reshard.open(tmp_path / "one.pt") as checkpoint:
        assert repr(load_extra_state(checkpoint.manifest)["own"]) == repr(VALUES)


def test_a_live_load_names_the_class_that_is_not_safe(tmp_path):
    saved = {"model": {"w": torch.ones(2)}, "own": dt.date(2026, 1, 2)}
    torch.save(saved, tmp_path / "one.pt")
    with (
        reshard.open(tmp_path / "one.pt") as checkpoint,
        pytest.raises(UnsafeError, match=r"Unsupported global: GLOBAL datetime\.date"),
    ):
        load_extra_state(checkpoint.manifest)


def test_a_generator_of_numpy_continues(tmp_path):
    found, _ = split(tmp_path, {"own": np.random.default_rng(7)})
    assert found["own"].random() == np.random.default_rng(7).random()


def test_a_function_does_not_become_a_text(tmp_path):
    loss = torch.nn.functional.mse_loss
    allowed = [f"{loss.__module__}.{loss.__name__}"]
    found, report = split(tmp_path, {"own": {"loss": loss}}, allow_pickle=allowed)
    assert "own" not in found
    assert any("own" in each for each in (*report.dropped, *report.notes))
