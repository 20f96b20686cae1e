"""The compiled sums and those of numpy give the same bits, of any values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from reshard.engine.move.cast import as_numbers, get_numpy_dtype
from reshard.tensors.averages import sums
from tests.support.combinations import choose_combinations
from tests.support.compiled import build_module

FACTORS = [1.0, 0.1, -1 / 3, 0.0, 1e300, 1e-300]
DTYPES = [[FLOAT32] * 3, [BFLOAT16] * 3, [FLOAT16] * 3, [BFLOAT16, FLOAT32, FLOAT16]]
CASES = choose_combinations(
    itertools.product(range(len(DTYPES)), (1, 7, 4099), FACTORS, (1, 3, 4, 2**-1070, 0.0))
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_module(tmp_path_factory, "reshard.tensors.averages._sums")


def make_row(random, dtype, count):
    """Return floats of any bits but NaN, whose payload is the processor's own."""
    bits = random.integers(0, 1 << 8 * dtype.itemsize, count, f"u{dtype.itemsize}")
    row = bits.view(get_numpy_dtype(dtype, casting=True))
    row[np.isnan(as_numbers(row, dtype))] = 1 << 15 if dtype == BFLOAT16 else -0.0
    return row


def average(rows, dtypes, factors, divisor, dtype=FLOAT32):
    """Return whether all means are finite, and the means."""
    means = np.empty(rows[0].size, get_numpy_dtype(dtype, casting=True))
    values = memoryview(b"".join(row.tobytes() for row in rows))
    with np.errstate(all="ignore"):
        is_finite = sums.average(values, dtypes, factors, divisor, dtype, means.data.cast("B"))
    return is_finite, means


@pytest.mark.parametrize(("number", "count", "factor", "divisor"), CASES)
def test_both_give_the_same_bits(built, monkeypatch, number, count, factor, divisor):
    dtypes = DTYPES[number]
    random = np.random.default_rng(count)
    rows = [make_row(random, dtype, count) for dtype in dtypes]
    made = []
    for module in (built, None):
        monkeypatch.setattr(sums, "_compiled", module)
        is_finite, means = average(rows, dtypes, [factor, 1.0, -factor], divisor)
        assert is_finite == np.isfinite(means).all()
        made.append(np.where(np.isnan(means), 0x7FC00000, means.view(np.uint32)))
    assert (made[0] == made[1]).all()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_every_16_bit_value_is_widened_exactly(built, monkeypatch, is_compiled, dtype):
    monkeypatch.setattr(sums, "_compiled", built if is_compiled else None)
    row = np.arange(1 << 16, dtype=np.uint16).view(get_numpy_dtype(dtype, casting=True))
    row = row[~np.isnan(as_numbers(row, dtype))]
    is_finite, means = average([row], [dtype], [1.0], 1)
    assert not is_finite
    wanted = as_numbers(row, dtype).astype(np.float32)
    assert (means.view(np.uint32) == wanted.view(np.uint32)).all()


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_mean_is_the_sum_in_the_order_of_the_rows(built, monkeypatch, is_compiled, count):
    monkeypatch.setattr(sums, "_compiled", built if is_compiled else None)
    values = np.random.default_rng(count).normal(size=(count, 3000)).astype(np.float32)
    factors = np.random.default_rng(0).normal(size=count)
    wanted = sum(
        row.astype(np.float64) * factor for row, factor in zip(values, factors, strict=True)
    )
    is_finite, means = average(values, [FLOAT32] * count, factors.tolist(), 7)
    assert is_finite
    assert (means == (wanted / 7).astype(np.float32)).all()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_product_is_rounded_before_the_sum(built, monkeypatch, is_compiled):
    """A fused operation would give 2 ** -60, which is what the product loses."""
    monkeypatch.setattr(sums, "_compiled", built if is_compiled else None)
    value, factor = 1 + 2**-20, 1 + 2.0**-40
    values = np.repeat(np.float32([[-1], [value]]), 8, axis=1)
    factors = [1 + 2.0**-20 + 2.0**-40, factor]
    _, means = average(values, [FLOAT32, FLOAT32], factors, 1)
    assert (means == 0).all()


@pytest.mark.parametrize("other", [FLOAT64, FLOAT32, BFLOAT16], ids=str)
def test_float64_stays_float64(other):
    rows = [np.float64([1 + 2**-40, 2]), np.float64([1, 4])]
    if other == BFLOAT16:
        rows[1] = np.uint16([0x3F80, 0x4080])
    else:
        rows[1] = rows[1].astype(get_numpy_dtype(other, casting=True))
    _, means = average(rows, [FLOAT64, other], [1.0, 1.0], 2, FLOAT64)
    assert means.tolist() == [1 + 2**-41, 3]


@pytest.mark.parametrize(
    ("values", "dtypes", "factors", "means"),
    [
        (4, "f", 1, 2),
        (12, "ff", 2, 2),
        (16, "", 0, 2),
        (16, "f", 1, 2),
        (16, "ff", 1, 2),
        (0, "f", 1, 1),
        (12, "fe", 2, 3),
        (13, "fe", 2, 2),
        (12, "fd", 2, 2),
        (12, "f\0", 2, 3),
    ],
)
def test_buffers_of_other_sizes_are_refused(built, values, dtypes, factors, means):
    buffers = bytes(values), np.zeros(factors), np.zeros(means, np.float32)
    with pytest.raises(ValueError, match="as many elements"):
        built.average(buffers[0], dtypes, buffers[1], 1.0, buffers[2])
