"""The compiled sums and those of numpy give the same bits, of any values."""

from __future__ import annotations

import numpy as np
import pytest

from reshard.tensors.averages import sums
from tests.support.compiled import build_module, find_compiler

FACTORS = [1.0, 0.1, -1 / 3, 0.0, 1e300, 1e-300]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the module from its present source; the installed one can be older."""
    if not find_compiler():
        pytest.skip("this machine has no C compiler, so numpy computes")
    return build_module(tmp_path_factory, "reshard.tensors.averages._sums")


@pytest.fixture(params=[1, 7, 4099])
def values(request):
    """Return three arrays of floats of any bits but NaN, whose payload is the processor's own."""
    bits = np.random.default_rng(request.param).integers(0, 1 << 32, (3, request.param), np.uint32)
    return np.nan_to_num(bits.view(np.float32), nan=-0.0, posinf=np.inf, neginf=-np.inf)


def mean_bits(values, factor, divisor):
    total, means = np.empty(values.shape[1], np.float64), np.empty(values.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for number, each in enumerate(values):
            sums.add(each, total, factor, begins=number == 0)
        sum_bits = total.view(np.uint64).copy()
        is_finite = sums.divide(total, divisor, means)
    assert is_finite == np.isfinite(means).all()
    unknown = np.isnan(means)
    return np.where(unknown, 0, sum_bits), np.where(unknown, 0, means.view(np.uint32)), unknown


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("divisor", [1, 3, 4])
def test_both_give_the_same_bits(built, monkeypatch, values, factor, divisor):
    made = []
    for module in (built, None):
        monkeypatch.setattr(sums, "_compiled", module)
        made.append(mean_bits(values, factor, divisor))
    for ours, wanted in zip(*made, strict=True):
        assert (ours == wanted).all()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_product_is_rounded_before_the_sum(built, monkeypatch, is_compiled):
    """A fused operation would give 2 ** -60, which is what the product loses."""
    monkeypatch.setattr(sums, "_compiled", built if is_compiled else None)
    total, value, factor = np.empty(8), np.full(8, 1 + 2**-20, np.float32), 1 + 2.0**-40
    sums.add(np.full(8, -1, np.float32), total, 1 + 2.0**-20 + 2.0**-40, begins=True)
    sums.add(value, total, factor, begins=False)
    assert (total == 0).all()


@pytest.mark.parametrize("size", [0, 1, 3])
def test_buffers_of_other_sizes_are_refused(built, size):
    with pytest.raises(ValueError, match="as many elements"):
        built.add(np.zeros(2, np.float32), np.zeros(size), 1.0, True)
    with pytest.raises(ValueError, match="as many elements"):
        built.divide(np.zeros(size), 1.0, np.zeros(2, np.float32))
