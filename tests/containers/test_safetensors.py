"""Files of the real library are read, ours are its own byte for byte, and lies are refused.

A tensor of a dtype that the installed safetensors cannot save is left out
(`tests.support.installed`).
"""

from __future__ import annotations

import json
import random
import struct
import time
from math import prod

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import reshard
from reshard.containers import safetensors
from reshard.core import dtypes
from reshard.core.box import whole
from reshard.core.chunks import contiguous
from reshard.core.manifest import Entry
from reshard.errors import CorruptError, ReshardError, UnsupportedError
from tests.support.installed import SAFETENSORS_DTYPES, TORCH_2_6
from tests.support.sample_tensors import raw, same, sample_tensors

ALL = {name: tensor.clone().contiguous() for name, tensor in sample_tensors().items()}
SAVED_DTYPES = {dtype.to_torch() for dtype in SAFETENSORS_DTYPES}
ZOO = {name: tensor for name, tensor in ALL.items() if tensor.dtype in SAVED_DTYPES}
METADATAS = {"none": None, "one": {"format": "pt"}, "odd": {"größe\n": '"权重"\t\\ \x01'}}


def entries(tensors):
    made = []
    for name, tensor in tensors.items():
        dtype = dtypes.BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        made.append((Entry(name, "param", dtype, tuple(tensor.shape), ()), dtype))
    return made


def laid_out(tensors, metadata):
    """Return the whole file as we would write it, with data filled in by hand."""
    header, placed, size = safetensors.lay_out("x", entries(tensors), metadata)
    content = bytearray(size)
    content[: len(header)] = header
    for entry in placed:
        data, at = raw(tensors[entry.fqn]), entry.chunks[0].byte_offset
        assert len(header) <= at <= at + len(data) <= size
        content[at : at + len(data)] = data
    return bytes(content)


def saved(path, tensors, metadata=None):
    save_file(tensors, path, metadata)
    return path.read_bytes()


@pytest.mark.parametrize("metadata", METADATAS)
def test_a_layout_of_the_menagerie_is_byte_identical_to_save_file(tmp_path, metadata):
    wanted = saved(tmp_path / "x", ZOO, METADATAS[metadata])
    assert laid_out(ZOO, METADATAS[metadata]) == wanted


def test_every_dtype_is_ordered_as_save_file_orders_it(tmp_path):
    tensors = {}
    for number, dtype in enumerate(SAFETENSORS_DTYPES):
        data = torch.zeros(2 * dtype.itemsize, dtype=torch.uint8)
        tensors[f"t{number % 3}.{number}"] = data.view(dtype.to_torch())
    # Rows of `tests/versions.py` with a later torch have a safetensors that saves all.
    assert TORCH_2_6 or len(tensors) == len(dtypes.BY_SAFETENSORS)
    assert laid_out(tensors, None) == saved(tmp_path / "x", tensors)


def test_names_are_escaped_as_save_file_escapes_them(tmp_path):
    names = [
        "",
        " ",
        '"',
        "\\",
        "/",
        "\n\r\t\b\f",
        "\0\x1f\x7f\x80",
        "é",
        "权重",
        "\u2028",
        "🐍",
        "a.b",
    ]
    tensors = {name: torch.ones(1) for name in names}
    assert laid_out(tensors, None) == saved(tmp_path / "x", tensors)


def test_several_metadata_keys_say_the_same_as_those_of_save_file(tmp_path):
    metadata = {f"key{i}": str(i) for i in range(5)}
    ours, theirs = laid_out(ZOO, metadata), saved(tmp_path / "x", ZOO, metadata)
    assert len(ours) == len(theirs)
    parsed = [
        json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]]) for data in (ours, theirs)
    ]
    assert parsed[0] == parsed[1]


def test_save_files_are_read_bit_for_bit(tmp_path):
    path = tmp_path / "zoo.safetensors"
    saved(path, ZOO, {"a": "b"})
    file = safetensors.read(path)
    assert file.metadata == {"a": "b"}
    with reshard.open(path) as checkpoint, safe_open(path, "pt") as theirs:
        assert set(checkpoint) == set(theirs.keys()) == set(ZOO)
        assert [name for name, t in ZOO.items() if not same(checkpoint[name][...], t)] == []


