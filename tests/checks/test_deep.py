"""The deep checks, on manifests that no reader returns."""

from __future__ import annotations

import pytest

from reshard.checks import deep
from reshard.checks.scan import ScanResult
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
