"""The deep checks, on states that no program saves."""

from __future__ import annotations

import math

import pytest
import torch

import reshard
from reshard.checks import deep, names
from reshard.checks.compare import TensorDifference
from reshard.checks.scan import Counterpart, Mismatch, ScanResult
from reshard.core.box import row_major, whole
from reshard.core.chunks import Chunk
from reshard.core.dtypes import BFLOAT16, BY_NAME, FLOAT32
from reshard.core.manifest import MASTER, PARAM, Entry, Manifest, Origin, index_entries


def make_entry(kind, dtype, shape):
    chunk = Chunk(whole(shape), "file", 0, row_major(shape, dtype.itemsize), dtype)
    return Entry("w", kind, dtype, shape, (chunk,))


@pytest.mark.parametrize(
    ("dtype", "shape"), [(BFLOAT16, (2, 2)), (BY_NAME["int8"], (4,))], ids=["shape", "dtype"]
)
def test_a_weight_that_cannot_be_the_cast_of_its_master_fails(dtype, shape):
    """Also if the checkpoint has no other weight beside a master."""
    entries = [make_entry(PARAM, dtype, shape), make_entry(MASTER, FLOAT32, (4,))]
    manifest = Manifest(Origin("x", "path"), index_entries(entries), {}, ordered=False)
    tasks = deep.plan_tasks(manifest, config=None, shapes=None, digests={})
    check = deep.check_masters(manifest, tasks, ScanResult())
    assert check.failures == [
        f"w: {dtype} of shape {list(shape)} cannot be the cast of its master, float32 of shape [4]"
    ]


@pytest.mark.parametrize(("other", "end"), [(math.nan, "1 and nan"), (1.5, ", up to 0.5 apart")])
def test_only_a_distance_is_stated(other, end):
    """Leave out a distance of 0: NaN has none."""
    copy, master = make_entry(PARAM, BFLOAT16, (4,)), make_entry(MASTER, FLOAT32, (4,))
    manifest = Manifest(Origin("x", "path"), index_entries([copy, master]), {}, ordered=False)
    far = 0.0 if math.isnan(other) else other - 1
    difference = TensorDifference(2, (1.0, other), 1, far, far, 0, math.isnan(other))
    scan = ScanResult(unequal=[Mismatch(master, Counterpart(names.MASTERS, copy), difference)])
    tasks = deep.plan_tasks(manifest, config=None, shapes=None, digests={})
    (failure,) = deep.check_masters(manifest, tasks, scan).failures
    assert failure.endswith(end), failure


def test_negative_parts_of_a_mean_of_squares_of_bitsandbytes_are_found(tmp_path):
    """Check float32 values, and the scales of codes."""
    model = torch.nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(3)})
    codes = torch.zeros(3, dtype=torch.uint8)
    coded = {"state2": codes, "absmax2": torch.full((1,), -0.5), "qmap2": torch.linspace(0, 1, 256)}
    states = [{"state1": -torch.ones(3), "state2": -torch.ones(3)}, {"state1": codes, **coded}]
    optimizer = {
        "state": {number: {"step": 3, **state} for number, state in enumerate(states)},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}],
    }
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "x.pt")
    report = reshard.verify(tmp_path / "x.pt", deep=True)
    (check,) = (each for each in report.checks if each.name == names.MOMENTS)
    assert [text.split()[0] for text in check.failures] == ["state2", "absmax2"]