def test_an_empty_file_of_no_tensors_is_readable(tmp_path):
    assert laid_out({}, None) == saved(tmp_path / "x", {})
    assert safetensors.read(tmp_path / "x").tensors == {}


def test_a_dtype_that_safetensors_lacks_is_refused():
    wide = entries({"z": torch.zeros(1, dtype=torch.complex128)})
    with pytest.raises(UnsupportedError, match="complex128"):
        safetensors.lay_out("x", wide, {})


@pytest.mark.parametrize("name", ["__metadata__", "lone \ud800 surrogate"])
def test_a_name_that_the_format_cannot_hold_is_refused(name):
    """The header keeps ``__metadata__`` for itself, and is UTF-8."""
    with pytest.raises(ReshardError, match=r"safetensors|UTF-8|name"):
        safetensors.lay_out("x", entries({name: torch.ones(2)}), {"format": "pt"})


# ------------------------------------------------------------------------------------------ hostile


def file_of(header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


EIGHT = bytes(8)
HOSTILE = {
    "an empty file": b"",
    "seven bytes": b"\x01" * 7,
    "a length and nothing": struct.pack("<Q", 10),
    "a header longer than the file": file_of(b"{}", length=3),
    "a header of 2^63": file_of(b"{}", length=1 << 63),
    "a header of all ones": file_of(b"{}", length=(1 << 64) - 1),
    "a header of 100 MB": file_of(b"{}" + b" " * 100, length=100_000_000),
    "a header of nothing": file_of(b""),
    "no JSON": file_of(b"\x80\x02}q\x00."),
    "half of a JSON": file_of(b'{"a": {"dtype": "F32"'),
    "bytes that are no UTF-8": file_of(b'{"\xff": 1}'),
    "a list": file_of([]),
    "a string": file_of("x"),
    "null": file_of(None),
    "a number of 10000 digits": file_of(b'{"a": ' + b"9" * 10_000 + b"}"),
    "a tensor that is null": file_of({"a": None}),
    "a tensor that is a list": file_of({"a": [1, 2]}),
    "a tensor that is text": file_of({"a": "F32"}),
    "no dtype": file_of({"a": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT),
    "no offsets": file_of({"a": {"dtype": "F32", "shape": [2]}}, EIGHT),
    "one offset": file_of({"a": tensor(offsets=(0,))}, EIGHT),
    "three offsets": file_of({"a": tensor(offsets=(0, 4, 8))}, EIGHT),
    "offsets of text": file_of({"a": tensor(offsets=("0", "8"))}, EIGHT),
    "offsets that are null": file_of({"a": {**tensor(), "data_offsets": None}}, EIGHT),
    "offsets backwards": file_of({"a": tensor(offsets=(8, 0))}, EIGHT),
    "a negative offset": file_of({"a": tensor(offsets=(-8, 0))}, EIGHT),
    "offsets past the end": file_of({"a": tensor(offsets=(8, 16))}, EIGHT),
    "a tensor longer than the file": file_of({"a": tensor((3,), (0, 12))}, EIGHT),
    "a size wrong for the shape": file_of({"a": tensor((3,))}, EIGHT),
    "a negative dim": file_of({"a": tensor((-2,))}, EIGHT),
    "two negative dims": file_of({"a": tensor((-2, -1))}, EIGHT),
    "a dim of float": file_of({"a": tensor((2.0,))}, EIGHT),
    "a dim of bool": file_of({"a": tensor((True, 2))}, EIGHT),
    "a dim of NaN": file_of({"a": tensor((float("nan"),))}, EIGHT),
    "a dim of infinity": file_of({"a": tensor((float("inf"),))}, EIGHT),
    "a dim of text": file_of({"a": tensor(("2",))}, EIGHT),
    "a shape of text": file_of({"a": {**tensor(), "shape": "2"}}, EIGHT),
    "a shape that is null": file_of({"a": {**tensor(), "shape": None}}, EIGHT),
    "a shape beyond 64 bits": file_of({"a": tensor((2**40, 2**40))}, EIGHT),
    "a shape that wraps to two": file_of({"a": tensor((2**63 + 1, 2))}, EIGHT),
    "a shape of 30000 dims": file_of({"a": tensor((2**31,) * 30_000)}, EIGHT),
    "a dtype that is a list": file_of({"a": tensor(dtype=["F32"])}, EIGHT),
    "a dtype that is a dict": file_of({"a": tensor(dtype={})}, EIGHT),
    "a gap before": file_of({"a": tensor((1,), (4, 8))}, EIGHT),
    "a gap between": file_of({"a": tensor((1,), (0, 4)), "b": tensor((1,), (8, 12))}, bytes(12)),
    "an overlap": file_of({"a": tensor(), "b": tensor((2,), (4, 12))}, bytes(12)),
    "one place twice": file_of({"a": tensor(), "b": tensor()}, EIGHT),
    "trailing bytes": file_of({"a": tensor()}, EIGHT + b"x"),
    "trailing bytes alone": file_of({}, b"x"),
    "one name twice": file_of(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        EIGHT,
    ),
    "one key twice": file_of(
        b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', EIGHT
    ),
    "deep lists": file_of(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deep dicts": file_of(b'{"a":' * 200_000 + b"1" + b"}" * 200_000),
    "deep metadata": file_of(b'{"__metadata__":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "metadata that is a list": file_of({"__metadata__": [1], "a": tensor()}, EIGHT),
    "metadata that is no text": file_of({"__metadata__": {"a": {}}, "a": tensor()}, EIGHT),
    "a name with a lone surrogate": file_of({"\ud800": tensor()}, EIGHT),
}


@pytest.mark.parametrize("lie", HOSTILE)
def test_a_lie_is_corrupt_and_names_the_file(tmp_path, lie):
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE[lie])
    began = time.thread_time()
    with pytest.raises(CorruptError) as caught:
        safetensors.read(path)
    assert time.thread_time() - began < 1
    assert caught.value.where == str(path)
    assert len(str(caught.value)) < 2000


def test_an_unknown_dtype_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"a": tensor(dtype="F7")}, EIGHT))
    with pytest.raises(UnsupportedError, match="'F7'"):
        safetensors.read(path)


