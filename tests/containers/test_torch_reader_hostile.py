"""Archives and streams that are truncated, altered, or made to lie."""

from __future__ import annotations

import pickle
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch

import reshard
from reshard.containers import torch_reader
from reshard.errors import CorruptError, ReshardError, UnsupportedError
from tests.support.sample_tensors import raw, same

STATE = {"w": torch.arange(300.0).view(10, 30), "b": torch.ones(7, dtype=torch.float64)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the bytes of one state dict in both formats."""
    place = tmp_path_factory.mktemp("saved")
    torch.save(STATE, place / "zip.pt")
    torch.save(STATE, place / "legacy.pt", _use_new_zipfile_serialization=False)
    return {form: (place / f"{form}.pt").read_bytes() for form in ("zip", "legacy")}


def read_all(path):
    """Open and read every tensor, as a user would."""
    with reshard.open(path) as checkpoint:
        return {name: checkpoint[name][...] for name in checkpoint}


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_truncated_file_is_refused(tmp_path, saved, form):
    data = saved[form]
    path = tmp_path / "x.pt"
    for size in [*range(0, len(data), 97), *range(len(data) - 30, len(data))]:
        path.write_bytes(data[:size])
        with pytest.raises(ReshardError, match=r"x\.pt") as caught:
            read_all(path)
        assert caught.value.remedy, size


@pytest.mark.parametrize("part", ["directory", "headers", "pickle", "legacy"])
def test_a_flipped_byte_raises_our_errors_or_changes_nothing_of_the_structure(
    tmp_path, saved, part
):
    data = saved["legacy" if part == "legacy" else "zip"]
    start = data.index(b"PK\x01\x02") if part == "directory" else 0
    stop = {"headers": 70, "pickle": 700}.get(part, len(data))
    path = tmp_path / "x.pt"
    refused = 0
    for at in range(start, stop, {"legacy": 37, "headers": 2}.get(part, 5)):
        for bit in (0x01, 0xFF):
            flipped = bytearray(data)
            flipped[at] ^= bit
            path.write_bytes(flipped)
            try:
                file = torch_reader.read(path)
                names = set(file.root) if isinstance(file.root, dict) else set()
                reshard.open(path).close()
            except ReshardError as error:
                refused += 1
                assert error.where  # noqa: PT017
                assert error.remedy or not isinstance(error, CorruptError)  # noqa: PT017
            else:
                assert part == "legacy" or names == set(STATE)
    assert refused > 5


def test_random_damage_raises_only_our_errors(tmp_path, saved):
    chance = random.Random(3)
    path = tmp_path / "x.pt"
    refused = 0
    for number in range(700):
        data = bytearray(saved[("zip", "legacy")[number % 2]])
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(data))
            kind = chance.randrange(3)
            if kind == 0:
                data[at : at + 4] = chance.choice((b"\xff" * 4, bytes(4), chance.randbytes(4)))
            elif kind == 1:
                del data[at : at + chance.randint(1, 40)]
            else:
                data[at:at] = chance.randbytes(chance.randint(1, 40))
        path.write_bytes(data)
        try:
            read_all(path)
        except ReshardError:
            refused += 1
    assert refused > 300


def members(data, tmp_path):
    path = tmp_path / "members.zip"
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def repacked(path, parts, *, zip64=False):
    """Return the archive as Python writes it again."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items() if isinstance(parts, dict) else parts:
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=zip64) as member:
                member.write(content)
    return path


def test_an_archive_without_members_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(b"PK\x03\x04" + bytes(12) + b"PK\x05\x06" + bytes(18))
    with pytest.raises(CorruptError, match=r"x\.pt: is a zip archive without data\.pkl"):
        torch_reader.read(path)


@pytest.mark.parametrize("zip64", [False, True])
def test_an_archive_that_python_packed_is_read(tmp_path, saved, zip64):
    path = repacked(tmp_path / "x.pt", members(saved["zip"], tmp_path), zip64=zip64)
    found = read_all(path)
    assert all(same(found[name], tensor) for name, tensor in STATE.items())


