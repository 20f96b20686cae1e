"""Two tensors compared in blocks, against torch's own arithmetic on the whole of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard.checks.compare import Tolerance, find_differences

FLOATS = ("float64", "float32", "bfloat16", "float16")
OTHERS = ("float8_e4m3fn", "float8_e5m2", "int64", "int32", "int8", "uint8", "bool", "complex64")


def entries(tmp_path, name, tensor):
    """A tensor in a file, as an entry."""
    path = tmp_path / f"{name}.pt"
    torch.save({"x": tensor}, path)
    with reshard.open(path) as checkpoint:
        return next(iter(checkpoint.manifest.entries.values()))


def compare(a, b, tmp_path, tolerance=None, dtype=None, window_bytes=64):
    one, two = entries(tmp_path, "a", a), entries(tmp_path, "b", b)
    pairs = [(one, two, dtype or one.dtype)]
    found = find_differences(
        pairs,
        tolerance or Tolerance(),
        workers=2,
        window_bytes=window_bytes,
        progress=lambda _n: None,
    )
    return found.get(0)


@pytest.mark.parametrize("name", FLOATS + OTHERS)
def test_one_element_among_many(name, tmp_path):
    dtype = getattr(torch, name)
    a = torch.arange(120).reshape(5, 24).remainder(2).to(dtype)
    b = a.clone()
    b[3, 7] = 1 - b[3, 7].to(torch.int64).item() if name != "complex64" else 1 - b[3, 7]
    assert compare(a, a, tmp_path) is None
    found = compare(a, b, tmp_path)
    assert (found.first, found.count) == (3 * 24 + 7, 1)
    assert found.max_abs == 1.0
    assert found.first_values == (a[3, 7].item(), b[3, 7].item())


@pytest.mark.parametrize("name", FLOATS)
def test_the_largest_distances_are_those_of_torch(name, tmp_path):
    dtype = getattr(torch, name)
    chance = torch.Generator().manual_seed(3)
    a = torch.randn(7, 31, generator=chance, dtype=torch.float64).to(dtype)
    b = (a.double() * (1 + 0.01 * torch.randn(7, 31, generator=chance, dtype=torch.float64))).to(
        dtype
    )
    found = compare(a, b, tmp_path)
    apart = (a.double() - b.double()).abs()
    unequal = a != b
    assert found.count == int(unequal.sum())
    assert found.first == int(unequal.flatten().nonzero()[0])
    assert found.max_abs == float(apart.max())
    largest = torch.maximum(a.double().abs(), b.double().abs())
    assert found.max_rel == pytest.approx(float((apart / largest)[unequal].max()), rel=1e-12)


def test_ulps_count_the_numbers_between(tmp_path):
    a = torch.tensor([1.0, -1.0, 0.0, 1e-45, -0.0])
    b = a.clone()
    for _ in range(3):
        b = torch.nextafter(b, torch.tensor(math.inf))
    assert compare(a, b, tmp_path).max_ulp == 3
    assert compare(a, b, tmp_path, Tolerance(ulp=3)) is None
    assert compare(a, b, tmp_path, Tolerance(ulp=2)).count == 5
    zero = torch.tensor([0.0])
    assert compare(zero, -zero, tmp_path).max_ulp == 0
    assert compare(zero, -zero, tmp_path).count == 1, "other bits"


def test_bfloat16_ulps(tmp_path):
    a = torch.tensor([1.0], dtype=torch.bfloat16)
    b = (a.view(torch.int16) + 5).view(torch.bfloat16)
    assert compare(a, b, tmp_path).max_ulp == 5


NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=60)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=40), st.sampled_from([0, 1e-3]))
def test_tolerance_is_that_of_allclose(tmp_path_factory, pairs, rtol):
    a, b = (torch.tensor(side) for side in zip(*pairs, strict=True))
    tolerance = Tolerance(atol=1e-3, rtol=rtol)
    found = compare(a, b, tmp_path_factory.mktemp("x"), tolerance)
    near = torch.isclose(a.double(), b.double(), rtol=rtol, atol=1e-3, equal_nan=True)
    assert (found.count if found else 0) == int((~near).sum())


def test_not_finite_values_are_counted_apart(tmp_path):
    a = torch.tensor([1.0, math.nan, math.inf, 2.0])
    b = torch.tensor([1.5, 1.0, 1.0, math.nan])
    found = compare(a, b, tmp_path)
    assert (found.count, found.not_finite, found.max_abs) == (4, 3, 0.5)


def test_as_if_cast(tmp_path):
    a = torch.randn(9, 9)
    b = a.to(torch.bfloat16)
    two = entries(tmp_path, "c", b)
    assert compare(a, b, tmp_path, dtype=two.dtype) is None
    assert compare(a, b.float(), tmp_path) is not None
