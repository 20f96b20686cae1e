"""Means of tensors that files store in several dtypes, or with a factor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from reshard.core.box import Box, whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from reshard.core.manifest import PARAM, Entry
from reshard.engine.move.cast import as_numbers, get_numpy_dtype
from reshard.system.files import SourceFiles
from reshard.tensors.averages.mean import compute_mean
from reshard.tensors.lazy import read_block

COUNT = 300
HALF = COUNT // 2


@pytest.fixture
def store(tmp_path):
    """Return a function that stores random values, and returns their chunk and the values."""
    random = np.random.default_rng(0)

    def make(dtype, box):
        values = random.normal(size=box.volume)
        if dtype == BFLOAT16:
            row = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            row = values.astype(get_numpy_dtype(dtype, casting=True))
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        path.write_bytes(row.tobytes())
        return contiguous(str(path), 0, dtype, box), as_numbers(row, dtype).astype(np.float64)

    return make


def read_mean(tensors, dtype):
    mean = compute_mean(tensors, None, ["a", "b"])
    assert mean.dtype == dtype
    with SourceFiles() as pool:
        data = read_block(pool, mean, whole(mean.shape))
    return np.frombuffer(data, get_numpy_dtype(dtype, casting=True))


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, FLOAT16, BFLOAT16], ids=str)
def test_each_tensor_is_read_in_its_own_dtype(store, dtype):
    made = [store(each, whole((COUNT,))) for each in (BFLOAT16, dtype)]
    tensors = [Entry("w", PARAM, chunk.dtype, (COUNT,), (chunk,)) for chunk, _ in made]
    wanted = (made[0][1] + made[1][1]) / 2
    target = FLOAT64 if dtype == FLOAT64 else FLOAT32
    assert (read_mean(tensors, target) == wanted.astype(f"f{target.itemsize}")).all()


def test_the_chunks_of_a_tensor_can_have_several_dtypes(store):
    halves = [store(BFLOAT16, Box((0,), (HALF,))), store(FLOAT32, Box((HALF,), (HALF,)))]
    mixed = Entry("w", PARAM, FLOAT32, (COUNT,), tuple(chunk for chunk, _ in halves))
    chunk, values = store(FLOAT16, whole((COUNT,)))
    wanted = (np.concatenate([each for _, each in halves]) + values) / 2
    other = Entry("w", PARAM, FLOAT16, (COUNT,), (chunk,))
    assert (read_mean([mixed, other], FLOAT32) == wanted.astype(np.float32)).all()


def test_a_value_with_a_factor_is_not_rounded_to_16_bits(store):
    chunk, values = store(BFLOAT16, whole((COUNT,)))
    scaled = Entry("w", PARAM, BFLOAT16, (COUNT,), (replace(chunk, factor=1 / 3),))
    plain = Entry("w", PARAM, BFLOAT16, (COUNT,), (chunk,))
    products = (values.astype(np.float32) * np.float32(1 / 3)).astype(np.float64)
    assert (read_mean([plain, scaled], FLOAT32) == ((values + products) / 2).astype("f4")).all()
