"""A LoRA product is added in fp32, whatever the base is stored in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from reshard.engine.move.cast import as_numbers, get_numpy_dtype
from reshard.tensors.adapters.product import add_matrix_product
from reshard.tensors.averages import sums

ROWS, COLUMNS, RANK = 70, 24, 80  # a rank that is summed in two steps


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_sum_is_that_of_float32(monkeypatch, dtype, is_compiled):
    if not is_compiled:
        monkeypatch.setattr(sums, "_compiled", None)
    random = np.random.default_rng(0)
    base = random.integers(0, 1 << 14, ROWS * COLUMNS, np.uint16).astype(f"u{dtype.itemsize}")
    base = base.view(get_numpy_dtype(dtype, casting=True))
    left, right = (random.standard_normal(s, "f4") for s in ((ROWS, RANK), (RANK, COLUMNS)))
    terms = np.zeros((2, ROWS, COLUMNS), "<f4")
    tile = terms[0].reshape(-1).view(np.uint8)
    tile[tile.size - base.nbytes :] = base.view(np.uint8)
    made = np.empty((ROWS, COLUMNS), "<f4")
    into = made.data.cast("B")
    assert add_matrix_product(terms, dtype, left, right, into, FLOAT32) == 0
    wanted = as_numbers(base, dtype).astype("<f4").reshape(ROWS, COLUMNS)
    for start in (0, 64):
        wanted = wanted + left[:, start : start + 64] @ right[start : start + 64]
    assert (made == wanted).all()
    right[RANK - 1, 3] = np.inf
    assert add_matrix_product(terms, FLOAT32, left, right, into, FLOAT32) is None


@pytest.mark.parametrize("is_compiled", [True, False])
def test_sums_are_rounded_to_bfloat16_and_counted(monkeypatch, is_compiled):
    if not is_compiled:
        monkeypatch.setattr(sums, "_compiled", None)
    values = np.array([1.0, 3.389e38, -3.389e38, 0.0], "<f4")
    terms = np.array([2**-8, 0.0, -1e36, -0.0], "<f4")
    made = np.empty(4, "<u2")
    arguments = values.data.cast("B"), FLOAT32, terms.data.cast("B"), made.data.cast("B")
    assert sums.add(*arguments, BFLOAT16) == 1
    wanted = torch.from_numpy(values + terms).bfloat16().view(torch.uint16).numpy()
    assert (made == wanted).all()
    values[0] = np.inf
    assert sums.add(*arguments, BFLOAT16) is None