def test_zip64_sizes_and_offsets_are_read(tmp_path, saved):
    """The directory of an archive beyond 4 GiB has all ones, and values in the extra field."""
    data = saved["zip"]
    start = data.index(b"PK\x01\x02")
    made, count, at = bytearray(), 0, start
    while data.startswith(b"PK\x01\x02", at):
        fields = list(struct.unpack_from("<4s6H3I5H2I", data, at))
        name = data[at + 46 : at + 46 + fields[10]]
        extra = struct.pack("<2H3Q", 1, 24, fields[9], fields[8], fields[16])
        at += 46 + fields[10] + fields[11] + fields[12]
        fields[8] = fields[9] = fields[16] = 0xFFFFFFFF
        fields[11], fields[12] = len(extra), 0
        made += struct.pack("<4s6H3I5H2I", *fields) + name + extra
        count += 1
    end = start + len(made)
    tail = struct.pack(
        "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(made), start
    )
    tail += struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    tail += struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    path = tmp_path / "x.pt"
    path.write_bytes(data[:start] + made + tail)
    found = read_all(path)
    assert all(same(found[name], tensor) for name, tensor in STATE.items())
    for at in range(start, end + len(tail), 5):
        flipped = bytearray(data[:start] + made + tail)
        flipped[at] ^= 0x7F
        path.write_bytes(flipped)
        try:
            torch_reader.read(path)
        except ReshardError as error:
            assert str(path) in str(error)  # noqa: PT017


def test_a_compressed_member_is_refused(tmp_path, saved):
    parts = members(saved["zip"], tmp_path)
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            method = zipfile.ZIP_DEFLATED if name.endswith("data/0") else zipfile.ZIP_STORED
            archive.writestr(name, content, method)
    with pytest.raises(CorruptError, match="compressed"):
        torch_reader.read(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["data.pkl", "data/0", "extra/data.pkl"])
def test_a_member_that_stands_twice_is_refused(tmp_path, saved, name):
    parts = members(saved["zip"], tmp_path)
    again = [(f"zip/{name}", parts.get(f"zip/{name}", parts["zip/data.pkl"]))]
    path = repacked(tmp_path / "x.pt", [*parts.items(), *again])
    with pytest.raises(CorruptError):
        torch_reader.read(path)


@pytest.mark.parametrize("missing", ["data.pkl", "data/0"])
def test_a_missing_member_is_refused(tmp_path, saved, missing):
    parts = members(saved["zip"], tmp_path)
    del parts[f"zip/{missing}"]
    path = repacked(tmp_path / "x.pt", parts)
    with pytest.raises(CorruptError, match=r"x\.pt"):
        torch_reader.read(path)


@pytest.mark.parametrize("change", [-1, 1, -1200])
def test_a_storage_of_another_size_than_the_pickle_says_is_refused(tmp_path, saved, change):
    parts = members(saved["zip"], tmp_path)
    content = parts["zip/data/0"]
    parts["zip/data/0"] = content[:change] if change < 0 else content + b"x"
    path = repacked(tmp_path / "x.pt", parts)
    with pytest.raises(CorruptError, match="storage 0 is 1200 bytes"):
        torch_reader.read(path)


def test_overlapping_members_are_refused(tmp_path, saved):
    """Two entries of the directory that point at one place, or into another member."""
    data = bytearray(saved["zip"])
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 4)
    path = tmp_path / "x.pt"
    offset = struct.unpack_from("<I", data, first + 42)[0]
    for wrong in (offset, offset + 1, offset + 40, len(data) - 10, len(data) + 1000, 2**32 - 2):
        struct.pack_into("<I", data, second + 42, wrong)
        path.write_bytes(data)
        with pytest.raises(CorruptError, match=r"x\.pt"):
            torch_reader.read(path)


def crafted(path, body):
    """Write an archive with ``body`` as data.pkl and eight float32 in storage 0."""
    return repacked(
        path, {"a/data.pkl": body, "a/version": b"3\n", "a/data/0": raw(torch.arange(8.0))}
    )


def number(value):
    raw_bytes = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + len(raw_bytes).to_bytes(4, "little") + raw_bytes


def numbers(values):
    return b"(" + b"".join(map(number, values)) + b"t"


def view(offset, shape, strides, *, numel=8, storage=None):
    if storage is None:
        storage = (
            b"(\x8c\x07storagectorch\nFloatStorage\n\x8c\x010\x8c\x03cpu" + number(numel) + b"tQ"
        )
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset)
    return call + numbers(shape) + numbers(strides) + b"\x89)tR"


def state(tensor):
    return b"\x80\x02}\x8c\x01x" + tensor + b"s."


