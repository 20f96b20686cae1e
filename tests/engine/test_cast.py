"""Casts against torch, bit for bit; a NaN stays a NaN, its payload is the processor's own.

Every test runs with numpy and, where there is a C compiler, with the compiled module.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reshard.core import dtypes
from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from reshard.engine.move import compiled
from reshard.engine.move.cast import cast, get_numpy_dtype
from reshard.engine.move.fill import Filler
from reshard.engine.planning.copies import Copy
from reshard.errors import CorruptError, UnsupportedError
from reshard.system.checksum import crc32
from reshard.system.files import SourceFiles
from tests.support.compiled import build_module

UNSIGNED = {2: "<u2", 4: "<u4", 8: "<u8"}
SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ALL_16 = np.arange(1 << 16, dtype="<u2")
MAX = {FLOAT16: 65504.0, BFLOAT16: 3.3895313892515355e38, FLOAT32: 3.4028234663852886e38}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_module(tmp_path_factory, "reshard.engine.move._cast")


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def module(request, monkeypatch):
    compiles = request.param == "compiled"
    monkeypatch.setattr(
        compiled, "_compiled", request.getfixturevalue("built") if compiles else None
    )


def torch_cast(bits, dtype, target_dtype):
    signed = torch.from_numpy(bits.copy().view(f"<i{dtype.itemsize}"))
    made = signed.view(getattr(torch, dtype.name)).to(getattr(torch, target_dtype.name))
    unsigned = UNSIGNED[target_dtype.itemsize]
    return made.view(SIGNED[target_dtype.itemsize]).numpy().view(unsigned)


def our_cast(bits, dtype, target_dtype, *, clamp=False):
    source = bits.copy().view(get_numpy_dtype(dtype, casting=True))
    target = np.empty(bits.shape, get_numpy_dtype(target_dtype, casting=True))
    counts = cast(source, target, dtype, target_dtype, clamp=clamp)
    return target.view(UNSIGNED[target_dtype.itemsize]), counts


def numbers(bits, dtype):
    """Return the values as float64, which holds every smaller float."""
    signed = torch.from_numpy(bits.copy().view(f"<i{dtype.itemsize}"))
    return signed.view(getattr(torch, dtype.name)).to(torch.float64).numpy()


def assert_as_torch(bits, dtype, target_dtype):
    ours, (overflowed, _) = our_cast(bits, dtype, target_dtype)
    theirs = torch_cast(bits, dtype, target_dtype)
    nan = np.isnan(numbers(bits, dtype))
    wrong = np.flatnonzero((ours != theirs) & ~nan)
    assert wrong.size == 0, f"{bits[wrong[:3]]}: {ours[wrong[:3]]}, torch {theirs[wrong[:3]]}"
    assert (np.isnan(numbers(ours, target_dtype)) == nan).all()
    made_infinite = np.isinf(numbers(ours, target_dtype)) & np.isfinite(numbers(bits, dtype))
    assert overflowed == np.count_nonzero(made_infinite)


@pytest.mark.parametrize(
    ("dtype", "target_dtype"),
    [
        (BFLOAT16, FLOAT32),
        (FLOAT16, FLOAT32),
        (BFLOAT16, FLOAT16),
        (FLOAT16, BFLOAT16),
        (BFLOAT16, FLOAT64),
        (FLOAT16, FLOAT64),
    ],
)
def test_every_16_bit_pattern_is_cast_as_torch_does(dtype, target_dtype):
    assert_as_torch(ALL_16, dtype, target_dtype)


def boundaries(dtype):
    """Return float32 patterns at, one below and one above every value and tie of a 16-bit dtype."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = numbers(ALL_16, dtype)
        values = np.unique(values[np.isfinite(values)])
        ties = (values[1:] + values[:-1]) / 2
        beyond = MAX[dtype] * np.array([1.0001, 1.001953125, 1.00390625, 1.01])
        points = np.concatenate([values, ties, beyond, -beyond]).astype("<f4").view("<u4")
    return np.concatenate([points - np.uint32(1), points, points + np.uint32(1)])


@pytest.mark.parametrize("target_dtype", [BFLOAT16, FLOAT16])
def test_float32_is_rounded_as_torch_does_around_every_boundary(target_dtype):
    assert_as_torch(boundaries(target_dtype), FLOAT32, target_dtype)


