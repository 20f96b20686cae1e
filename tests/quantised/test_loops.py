"""The compiled loops and those of numpy give the same bits, for every code and for odd numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.core.dtypes import BFLOAT16, E8M0, FLOAT32
from reshard.engine.move import cast
from reshard.quantised import decode, encode, loops
from reshard.quantised.scaled import E2M1, INT4, INT8
from tests.quantised.models import (
    FP8,
    write_model,
)
from tests.support.compiled import build_module

FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
SPECIAL = [0.0, 1.0, np.inf, np.nan, 1e-45, 1e-40, 1.2e-38, 3.4e38, 2.0**-127, 2.0**-133]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_module(tmp_path_factory, "reshard.quantised._codes")


@pytest.fixture
def both(built, monkeypatch):
    """Return what a function makes with the module and without."""

    def call(function):
        made = []
        for module in (built, None):
            monkeypatch.setattr(loops, "_compiled", module)
            made.append(function())
        return made

    return call


def random_floats(*shape):
    """Return floats of any bits: infinities, NaN and subnormals too."""
    return np.random.default_rng(5).integers(0, 1 << 32, shape, np.uint32).view(np.float32)


def encode_matrix(values, *arguments):
    out = np.empty(values.shape, np.uint8)
    loops.encode(values, *arguments, out)
    return out


def encode_pairs(values, *arguments):
    out = np.empty((len(values) // 2, values.shape[1]), np.uint8)
    loops.encode_pairs(values, *arguments, out)
    return out


def same_bits(one, other):
    return (one.view(np.uint32) == other.view(np.uint32)).all()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_code_times_every_kind_of_scale(both, dtype):
    special = np.array(SPECIAL, "<f4")
    scales = np.concatenate([special, -special, random_floats(2001)])
    codes = np.repeat(np.arange(256, dtype=np.uint8)[:, None], len(scales), axis=1)
    table = decode.decode_table(dtype)

    def products():
        out = np.empty(codes.shape, np.float32)
        loops.decode(codes, table, dtype, scales[None], (len(codes), 1), out)
        return out

    ours, wanted = both(products)
    assert same_bits(ours, wanted)
    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).float()
    theirs = (values[:, None] * torch.from_numpy(scales)).numpy()
    assert ((ours == theirs) | (np.isnan(ours) & np.isnan(theirs))).all()


@pytest.mark.parametrize("code", [E2M1, INT4, INT8])
@pytest.mark.parametrize(("rows", "columns", "block"), [(5, 4502, (1, 16)), (7, 96, (3, 32))])
def test_codes_of_blocks_are_decoded_alike(both, code, rows, columns, block):
    packed = code != INT8
    draw = np.random.default_rng(7)
    codes = draw.integers(0, 256, rows * columns // (2 if packed else 1), np.uint8)
    grid = -(-rows // block[0]), -(-columns // block[1])
    zeros = draw.integers(-8, 8, grid).astype(np.float32) if code != E2M1 else None

    def values():
        out = np.empty((rows, columns), np.float32)
        loops.decode(
            codes, decode.decode_table(code), code, random_floats(*grid), block, out, zeros
        )
        return out

    ours, wanted = both(values)
    assert ((ours.view("u4") == wanted.view("u4")) | (np.isnan(ours) & np.isnan(wanted))).all()


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("columns", [301, 4501])
def test_products_are_rounded_like_a_cast(built, monkeypatch, dtype, columns):
    monkeypatch.setattr(loops, "_compiled", built)
    codes = np.random.default_rng(3).integers(0, 256, (7, columns), np.uint8)
    scales, table = random_floats(2, columns), decode.decode_table(dtype)
    codes[:, 0] = 0x3C
    scales[:, 0] = 3.4e38 / table[0x3C]  # finite in float32, but not in bfloat16
    products, wanted = np.empty(codes.shape, np.float32), np.empty(codes.shape, "<u2")
    assert loops.decode(codes, table, dtype, scales, (4, 1), products) == 0
    counts = cast.cast(products.reshape(-1), wanted.reshape(-1), FLOAT32, BFLOAT16, clamp=False)
    rounded = np.empty(codes.shape, "<u2")
    assert (loops.decode(codes, table, dtype, scales, (4, 1), rounded), 0) == counts
    assert counts[0] >= 7
    assert (rounded == wanted).all()


@pytest.mark.parametrize("dtype", [*FLOAT8, "e2m1"])
def test_values_around_every_tie_become_the_same_codes(both, dtype):
    magnitudes = encode._list_magnitudes(dtype)
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (halves | lower[:, None]).view(np.float32)
    ones = np.ones((1, values.shape[1]), np.float32)
    ours, wanted = both(lambda: encode_matrix(values, ones, len(values), magnitudes, dtype))
    assert (ours == wanted).all()
    if dtype == "float8_e5m2":  # torch's cast rounds alike, but does not saturate
        is_finite = np.abs(values) <= magnitudes[-1]
        theirs = torch.from_numpy(values).to(torch.float8_e5m2).view(torch.uint8).numpy()
        assert (ours == theirs)[is_finite].all()


@pytest.mark.parametrize("dtype", [*FLOAT8, "e2m1"])
@pytest.mark.parametrize(("rows", "high"), [(50, 8), (5, 1), (7, 128), (16, 16), (0, 8)])
def test_blocks_with_uneven_edges(both, dtype, rows, high):
    values = random_floats(rows, 301)
    lines = np.abs(random_floats(-(-rows // high), 301))
    lines[~(np.isfinite(lines) & (lines > 0))] = 2.0**-9
    magnitudes = encode._list_magnitudes(dtype)
    ours, wanted = both(lambda: encode_matrix(values, lines, high, magnitudes, dtype))
    assert (ours == wanted).all()


@pytest.mark.parametrize(("rows", "high"), [(50, 8), (5, 1), (7, 128), (16, 16), (0, 8)])
def test_maxima_and_comparisons(both, rows, high):
    values = random_floats(rows, 301)
    ours, wanted = both(lambda: loops.find_largest(values, high))
    assert ((ours == wanted) | (np.isnan(ours) & np.isnan(wanted))).all()
    bits = torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    rounded = (bits.astype(np.uint32) << 16).view(np.float32)
    rounded[np.isnan(values)] = np.uint32(0x7FC00000).view(np.float32)
    mixed = np.where(np.arange(301) % 3 == 0, values, rounded)
    mixed[rows // 2 : rows // 2 + 1, ::7] = 1
    ours, wanted = both(lambda: loops.compare(mixed, values, high))
    assert (ours == wanted).all()
    if rows > high:
        assert set(np.unique(ours)) >= {0, 1, 2}


@pytest.mark.parametrize(("rows", "high"), [(50, 8), (5, 1), (7, 128), (0, 8)])
def test_bfloat16_has_the_results_of_its_values_in_float32(both, rows, high):
    halves = random_floats(rows, 2501).view("<u2")[:, ::2].copy()  # wider than what is widened
    values = loops.widen(halves)
    lines = np.full((-(-rows // high), 2501), 2.0**-9, np.float32)
    magnitudes = encode._list_magnitudes(E2M1)
    for other in (halves, values):
        for made in both(lambda other=other: loops.compare(halves, other, high)):
            assert (made == loops.compare(values, values, high)).all()
    for made in both(lambda: loops.find_largest(halves, high)):
        assert np.array_equal(made, loops.find_largest(values, high), equal_nan=True)
    for made in both(lambda: encode_matrix(halves, lines, high, magnitudes, "e2m1")):
        assert (made == encode_matrix(values, lines, high, magnitudes, "e2m1")).all()


@pytest.mark.parametrize(("rows", "high"), [(64, 32), (38, 8), (2, 2), (0, 8)])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("least", "most"), [(100, 140), (3, 252), (0, 254)])
def test_codes_of_two_rows_share_bytes(both, rows, high, itemsize, least, most):
    values = random_floats(rows, 2501)
    values = values.view("<u2")[:, ::2].copy() if itemsize == 2 else values
    draw = np.random.default_rng(1)
    exponents = draw.integers(least, most + 1, (-(-rows // high), 2501), np.uint8)
    powers, magnitudes = decode.decode_table(E8M0.name), encode._list_magnitudes(E2M1)
    codes = encode_matrix(values, powers[exponents], high, magnitudes, "e2m1")
    for made in both(lambda: encode_pairs(values, exponents, powers, high, magnitudes)):
        assert (made == codes[::2] + 16 * codes[1::2]).all()


@pytest.mark.parametrize("exponent", [3, 4, 126, 127, 128, 251, 252])
def test_every_bfloat16_becomes_the_code_of_its_quotient(both, exponent):
    halves = np.arange(1 << 16, dtype="<u2").reshape(2, -1)
    exponents = np.full((1, 1 << 15), exponent, np.uint8)
    powers, magnitudes = decode.decode_table(E8M0.name), encode._list_magnitudes(E2M1)
    ours, wanted = both(lambda: encode_pairs(halves, exponents, powers, 2, magnitudes))
    assert (ours == wanted).all()


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize(("rows", "high"), [(50, 8), (5, 1), (7, 128), (0, 8)])
def test_codes_are_compared_like_their_products(both, dtype, rows, high):
    codes = np.random.default_rng(8).integers(0, 256, (rows, 2501), np.uint8)
    lines, table = random_floats(-(-rows // high), 2501), decode.decode_table(dtype)
    products = np.empty(codes.shape, np.float32)
    loops.decode(codes, table, dtype, lines, (high, 1), products)
    products[rows // 2 : rows // 2 + 1, ::7] = 1
    halves = encode._round(products, BFLOAT16)
    wanted = np.empty(codes.shape, np.float32)
    loops.decode(codes, table, dtype, lines, (high, 1), wanted)

    def compared():
        return [
            loops.compare_codes(values, codes, table, lines, high, dtype)
            for values in (products, halves)
        ]

    for made in both(compared):
        for found, values in zip(made, (products, halves), strict=True):
            assert (found == loops.compare(values, wanted, high)).all()


@pytest.mark.parametrize(
    "shape", [(0, 5), (1, 1), (16, 16), (15, 33), (48, 17), (35, 64), (537, 34)]
)
def test_transposed_bytes(both, shape):
    matrix = np.random.default_rng(7).integers(0, 256, shape, np.uint8)
    first, count = shape[1] // 3, shape[1] // 2

    def put():
        out = np.zeros((count, shape[0] + 5), np.uint8)
        loops.transpose_into(out, 3, matrix, first)
        return out

    some = matrix[:, first : first + count].T
    for made in both(put):
        assert (made == np.pad(some, ((0, 0), (3, 2)))).all()
    assert all((made == matrix.T).all() for made in both(lambda: loops.transpose(matrix)))
    for made in both(lambda: loops.transpose(matrix, first, shape[1])):
        assert (made == matrix[:, first:].T).all()


@pytest.mark.parametrize(("least", "most"), [(0, 254), (1, 252), (2, 252), (2, 253)])
def test_any_part_of_transposed_codes(both, least, most):
    """With scales from 2 to 252, all products are normal numbers."""
    draw = np.random.default_rng(6)
    codes = draw.integers(0, 256, (32, 77), np.uint8)
    scales = draw.integers(least, most + 1, (2, 77), np.uint8)
    scales[:, 76] = least, most
    for row, column, columns, at, width in [
        (0, 0, 64, 0, 77),
        (5, 3, 40, 2, 50),
        (76, 63, 1, 0, 9),
    ]:

        def part(shape=(columns, width), origin=(row, column), at=at):
            out = np.zeros(shape, "<u2")
            loops.decode_columns(codes, scales, decode.build_products(), origin, at, out)
            return out

        ours, wanted = both(part)
        assert (ours == wanted).all()


@pytest.mark.parametrize(("rows", "high"), [(64, 32), (32, 32), (6, 2)])
@pytest.mark.parametrize("most", [252, 254])
def test_transposed_codes_are_compared_like_their_products(both, rows, high, most):
    draw, columns = np.random.default_rng(4), 2501
    codes = draw.integers(0, 256, (rows // 2, columns), np.uint8)
    scales = draw.integers(254 - most, most + 1, (rows // high, columns), np.uint8)
    table, products = decode.build_products(), np.empty((rows, columns), "<u2")
    loops.decode_columns(codes, scales, table, (0, 0), 0, products)
    mixed = products.copy()
    mixed[rows // 2 : rows // 2 + 1, ::7] += 1
    for values in (products, mixed, loops.widen(mixed)):
        wanted = loops.compare(values, products, high)
        for made in both(lambda v=values: loops.compare_columns(v, codes, scales, table, high)):
            assert (made == wanted).all()


def test_the_module_refuses_other_sizes(built):
    eight, line = bytes(8), bytes(16)
    with pytest.raises(ValueError, match="size of the matrix"):
        built.decode(eight, bytes(1024), b"", line, bytearray(28), 4, 4, 2, 1, "float8_e5m2")
    with pytest.raises(ValueError, match="size of the matrix"):
        built.decode(eight, bytes(1024), b"", line, bytearray(32), 4, 4, 1, 1, "float8_e4m3fn")
    with pytest.raises(ValueError, match="size of the matrix"):
        built.decode(eight, bytes(1024), line, bytes(32), bytearray(64), 4, 4, 2, 1, "e2m1")
    with pytest.raises(ValueError, match="size of the matrix"):
        built.encode(bytes(32), 4, line, bytearray(8), 4, 2, "float8_e8m0fnu")
    with pytest.raises(ValueError, match="size of the matrix"):
        built.encode(bytes(32), 2, line, bytearray(8), 4, 2, "e2m1")
    for values, codes, columns, high in (
        (32, 4, 4, 3),
        (32, 8, 4, 2),
        (48, 6, 4, 2),
        (24, 4, 4, 2),
        (32, 4, 0, 2),
    ):
        with pytest.raises(ValueError, match="size of the matrix"):
            built.encode_pairs(bytes(values), 4, line, bytearray(codes), columns, high)
    for itemsize, columns in ((4, 0), (0, 4), (8, 4)):
        with pytest.raises(ValueError, match="size of the matrix"):
            built.find_largest(bytes(32), itemsize, bytearray(16), columns, 2)
    with pytest.raises(ValueError, match="size of the matrix"):
        built.compare(bytes(32), 4, bytes(28), 4, bytearray(16), 4, 2)
    for codes, scales in ((bytes(4), line), (eight, bytes(32))):
        with pytest.raises(ValueError, match="size of the matrix"):
            built.compare_codes(
                *(bytes(32), 4, codes, bytes(1024), scales, bytearray(16), 4, 2, "float8_e5m2")
            )
    with pytest.raises(ValueError, match="size of the matrix"):
        built.transpose(eight, 4, 0, bytearray(12), 3, 2)
    for values, codes, scales in ((32, 4, 4), (32, 8, 8), (30, 8, 4)):
        with pytest.raises(ValueError, match="size of the matrix"):
            built.compare_columns(
                *(bytes(values), 2, bytes(codes), bytes(scales), bytearray(16), 4, 4)
            )
    for first, at in ((1, 0), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="size of the matrix"):
            built.transpose(eight, 4, first, bytearray(16), 4, at)
    with pytest.raises(ValueError, match="size of the matrix"):
        built.decode_columns(eight, eight, bytearray(16), 8, 0, 2, 1, 0, 32)


def test_products_that_overflow_bfloat16_are_counted_and_clamped(both, tmp_path):
    codes = torch.full((3, 4), 0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 448
    codes[0] = 1
    scales = torch.tensor([[3.4e38 / 448]])  # 448 of them round to 2 ** 128
    model = write_model(tmp_path / "fp8", {"a.weight": codes, "a.weight_scale_inv": scales}, FP8)

    def merged():
        found = []
        for action in ("allow", "clamp"):
            out = tmp_path / f"{action}{len(list(tmp_path.iterdir()))}.safetensors"
            report = reshard.merge(model, out, dtype="bf16", on_overflow=action)
            assert report.overflowed == {"a.weight": 8}
            found.append(load_file(out)["a.weight"].isinf().sum().item())
        return found

    assert both(merged) == [[8, 0], [8, 0]]
