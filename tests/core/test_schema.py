"""What a section must be, and which value of it is told to be of another kind."""

from __future__ import annotations

import pytest

from reshard.core.schema import (
    COUNT,
    INTEGER,
    NUMBER,
    SHAPE,
    TEXT,
    either,
    expect,
    fields,
    mapping,
    maybe,
    record,
    row,
    sequence,
)
from reshard.errors import CorruptError, shown

HELD = [
    (maybe(INTEGER), None),
    (sequence(), ("a", 1)),
    (sequence(COUNT), [0, 3]),
    (mapping(TEXT, SHAPE), {"w": (2, 3), "scalar": ()}),
    (either(mapping(), sequence(mapping())), [{}]),
    (fields(a=INTEGER), {"b": "anything"}),
    (NUMBER, 0.5),
    (record(a=TEXT), {"a": "", "b": 1}),
    (row(COUNT, TEXT), [0, "a"]),
]
FAULTY = [
    (INTEGER, True, "the content is True, expected an integer"),
    (COUNT, -1, "the content is -1, expected a number of at least 0"),
    (sequence(), "abc", "the content is 'abc', expected a list"),
    (sequence(sequence(TEXT)), [["a"], [b"b"]], r"\[1\]\[0\] is b'b', expected a string"),
    (mapping(TEXT), {1: 2}, "the content has the key 1, expected a string"),
    (
        mapping(TEXT, SHAPE),
        {"w": (1 << 70,)},
        r"\['w'\] is \(1180591620717411303424,\), expected a shape",
    ),
    (mapping(), [], r"the content is \[\], expected a dict"),
    (fields(a=fields(b=maybe(TEXT))), {"a": {"b": 1.5}}, "a.b is 1.5, expected a string"),
    (either(INTEGER, TEXT), None, "the content is None, expected an integer or a string"),
    (record(a=TEXT, b=TEXT), {"a": ""}, "the content has no 'b'"),
    (record(a=TEXT), {"a": 1}, "a is 1, expected a string"),
    (record(a=TEXT), 7, "the content is 7, expected a dict"),
    (row(COUNT, TEXT), (1,), r"the content is \(1,\), expected a list of 2"),
    (row(COUNT, TEXT), (1, 2), r"\[1\] is 2, expected a string"),
    (SHAPE, 7, "the content is 7, expected a shape"),
]


@pytest.mark.parametrize(("kind", "value"), HELD)
def test_a_value_of_its_kind(kind, value):
    expect("x.pt", value, kind)


@pytest.mark.parametrize(("kind", "value", "told"), FAULTY)
def test_a_value_of_another(kind, value, told):
    with pytest.raises(CorruptError, match=f"x.pt: {told}"):
        expect("x.pt", value, kind)


def test_a_long_value_is_cut():
    assert len(shown("x" * 1000)) == 60
    assert shown("x" * 10**6) == "a str"
    assert shown([[1]]) == "a list"
    assert shown(10**5000) == "an int"


def test_a_value_that_holds_one_value_over_and_over_is_soon_told():
    doubled = ()
    for _ in range(60):
        doubled = (doubled, doubled)
    shared = dict.fromkeys(map(str, range(20_000)), (1,))
    assert shown(doubled) == shown((1, doubled)) == "a tuple"
    expect("x.pt", [shared] * 20_000, sequence(mapping(TEXT, SHAPE)))
    with pytest.raises(CorruptError, match="is a tuple, expected a number"):
        expect("x.pt", doubled, NUMBER)