@pytest.mark.parametrize("target_dtype", [BFLOAT16, FLOAT16])
def test_random_float32_patterns_are_cast_as_torch_does(target_dtype):
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 19, dtype="<u4")
    assert_as_torch(bits, FLOAT32, target_dtype)


@pytest.mark.parametrize("target_dtype", [BFLOAT16, FLOAT16])
def test_subnormals_specials_and_nans_are_cast_as_torch_does(target_dtype):
    low = np.arange(1 << 12, dtype="<u4")
    edges = np.array([0x00800000, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F7F8001], "<u4")
    nans = 0x7F800000 + np.concatenate([low, low << 11, 0x7FFFFF - low])
    bits = np.concatenate([low, 0x007FFFFF - low, edges, nans]).astype("<u4")
    assert_as_torch(np.concatenate([bits, bits | 0x80000000]).astype("<u4"), FLOAT32, target_dtype)


def test_nan_in_bfloat16_has_one_pattern():
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], "<u4")
    assert our_cast(bits, FLOAT32, BFLOAT16)[0].tolist() == [0x7FC0] * 5


@pytest.mark.parametrize("target_dtype", [BFLOAT16, FLOAT16])
def test_float64_becomes_16_bits_as_torch_does(target_dtype):
    """By way of float32: what lies within half of its last bit of a tie is rounded as the tie."""
    singles = boundaries(target_dtype).view("<f4")
    with np.errstate(invalid="ignore"):
        near = singles.astype("<f8").view("<u8")
    random = np.random.default_rng(3).integers(0, 1 << 63, 1 << 16, dtype="<u8")
    bits = np.concatenate([near, near + np.uint64(1), near - np.uint64(1), random])
    assert_as_torch(bits, FLOAT64, target_dtype)


def test_float64_is_cast_to_float32_as_torch_does():
    chance = np.random.default_rng(2)
    singles = chance.integers(0, 1 << 32, 1 << 16, dtype="<u4").view("<f4")
    with np.errstate(invalid="ignore"):
        near = singles.astype("<f8").view("<u8")
    tie = near | np.uint64(1 << 28)
    bits = np.concatenate(
        [
            chance.integers(0, 1 << 63, 1 << 16, dtype="<u8"),
            near,
            tie - np.uint64(1),
            tie,
            tie + np.uint64(1),
            np.array([0x47EFFFFFEFFFFFFF, 0x47EFFFFFF0000000, 0x36A0000000000000], "<u8"),
        ]
    )
    assert_as_torch(bits, FLOAT64, FLOAT32)


@pytest.mark.parametrize(
    ("dtype", "target_dtype"),
    [
        (FLOAT64, FLOAT32),
        (FLOAT64, FLOAT16),
        (FLOAT64, BFLOAT16),
        (FLOAT32, FLOAT16),
        (FLOAT32, BFLOAT16),
        (BFLOAT16, FLOAT16),
    ],
)
def test_overflow_is_counted_and_clamped(dtype, target_dtype):
    huge = {FLOAT64: 1e300, FLOAT32: 3.4028234663852886e38, BFLOAT16: 1e38}[dtype]
    values = [huge, -huge, float("inf"), -float("inf"), float("nan"), 1.0, 0.0]
    source = torch.tensor(values, dtype=getattr(torch, dtype.name))
    bits = source.view(SIGNED[dtype.itemsize]).numpy().view(UNSIGNED[dtype.itemsize])
    ours, (overflowed, flushed) = our_cast(bits, dtype, target_dtype)
    infinite = float("inf")
    assert (overflowed, flushed) == (2, 0)
    assert numbers(ours, target_dtype)[:4].tolist() == [infinite, -infinite, infinite, -infinite]
    clamped, (overflowed, _) = our_cast(bits, dtype, target_dtype, clamp=True)
    limit = MAX[target_dtype]
    assert overflowed == 2
    assert numbers(clamped, target_dtype)[:4].tolist() == [limit, -limit, infinite, -infinite]
    assert np.isnan(numbers(clamped, target_dtype)[4])
    assert numbers(clamped, target_dtype)[5:].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "target_dtype", "tiny"),
    [
        (FLOAT32, FLOAT16, 1e-9),
        (FLOAT64, FLOAT32, 1e-60),
        (FLOAT64, FLOAT16, 1e-9),
        (FLOAT64, BFLOAT16, 1e-60),
        (BFLOAT16, FLOAT16, 1e-20),
    ],
)
def test_values_made_zero_are_counted(dtype, target_dtype, tiny):
    source = torch.tensor([tiny, -tiny, 0.0, -0.0, 1.0], dtype=getattr(torch, dtype.name))
    bits = source.view(SIGNED[dtype.itemsize]).numpy().view(UNSIGNED[dtype.itemsize])
    ours, counts = our_cast(bits, dtype, target_dtype)
    made = numbers(ours, target_dtype)
    assert made.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert np.signbit(made).tolist() == [False, True, False, True, False]
    assert counts == (0, 2)


