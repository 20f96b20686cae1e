"""FSDP's units: the dtype of flat parameters, and the parameters that are in no unit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from reshard.core.box import Box, row_major
from reshard.core.chunks import Chunk
from reshard.core.dtypes import BY_NAME, FLOAT32
from reshard.core.manifest import PARAM, Entry, FrameworkFacts, Manifest, Origin, index_entries
from reshard.errors import UnsupportedError
from reshard.formats.fsdp import flat_units
from reshard.formats.parameter_kinds import build_is_divided


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


@pytest.mark.parametrize(
    ("file", "copies", "divided"),
    [("model_rank{}.pt", 2, False), ("model_rank{}.pt", 1, True), ("__{}_0.distcp", 1, True)],
)
def test_one_row_is_ignored_only_if_every_rank_has_it(file, copies, divided):
    """A rank without rows of a sharded parameter stores no block of it, and DCP one in any case."""

    def make_weight(fqn, shape, boxes):
        strides = row_major(boxes[0].shape, 4)
        chunks = [Chunk(box, file.format(n), 0, strides, FLOAT32) for n, box in enumerate(boxes)]
        entry = Entry(fqn, PARAM, FLOAT32, shape, tuple(chunks))
        return SimpleNamespace(fqn=fqn, shape=shape, is_buffer=False, value=entry, dtype=FLOAT32)

    cut = make_weight("cut", (4, 2), [Box((0, 0), (2, 2)), Box((2, 0), (2, 2))])
    row = make_weight("row", (1, 2), [Box((0, 0), (1, 2))] * copies)
    entries = index_entries([cut.value, row.value])
    manifest = Manifest(
        Origin("fsdp", "path", mesh={"world": 2}, facts=FrameworkFacts(shards_by_fsdp=True)),
        entries,
        {},
        ordered=True,
    )
    members = [SimpleNamespace(fqn=each.fqn, weight=each) for each in (cut, row)]
    state = SimpleNamespace(members=members, weights=[cut, row], groups=[], manifest=manifest)
    is_divided = build_is_divided(state, None)
    assert (is_divided(cut), is_divided(row)) == (True, divided)
