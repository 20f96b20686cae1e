"""FSDP 1's flat parameters: the dtype that all members of a unit have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from reshard.core.dtypes import BY_NAME
from reshard.errors import UnsupportedError
from reshard.formats.fsdp import flat_units


def members(*names):
    return [
        SimpleNamespace(fqn=f"p{n}", is_buffer=False, value=SimpleNamespace(dtype=BY_NAME[name]))
        for n, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("bfloat16", "float32"), "float32"),
        (("float16", "float32", "bfloat16"), "float32"),
        (("int64", "int64"), "int64"),
    ],
)
def test_a_flat_parameter_has_the_widest_dtype_of_its_members(names, wanted):
    assert flat_units._choose_dtype(members(*names), None) == BY_NAME[wanted]


@pytest.mark.parametrize("names", [("int64", "float32"), ("float16", "bfloat16"), ("int8", "bool")])
def test_dtypes_of_which_none_holds_the_others_are_refused_by_name(names):
    with pytest.raises(UnsupportedError) as caught:
        flat_units._choose_dtype(members(*names), None)
    assert caught.value.where == "p0"
    assert caught.value.problem.startswith(f"is {names[0]}, but 'p1' of its unit is {names[1]}")