def test_counts_are_added_over_blocks():
    bits = np.tile(np.array([0x7F7FFFFF, 0x3F800000, 0x00000100], "<u4"), 100_001)
    for target_dtype in (BFLOAT16, FLOAT16):
        _, (overflowed, flushed) = our_cast(bits, FLOAT32, target_dtype)
        assert overflowed == 100_001
        assert flushed == (100_001 if target_dtype == FLOAT16 else 0)
    assert_as_torch(bits, FLOAT32, BFLOAT16)


SHAPES = [(), (1,), (0,), (7,), (5, 6), (3, 4, 5), (2, 1, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "target_dtype"),
    [(FLOAT32, BFLOAT16), (FLOAT32, FLOAT16), (BFLOAT16, FLOAT32), (FLOAT16, BFLOAT16)],
)
def test_strided_and_transposed_sides_change_nothing(shape, dtype, target_dtype):
    size = int(np.prod(shape))
    integers = np.random.default_rng(3).integers
    bits = integers(0, 1 << 15, (size, 2), dtype="<u2").repeat(dtype.itemsize // 2, axis=1)
    flat = bits.reshape(-1)[: size * dtype.itemsize // 2].copy().view(UNSIGNED[dtype.itemsize])
    wanted = our_cast(flat, dtype, target_dtype)[0].reshape(shape)
    for forms in np.ndindex(3, 3):
        source = arranged(shape, get_numpy_dtype(dtype, casting=True), forms[0])
        target = arranged(shape, get_numpy_dtype(target_dtype, casting=True), forms[1])
        source[...] = flat.view(source.dtype).reshape(shape)
        cast(source, target, dtype, target_dtype, clamp=False)
        made = np.array(target, order="C").reshape(-1).view(wanted.dtype).reshape(shape)
        assert (made == wanted).all()


def arranged(shape, dtype, form):
    """Return an empty array: contiguous, transposed in memory, or stepped through a larger one."""
    if form == 0:
        return np.empty(shape, dtype)
    if form == 1:
        return np.empty(shape[::-1], dtype).T
    wide = np.empty(tuple(2 * n for n in shape), dtype)
    return wide[tuple(slice(1, None, 2) for _ in shape)] if shape else wide


def test_an_expanded_source_is_cast_like_its_copy():
    source = np.broadcast_to(np.array([1.5, 70000.0, 3.0], "<f4"), (4, 3))
    target = np.empty((4, 3), "<f2")
    assert cast(source, target, FLOAT32, FLOAT16, clamp=False) == (4, 0)
    assert target[3].tolist() == [1.5, float("inf"), 3.0]


@pytest.mark.parametrize("name", ["int64", "bool", "uint8", "float8_e4m3fn", "complex64"])
def test_what_is_no_plain_float_is_never_cast(name):
    with pytest.raises(UnsupportedError, match="cannot be cast"):
        get_numpy_dtype(dtypes.BY_NAME[name], casting=True)


PAIRS = [(a, b) for a in MAX for b in MAX if a != b]  # those that the module has


@pytest.mark.parametrize(("dtype", "target_dtype"), PAIRS)
def test_the_module_and_numpy_give_the_same_bits_and_counts(
    dtype, target_dtype, built, monkeypatch
):
    """NaN payloads and signalling NaN included."""
    bits = ALL_16
    if dtype == FLOAT32:
        low = np.arange(1 << 14, dtype="<u4")
        special = [low, low << 9, 0x007FFFFF - low, 0x7F800000 + low, 0x7F800000 + (low << 9)]
        random = np.random.default_rng(4).integers(0, 1 << 32, 1 << 18, dtype="<u4")
        bits = np.concatenate([*special, random, boundaries(target_dtype)]).astype("<u4")
        bits = np.concatenate([bits, bits | np.uint32(1 << 31)])
    for clamp in (False, True):
        ours, counts = our_cast(bits, dtype, target_dtype, clamp=clamp)
        with monkeypatch.context() as patched:
            patched.setattr(compiled, "_compiled", None)
            wanted, wanted_counts = our_cast(bits, dtype, target_dtype, clamp=clamp)
        assert counts == wanted_counts
        assert (ours == wanted).all()


@pytest.mark.parametrize("special", [None, np.inf, -np.inf, np.nan, 1e6])
def test_finite_values_are_cast_alike_beside_a_special_one(special, built, monkeypatch):
    """The processor's own conversion casts stretches without infinities and NaNs."""
    random = np.random.default_rng(5)
    for count in (1, 8, 1023, 1024, 1025, 5000, 70_003):
        magnitudes = np.exp2(random.uniform(-28, 15.9, count))
        values = (magnitudes * random.choice([-1, 0, 1], count, p=[0.45, 0.1, 0.45])).astype("<f4")
        if special is not None:
            values[random.integers(count)] = special
        ours, counts = our_cast(values.view("<u4"), FLOAT32, FLOAT16)
        with monkeypatch.context() as patched:
            patched.setattr(compiled, "_compiled", None)
            wanted, wanted_counts = our_cast(values.view("<u4"), FLOAT32, FLOAT16)
        assert counts == wanted_counts
        assert (ours == wanted).all()


def test_the_module_takes_any_length_and_address(built):
    if built is None:
        pytest.skip("this machine has no C compiler")
    for count in (0, 1, 7, 8, 31, 100):
        values = np.linspace(-2, 2, count, dtype="<f4")
        source = memoryview(b"x" + values.tobytes())[1:]
        target = memoryview(bytearray(2 * count + 1))[1:]
        assert built.cast("float32", "float16", source, target) == (0, 0)
        assert bytes(target) == values.astype("<f2").tobytes()
    with pytest.raises(ValueError, match="not as many elements"):
        built.cast("float32", "float16", bytes(8), bytearray(6))
    with pytest.raises(LookupError, match="from float64"):
        built.cast("float64", "float16", bytes(8), bytearray(2))


def fill_runs(path, numel, *, clamp):
    """Return the float16 values of two reads of a float32 file, and what the filler counted."""
    copy = Copy("w", (numel,), str(path), 4, (4,), FLOAT32, 0, (2,), FLOAT16)
    made = memoryview(bytearray(2 * numel))
    half = numel // 2
    with SourceFiles() as pool:
        filler = Filler(pool, clamp=clamp, needs_checksum=lambda _file: True)
        filler.fill_run(copy, 0, made[: 2 * half])
        filler.fill_run(copy, half, made[2 * half :])
        return bytes(made), filler.overflowed, filler.flushed, list(filler.take_reads())


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("numel", [7, compiled.PIECE_BYTES // 2, compiled.PIECE_BYTES + 3])
def test_values_of_a_file_are_cast_and_checked_as_they_are_read(tmp_path, numel, clamp):
    values = np.linspace(-1, 1, numel, dtype="<f4")
    values[[1, -1]] = 1e6, 1e-9
    data = b"head" + values.tobytes()
    (tmp_path / "x").write_bytes(data)
    with np.errstate(over="ignore"):
        wanted = values.astype("<f2")
    if clamp:
        wanted[1] = MAX[FLOAT16]
    made, overflowed, flushed, reads = fill_runs(tmp_path / "x", numel, clamp=clamp)
    assert made == wanted.tobytes()
    assert (overflowed["w"], flushed["w"]) == (
        1,
        1 + np.count_nonzero(values[:-1]) - np.count_nonzero(wanted[:-1]),
    )
    assert reads == [(str(tmp_path / "x"), 4, 4 * numel, crc32(data[4:]))]
    (tmp_path / "x").write_bytes(data[:-1])
    with pytest.raises(CorruptError, match="but the file ends after"):
        fill_runs(tmp_path / "x", numel, clamp=clamp)
