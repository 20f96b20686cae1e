"""The compiled sums and those of numpy give the same bits, of any values."""

from __future__ import annotations

import numpy as np
import pytest

from reshard.core.dtypes import FLOAT32, FLOAT64
from reshard.tensors.averages import sums
from tests.support.compiled import build_module

FACTORS = [1.0, 0.1, -1 / 3, 0.0, 1e300, 1e-300]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_module(tmp_path_factory, "reshard.tensors.averages._sums")


@pytest.fixture(params=[1, 7, 4099])
def values(request):
    """Return three arrays of floats of any bits but NaN, whose payload is the processor's own."""
    bits = np.random.default_rng(request.param).integers(0, 1 << 32, (3, request.param), np.uint32)
    return np.nan_to_num(bits.view(np.float32), nan=-0.0, posinf=np.inf, neginf=-np.inf)


def average(values, factors, divisor):
    """Return whether all means are finite, and the means."""
    means = np.empty(values.shape[1], values.dtype)
    dtype = FLOAT32 if values.itemsize == 4 else FLOAT64
    rows, out = values.data.cast("B"), means.data.cast("B")
    with np.errstate(all="ignore"):
        is_finite = sums.average(rows, factors, divisor, dtype, out)
    return is_finite, means


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("divisor", [1, 3, 4, 2**-1070, 0.0])
def test_both_give_the_same_bits(built, monkeypatch, values, factor, divisor):
    made = []
    for module in (built, None):
        monkeypatch.setattr(sums, "_compiled", module)
        is_finite, means = average(values, [factor, 1.0, -factor], divisor)
        assert is_finite == np.isfinite(means).all()
        made.append(np.where(np.isnan(means), 0x7FC00000, means.view(np.uint32)))
    assert (made[0] == made[1]).all()


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_mean_is_the_sum_in_the_order_of_the_rows(built, monkeypatch, is_compiled, count):
    monkeypatch.setattr(sums, "_compiled", built if is_compiled else None)
    values = np.random.default_rng(count).normal(size=(count, 3000)).astype(np.float32)
    factors = np.random.default_rng(0).normal(size=count)
    wanted = sum(
        row.astype(np.float64) * factor for row, factor in zip(values, factors, strict=True)
    )
    is_finite, means = average(values, factors.tolist(), 7)
    assert is_finite
    assert (means == (wanted / 7).astype(np.float32)).all()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_product_is_rounded_before_the_sum(built, monkeypatch, is_compiled):
    """A fused operation would give 2 ** -60, which is what the product loses."""
    monkeypatch.setattr(sums, "_compiled", built if is_compiled else None)
    value, factor = 1 + 2**-20, 1 + 2.0**-40
    values = np.repeat(np.float32([[-1], [value]]), 8, axis=1)
    _, means = average(values, [1 + 2.0**-20 + 2.0**-40, factor], 1)
    assert (means == 0).all()


def test_float64_stays_float64():
    values = np.float64([[1, 2], [1 + 2**-40, 4]])
    _, means = average(values, [1.0, 1.0], 2)
    assert means.tolist() == [1 + 2**-41, 3]


@pytest.mark.parametrize(
    ("values", "factors", "means"), [(1, 1, 2), (3, 2, 2), (4, 0, 2), (4, 1, 2), (0, 1, 1)]
)
def test_buffers_of_other_sizes_are_refused(built, values, factors, means):
    buffers = np.zeros(values, np.float32), np.zeros(factors), np.zeros(means, np.float32)
    with pytest.raises(ValueError, match="as many elements"):
        built.average(buffers[0], buffers[1], 1.0, buffers[2])