def test_truncation_at_every_length_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    data = saved(path, {"a": torch.ones(5, 3), "b": torch.empty(0), "c": torch.tensor(2)})
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptError, match=r"model\.safetensors"):
            safetensors.read(path)


def test_random_damage_to_the_header_raises_our_errors_or_leaves_a_sound_file(tmp_path):
    chance = random.Random(2)
    path = tmp_path / "model.safetensors"
    data = saved(path, {"a": torch.ones(5, 3), "b": torch.empty(0), "c": torch.tensor(2)})
    length = 8 + struct.unpack_from("<Q", data)[0]
    refused = 0
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(length)] = chance.choice((0, 34, 44, 45, 48, 57, 91, 123, 255))
        path.write_bytes(damaged)
        try:
            tensors = safetensors.read(path).tensors
        except ReshardError:
            refused += 1
        else:
            taken = sum(prod(c.box.shape) * c.dtype.itemsize for c in tensors.values())
            assert all(c.byte_span[1] <= len(data) for c in tensors.values())
            assert taken + 8 + struct.unpack_from("<Q", damaged)[0] == len(data)
    assert refused > 300


def test_a_chunk_of_a_header_lies_where_its_offsets_say(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"a": tensor((2, 1), (4, 12)), "b": tensor((), (0, 4))}, bytes(12)))
    start = path.stat().st_size - 12
    found = safetensors.read(path).tensors
    assert found["a"] == contiguous(str(path), start + 4, dtypes.FLOAT32, whole((2, 1)))
    assert found["b"].byte_offset == start
