"""Two tensors compared in blocks, against torch's own arithmetic on the whole of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard.checks.compare import Tolerance, find_differences
from reshard.errors import UsageError

FLOATS = ("float64", "float32", "bfloat16", "float16")
OTHERS = ("float8_e4m3fn", "float8_e5m2", "int64", "int32", "int8", "uint8", "bool", "complex64")


def entries(tmp_path, name, tensor):
    """Return a tensor in a file as an entry."""
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


@pytest.mark.parametrize("name", ["int64", "uint64", "int32", "int8", "uint8", "bool"])
def test_ulps_do_not_apply_to_integers_and_bools(name, tmp_path):
    a = torch.tensor([0, 1, 1], dtype=getattr(torch, name))
    b = torch.tensor([0, 1, 0], dtype=getattr(torch, name))
    found = compare(a, b, tmp_path, Tolerance(ulp=4))
    assert (found.first, found.count, found.max_ulp) == (2, 1, 0)


def test_integers_that_float64_does_not_have_are_different(tmp_path):
    a = torch.tensor([2**53, 2**63 - 1, -(2**63)])
    b = torch.tensor([2**53 + 1, -(2**63), -(2**63) + 1])
    found = compare(a, b, tmp_path, Tolerance(atol=0.5))
    assert (found.count, found.max_abs) == (3, 2.0**64)
    assert found.first_values == (2**53, 2**53 + 1)
    assert compare(a, b, tmp_path, Tolerance(atol=1)).count == 1


def next_ulps(tensor, count):
    """Return each element, all positive, moved away from 0 by a number of ulp."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return (tensor.view(words) + count).view(tensor.dtype)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_ulps_of_complex_numbers_are_those_of_their_parts(name, tmp_path):
    dtype = getattr(torch, name)
    real = torch.tensor([1.0, 1.5, 1.25], dtype=dtype.to_real())
    a = torch.complex(real, real)
    b = torch.complex(next_ulps(real, 2), next_ulps(real, 3))
    assert compare(a, b, tmp_path).max_ulp == 3
    assert compare(a, b, tmp_path, Tolerance(ulp=3)) is None
    assert compare(a, b, tmp_path, Tolerance(ulp=2)).count == 3


def test_each_part_of_a_complex_number_that_is_not_finite_counts(tmp_path):
    nan, inf = math.nan, math.inf
    a = [complex(nan, 1), complex(nan, 1), complex(inf, 1), complex(inf, 1), complex(nan, 1)]
    b = [complex(nan, 5), complex(1, nan), complex(inf, 2), complex(-inf, 1), complex(nan, 1)]
    a, b = torch.tensor(a), torch.tensor(b)
    a.view(torch.int32)[-2] += 1  # the payload of the last NaN
    for tolerance in (Tolerance(ulp=4), Tolerance(atol=1e-3), Tolerance(rtol=1e-3)):
        assert compare(a, b, tmp_path, tolerance).count == 4


FLOAT8 = ["float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_elements_are_compared_as_torch_reads_them(name, tmp_path):
    codes = torch.arange(256, dtype=torch.uint8)
    for shift in (1, 128):
        a, b = (each.view(getattr(torch, name)) for each in (codes, codes + shift))
        one, two = a.double(), b.double()
        apart = (one - two).abs()
        found = compare(a, b, tmp_path)
        assert found.count == 256
        assert found.max_abs == float(apart[apart.isfinite()].max())
        near = torch.isclose(one, two, rtol=0, atol=1e-3, equal_nan=True)
        near_count = compare(a, b, tmp_path, Tolerance(atol=1e-3)).count
        assert near_count == int((~near).sum())


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_ulps_count_the_numbers_between(name, tmp_path):
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    values = codes.double()
    ordered = values[values.isfinite()].unique()
    kept = {float(value): code for value, code in zip(values, codes.view(torch.uint8), strict=True)}
    steps = torch.stack([kept[float(value)] for value in ordered]).view(codes.dtype)
    assert compare(steps[:-2].clone(), steps[2:].clone(), tmp_path).max_ulp == 2
    assert compare(steps[:-2].clone(), steps[2:].clone(), tmp_path, Tolerance(ulp=2)) is None
    missed = compare(steps[:-2].clone(), steps[2:].clone(), tmp_path, Tolerance(ulp=1))
    assert missed.count == len(ordered) - 2


@pytest.mark.parametrize("name", FLOATS)
def test_only_numbers_are_ulps_apart(name, tmp_path):
    dtype = getattr(torch, name)
    info = torch.finfo(dtype)
    a = torch.tensor([math.inf, math.inf, math.nan, info.max, 0.0, math.nan], dtype=dtype)
    b = torch.tensor([info.max, -math.inf, 1.0, info.min, -0.0, math.nan], dtype=dtype)
    b.view(torch.uint8)[-b.itemsize] += 1  # the payload of the NaN
    assert compare(a, b, tmp_path).count == 6
    found = compare(a, b, tmp_path, Tolerance(ulp=4))
    assert (found.first, found.count, found.not_finite) == (0, 4, 3 if name != "float64" else 4)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    largest = torch.tensor(info.max, dtype=dtype).view(bits).item()
    assert found.max_ulp == 2 * largest


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


def test_diff_with_ulps_reports_other_integers(tmp_path):
    weight = torch.ones(3)
    torch.save({"w": weight, "count": torch.tensor(2**60)}, tmp_path / "a.pt")
    torch.save({"w": next_ulps(weight, 2), "count": torch.tensor(2**60 + 1)}, tmp_path / "b.pt")
    report = reshard.diff(tmp_path / "a.pt", tmp_path / "b.pt", ulp=2)
    assert [each.fqn for each in report.unequal] == ["count"]
    assert (report.unequal[0].a, report.unequal[0].b) == (str(2**60), str(2**60 + 1))
    with pytest.raises(UsageError):
        reshard.diff(tmp_path / "a.pt", tmp_path / "b.pt", ulp=-1)