def test_the_crafting_of_these_tests_makes_readable_files(tmp_path):
    path = crafted(tmp_path / "x.pt", state(view(1, (2, 3), (3, 1))))
    assert read_all(path)["x"].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, (9,), (1,)),
        (1, (8,), (1,)),
        (8, (), ()),
        (0, (2, 4), (5, 1)),
        (0, (2,), (8,)),
        (-1, (2,), (1,)),
        (7, (8,), (-1,)),
        (0, (-2,), (1,)),
        (0, (-2, -3), (1, 1)),
        (0, (2,), (1, 1)),
        (0, (2, 2), (1,)),
        (2**63, (1,), (1,)),
        (0, (2,), (2**64,)),
        (2**20000, (1,), (1,)),
        (0, (2**20000,), (1,)),
    ],
    ids=range(15),
)
def test_a_view_that_leaves_its_storage_is_refused(tmp_path, offset, shape, strides):
    path = crafted(tmp_path / "x.pt", state(view(offset, shape, strides)))
    with pytest.raises(CorruptError, match=r"x\.pt"):
        torch_reader.read(path)


@pytest.mark.parametrize("legacy_form", [False, True])
def test_tensors_that_are_much_larger_than_their_file_are_refused(tmp_path, legacy_form):
    base = torch.arange(1 << 18)  # 2 MB
    cases = {
        "a buffer": ({"x": torch.zeros(1).expand(64)}, True),
        "64 MiB": ({"x": torch.zeros(1).expand(1 << 24)}, True),
        "more than 64 MiB": ({"x": torch.zeros(1).expand((1 << 24) + 1)}, False),
        "a sum": ({f"x{n}": torch.zeros(1).expand(1 << 20) for n in range(17)}, False),
        "a window": ({"x": torch.arange(1 << 14).unfold(0, 1 << 13, 1)}, False),
        "a block of 48 layers": ({f"x{n}": base for n in range(48)}, True),
        "too many names": ({f"x{n}": base[n:] for n in range(200)}, False),
    }
    for name, (values, sound) in cases.items():
        path = tmp_path / f"{name}.pt"
        torch.save(values, path, _use_new_zipfile_serialization=not legacy_form)
        if sound:
            assert set(torch_reader.read(path).root) == set(values), name
        else:
            with pytest.raises(CorruptError, match=f"{name}.*bytes in a file of"):
                torch_reader.read(path)


def test_many_dims_and_long_integers_are_named(tmp_path):
    torch.save({"x": torch.zeros([1] * 100)}, tmp_path / "dims.pt")
    torch.save({"x": 10**5000}, tmp_path / "digits.pt")
    with pytest.raises(UnsupportedError, match="a tensor of 100 dims"):
        torch_reader.read(tmp_path / "dims.pt")
    with pytest.raises(CorruptError, match="an integer of 2077 bytes"):
        torch_reader.read(tmp_path / "digits.pt")


@pytest.mark.parametrize("numel", [-1, 0, 7, 9, 2**62, 2**20000], ids=range(6))
def test_a_storage_whose_pickle_lies_about_its_size_is_refused(tmp_path, numel):
    path = crafted(tmp_path / "x.pt", state(view(0, (1,), (1,), numel=numel)))
    with pytest.raises(CorruptError, match=r"x\.pt"):
        torch_reader.read(path)


def test_a_tensor_of_what_is_no_storage_is_refused(tmp_path):
    inner = view(0, (8,), (1,))
    for storage in (inner, b"N", b"}", b"K\x05", b"ctorch\nFloatStorage\n"):
        path = crafted(tmp_path / "x.pt", state(view(0, (1,), (1,), storage=storage)))
        with pytest.raises(CorruptError, match=r"x\.pt"):
            read_all(path)


def legacy(root, keys, data):  # as a big-endian system writes it
    head = b"".join(
        pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": False})
    )
    return head + root + pickle.dumps(keys, 2) + data


def test_a_legacy_storage_listed_twice_is_refused(tmp_path):
    """Two keys named, one of them listed twice: the other would have no place in the file."""
    second = view(0, (2,), (1,), numel=2).replace(b"\x8c\x010", b"\x8c\x011")
    body = b"\x80\x02}(\x8c\x01x" + view(0, (8,), (1,)) + b"\x8c\x01y" + second + b"u."
    block = struct.pack("<q", 8) + raw(torch.arange(8.0))
    path = Path(tmp_path / "x.pt")
    path.write_bytes(legacy(body, ["0", "1"], block + struct.pack("<q", 2) + b"12345678"))
    assert set(read_all(path)) == {"x", "y"}
    for keys in (["0", "0"], ["0"], [], ["0", "1", "2"], "01", None):
        path.write_bytes(legacy(body, keys, block + block + block))
        with pytest.raises(CorruptError, match=r"x\.pt"):
            torch_reader.read(path)


def test_big_endian_files_are_refused(tmp_path, saved):
    parts = members(saved["zip"], tmp_path)
    parts["zip/byteorder"] = b"big"
    with pytest.raises(ReshardError, match="endian"):
        torch_reader.read(repacked(tmp_path / "x.pt", parts))
