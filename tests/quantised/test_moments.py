"""The values of torchao's codes of optimizer state, from any element on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from reshard.containers.pickles.values import Call, Global
from reshard.containers.torch_objects import StoredBuffer, Tensor
from reshard.core import dtypes
from reshard.errors import CorruptError
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
            table = decode_table(dtypes.E4M3)
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
