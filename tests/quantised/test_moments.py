"""The values of codes of optimizer state, torchao's and bitsandbytes', from any element on."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from reshard.containers.pickles.values import Call, Global
from reshard.containers.torch_objects import StoredBuffer, Tensor
from reshard.core import dtypes
from reshard.core.box import Box, row_major
from reshard.core.manifest import Entry
from reshard.errors import CorruptError, UnsupportedError
from reshard.quantised import moments
from reshard.quantised.decode import decode_table
from reshard.system.files import SourceFiles

SHAPE = (3, 64)
NUMEL = 192
BLOCK = 32
FORMS = {"OptimState8bit": 8, "OptimState4bit": 4, "OptimStateFp8": 8}


@pytest.fixture
def make(tmp_path):
    """Return name -> a tensor of torchao's class, as a pickle describes it, and its values."""

    def build(name):
        bits, random = FORMS[name], np.random.default_rng(1)
        codes = random.integers(0, 120, NUMEL * bits // 8, np.uint8)
        scales = random.random(NUMEL // BLOCK, np.float32)
        table = random.random(1 << bits, np.float32)
        path = tmp_path / name
        path.write_bytes(codes.tobytes() + scales.tobytes() + table.tobytes())
        start = 0
        parts = {}
        held = {"codes": codes, "scale": scales, "qmap": table}
        for key, values in held.items():
            dtype = dtypes.FLOAT32 if values.itemsize > 1 else dtypes.UINT8
            if name.endswith("Fp8") and key == "codes":
                dtype = dtypes.E4M3
            storage = StoredBuffer(str(path), key, dtype, values.nbytes, start)
            parts[key] = Tensor(storage, 0, values.shape, (1,), dtype)
            start += values.nbytes
        if name.endswith("Fp8"):
            del parts["qmap"]
            table = decode_table(dtypes.E4M3.name)
        kind = f"torchao.optim.subclass.{name}"
        call = Call(kind, (Global(kind), Global("torch.float32"), SHAPE), parts)
        if bits == 4:
            codes = np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)
        return call, table[codes] * np.repeat(scales, BLOCK)

    return build


@pytest.mark.parametrize("name", FORMS)
def test_any_range_of_values_is_computed(name, make):
    call, want = make(name)
    chunk = moments.describe(call)
    assert (chunk.box.shape, chunk.dtype) == (SHAPE, dtypes.FLOAT32)
    with SourceFiles() as pool:
        for start, stop in ((0, NUMEL), (0, 1), (31, 33), (95, 150), (NUMEL - 1, NUMEL)):
            got = pool.read(chunk.file, start * 4, (stop - start) * 4)
            assert np.array_equal(np.frombuffer(got, "<f4"), want[start:stop])


@pytest.mark.parametrize("part", ["codes", "scale", "qmap"])
def test_parts_that_do_not_fit_together_are_refused(part, make):
    call, _ = make("OptimState8bit")
    call.state[part] = replace(call.state[part], shape=(call.state[part].numel - 1,))
    with pytest.raises(CorruptError, match="do not fit together"):
        moments.describe(call)


@pytest.mark.parametrize("part", ["codes", "scale", "qmap"])
def test_parts_with_gaps_between_their_elements_are_refused(part, make):
    call, _ = make("OptimState4bit")
    call.state[part] = replace(call.state[part], strides=(2,))
    with pytest.raises(UnsupportedError, match="gaps between its elements"):
        moments.describe(call)


def test_other_objects_are_not_described(make):
    call, _ = make("OptimState4bit")
    for other in (
        replace(call, name="torchao.quantization.X", args=(Global("torchao.quantization.X"),)),
        replace(call, state=None),
        replace(call, args=call.args[:2]),
        replace(call, args=(*call.args[:2], (-1,))),
        Call("torch.Size", ()),
        None,
    ):
        assert moments.describe(other) is None


@pytest.fixture
def make_blocks(tmp_path):
    """Return (shape, block) -> codes, scales and table of bitsandbytes, and the values."""

    def build(shape, block):
        numel, random = prod(shape), np.random.default_rng(1)
        codes = random.integers(0, 256, numel, np.uint8)
        scales = random.random(-(-numel // block), np.float32)
        held = [codes, scales, random.random(256, np.float32)]
        path, start, parts = tmp_path / "blocks", 0, []
        path.write_bytes(b"".join(values.tobytes() for values in held))
        for values, own in zip(held, (shape, scales.shape, (256,)), strict=True):
            dtype = dtypes.FLOAT32 if values.itemsize > 1 else dtypes.UINT8
            storage = StoredBuffer(str(path), str(start), dtype, values.nbytes, start)
            strides = tuple(stride // dtype.itemsize for stride in row_major(own, dtype.itemsize))
            parts.append(Tensor(storage, 0, own, strides, dtype))
            start += values.nbytes
        return parts, held[2][codes] * np.repeat(scales, block)[:numel]

    return build


@pytest.mark.parametrize("prefix", [moments.BITSANDBYTES, ""])
@pytest.mark.parametrize("block", [256, 2048])
def test_blocks_of_bitsandbytes_are_computed(prefix, block, make_blocks):
    parts, want = make_blocks((7, 901), block)
    names = [f"{prefix}{part}1" for part in ("state", "absmax", "qmap")]
    decoded = moments.decode_state({**dict(zip(names, parts, strict=True)), "step": 3})
    assert decoded.keys() == {names[0], "step"}
    chunk = decoded[names[0]].chunk
    assert (chunk.box.shape, chunk.dtype) == ((7, 901), dtypes.FLOAT32)
    with SourceFiles() as pool:
        for start, stop in ((0, 6307), (255, 257), (2047, 4100), (6306, 6307)):
            got = pool.read(chunk.file, start * 4, (stop - start) * 4)
            assert np.array_equal(np.frombuffer(got, "<f4"), want[start:stop])


def test_rows_of_codes_have_the_scales_of_the_whole_tensor(make_blocks):
    """DCP has the codes in chunks, and the scales whole."""
    parts, want = make_blocks((7, 901), 256)
    names = ["state2", "absmax2", "qmap2"]
    entries = [
        Entry("w", name, part.dtype, part.shape, (part.chunk,))
        for name, part in zip(names, parts, strict=True)
    ]
    boxes = Box((0, 0), (3, 901)), Box((3, 0), (4, 901))
    rows = tuple(replace(parts[0].chunk, box=box, byte_offset=box.origin[0] * 901) for box in boxes)
    (decoded,), count = moments.decode_entries([replace(entries[0], chunks=rows), *entries[1:]])
    assert (count, decoded.dtype, [chunk.box for chunk in decoded.chunks]) == (
        1,
        dtypes.FLOAT32,
        [*boxes],
    )
    with SourceFiles() as pool:
        got = b"".join(pool.read(c.file, 0, c.box.volume * 4) for c in decoded.chunks)
    assert np.array_equal(np.frombuffer(got, "<f4"), want)
    columns = replace(rows[0], box=Box((0, 0), (7, 400)))
    kept, count = moments.decode_entries([replace(entries[0], chunks=(columns,)), *entries[1:]])
    assert (count, len(kept)) == (0, 3)


@pytest.mark.parametrize("part", [1, 2])
def test_other_numbers_of_scales_are_refused(part, make_blocks):
    parts, _ = make_blocks((7, 901), 256)
    parts[part] = replace(parts[part], shape=(parts[part].numel - 1,))
    with pytest.raises(CorruptError, match="6307 codes of bitsandbytes"):
        moments.decode_state(dict(zip(("state1", "absmax1", "qmap1"), parts, strict=True)))


def test_stacked_moments_stay_codes(make_blocks):
    """AdEMAMix stacks two moments, with a row of scales for each."""
    parts, _ = make_blocks((2, 1024), 256)
    parts[1] = replace(parts[1], shape=(2, 4), strides=(4, 1))
    state = dict(zip(("state1", "absmax1", "qmap1"), parts, strict=True))
    assert moments.decode_state(state) == state
