"""A script's own values: what a target writes again is what the script saved."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict, defaultdict, deque

import pytest

from reshard.containers.pickles.canonical import Canonicalizer
from reshard.containers.pickles.pickler import Pickler
from reshard.containers.pickles.unpickle import loads
from reshard.state_dict.own_values import keep_own_values

VALUES = {
    "an OrderedDict": OrderedDict([("b", 2), ("a", OrderedDict(x=1))]),
    "a defaultdict": defaultdict(list, {"a": [1]}),
    "a defaultdict without a factory": defaultdict(None, {"a": 1}),
    "a Counter": Counter("aab"),
    "a deque": deque([1, 2]),
    "a deque with a greatest length": deque([1, 2], maxlen=5),
    "nested": [OrderedDict(z=1), {"q": (OrderedDict(), Counter())}],
}


def keep(value):
    root = loads(pickle.dumps({"own": value}, protocol=2), where="here.pt").value
    return keep_own_values(root, root)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_container_keeps_its_class(value):
    pickler = Pickler("there.pt")
    pickler.write(Canonicalizer().convert(keep(value)))
    assert repr(pickle.loads(pickler.finish())["own"]) == repr(value)


def test_a_container_inside_itself_is_not_kept():
    value = OrderedDict()
    value["self"] = value
    assert keep(value) == {}


def test_plain_containers_are_not_kept_twice():
    assert keep({"a": [1, (2,)]}) == {}
