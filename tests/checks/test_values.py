"""The facts about elements are those that torch computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.checks import element_facts
from reshard.core import dtypes

FLOATS = [d for d in dtypes.ALL if d.family in ("float", "float8", "complex")]
OTHERS = [d for d in dtypes.ALL if d.family in ("int", "bool")]


def seen(raw: bytes, dtype, **options):
    return element_facts.examine(bytearray(raw), dtype, 0, signs=True, **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(data=st.data())
def test_any_bits_are_told_as_torch_tells_them(dtype, data):
    numel = data.draw(st.integers(1, 9))
    raw = data.draw(st.binary(min_size=numel * dtype.itemsize, max_size=numel * dtype.itemsize))
    wide = torch.complex128 if dtype.family == "complex" else torch.float64
    numbers = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype.name)).to(wide)
    parts = torch.view_as_real(numbers) if dtype.family == "complex" else numbers[:, None]
    found = seen(raw, dtype)
    assert found.nan == int(parts.isnan().sum())
    assert found.infinite == int(parts.isinf().sum())
    strange = (~parts.isfinite()).any(dim=1).nonzero().flatten().tolist()
    assert found.first_nonfinite == (strange[0] if strange else None)
    assert found.is_zero == bool((parts == 0).all())
    if dtype.family == "float":
        negative = (parts[:, 0] < 0).nonzero().flatten().tolist()
        assert found.negative == len(negative)
        assert found.first_negative == (negative[0] if negative else None)


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_other_elements_are_zero_or_not(dtype):
    assert seen(bytes(6 * dtype.itemsize), dtype).is_zero
    raw = bytearray(6 * dtype.itemsize)
    raw[-1] = 1
    assert seen(raw, dtype) == element_facts.ElementFacts(is_zero=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_places_count_from_the_start_of_the_tensor(dtype, monkeypatch):
    monkeypatch.setattr(element_facts, "_BLOCK", 4)
    numbers = torch.ones(11, dtype=getattr(torch, dtype))
    numbers[6], numbers[9], numbers[10] = float("inf"), -2, float("nan")
    raw = bytearray(numbers.view(torch.uint8).numpy().tobytes())
    found = element_facts.examine(raw, dtypes.BY_NAME[dtype], 100, signs=True)
    assert (found.first_nonfinite, found.first_negative) == (106, 109)
    assert (found.nan, found.infinite, found.negative) == (1, 1, 1)
    assert element_facts.examine(raw, dtypes.BY_NAME[dtype], 0, signs=False).negative == 0
