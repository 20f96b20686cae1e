"""The compiled sums of LoRA and those of numpy give the same bits, and those are the right ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from reshard.engine.move.cast import as_numbers, get_numpy_dtype
from reshard.tensors.adapters import arithmetic
from tests.support.compiled import build_module

SHAPES = [(1, 1, 1), (4, 4, 512), (70, 16, 1030), (9, 7, 24), (3, 5, 600), (70, 80, 24)]
"""Rows, rank and columns: more and fewer of each than the compiled module takes at a time."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_module(tmp_path_factory, "reshard.tensors.adapters._arithmetic")


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"])
def way(request, built, monkeypatch):
    monkeypatch.setattr(arithmetic, "_compiled", built if request.param else None)


def make(shape, dtype):
    """Return a matrix of random values of a dtype, as bits, and the factors of a product."""
    rows, rank, columns = shape
    random = np.random.default_rng(rows)
    base = torch.from_numpy(random.standard_normal((rows, columns), "f4"))
    base = base.to(getattr(torch, dtype.name)).view(torch.uint8).numpy()
    left, right = (random.standard_normal(s, "f4") for s in ((rows, rank), (rank, columns)))
    return base.view(get_numpy_dtype(dtype, casting=True)), left, right


def add_product(base, dtype, left, right, scale=1.0, sum_dtype=FLOAT32):
    """Return how many sums became infinite, and the sums."""
    sums = np.zeros(base.shape, get_numpy_dtype(sum_dtype, casting=True))
    matrices = [memoryview(each.tobytes()) for each in (base, left, right)]
    into = sums.reshape(-1).view(np.uint8).data
    arguments = dtype, *matrices[1:], left.shape[1], scale, into, sum_dtype
    return arithmetic.add_product(matrices[0], *arguments), sums


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("way")
def test_products_are_rounded_and_added_in_order(shape, dtype):
    base, left, right = make(shape, dtype)
    wanted = np.zeros(base.shape, "f4")
    for column, row in zip((left * np.float32(0.3)).T, right, strict=True):
        wanted = wanted + column[:, None] * row
    wanted = as_numbers(base, dtype).astype("f4") + wanted
    assert add_product(base, dtype, left, right, 0.3)[0] == 0
    assert (add_product(base, dtype, left, right, 0.3)[1] == wanted).all()
    rounded = torch.from_numpy(wanted).bfloat16().view(torch.uint16).numpy()
    assert (add_product(base, dtype, left, right, 0.3, BFLOAT16)[1] == rounded).all()


@pytest.mark.usefixtures("way")
def test_a_product_is_rounded_before_the_sum():
    """A fused operation would give 2 ** -46, which is what the product loses."""
    value = 1 + 2**-23
    left, right = np.float32([[1, value]]), np.float32([[-1 - 2**-22], [value]])
    assert add_product(np.zeros((1, 1), "f4"), FLOAT32, left, right)[1] == 0


@pytest.mark.usefixtures("way")
def test_finite_sums_that_become_infinite_as_bfloat16_are_counted():
    base = np.array([[1.0, 3.389e38, -3.389e38, 0.0]], "f4")
    left, right = np.ones((1, 1), "f4"), np.array([[2**-8, 0.0, -1e36, -0.0]], "f4")
    overflowed, sums = add_product(base, FLOAT32, left, right, sum_dtype=BFLOAT16)
    assert overflowed == 1
    wanted = torch.from_numpy(base + right).bfloat16().view(torch.uint16).numpy()
    assert (sums == wanted).all()


@pytest.mark.parametrize("sum_dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
@pytest.mark.parametrize("place", ["base", "left", "right"])
@pytest.mark.usefixtures("way")
def test_a_sum_that_is_not_finite_is_found(place, value, sum_dtype):
    base, left, right = make((6, 5, 530), FLOAT32)
    {"base": base, "left": left, "right": right}[place][-1, -1] = value
    if value == 3e38:  # the sum overflows in float32
        base[-1, -1], left[-1], right[:, -1] = value, 1e19, 1e19
    assert add_product(base, FLOAT32, left, right, sum_dtype=sum_dtype)[0] is None


@pytest.mark.parametrize(
    ("values", "letter", "left", "right", "rank", "sums", "itemsize"),
    [
        (7, "f", 8, 8, 2, 4, 4),
        (8, "f", 8, 8, 2, 4, 4),
        (4, "f", 7, 8, 2, 4, 4),
        (4, "f", 8, 12, 2, 4, 4),
        (4, "f", 8, 8, 0, 4, 4),
        (4, "f", 8, 8, -2, 4, 4),
        (4, "f", 8, 8, 2, 2, 4),
        (4, "f", 8, 8, 2, 3, 3),
        (4, "d", 8, 8, 2, 4, 4),
        (4, "b", 8, 8, 2, 4, 4),
    ],
)
def test_buffers_of_other_sizes_are_refused(
    built, values, letter, left, right, rank, sums, itemsize
):
    factors = bytes(left), bytes(right), rank, 1.0
    with pytest.raises(ValueError, match="as many elements"):
        built.add_product(bytes(values), letter, *factors, bytearray(sums), itemsize)
    assert built.add_product(bytes(4), "f", bytes(8), bytes(8), 2, 1.0, bytearray(4), 4) == 0
