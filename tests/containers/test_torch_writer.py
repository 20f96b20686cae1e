"""Compare the files that we lay out and fill with those of ``torch.save``, byte for byte.

torch 2.6 writes the same records but two (`tests.support.installed`): with it, the records are
compared, and torch 2.6 must load our files.
"""

from __future__ import annotations

import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from reshard.containers import torch_objects, torch_reader, zip_reader
from reshard.containers.pickles.values import Call, Global
from reshard.containers.torch_writer import (
    AS_WRITTEN,
    Storage,
    StorageBlock,
    StorageView,
    Template,
    lay_out,
    lay_out_object,
)
from reshard.core import dtypes, stamps
from reshard.core.box import Box, whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry, Manifest, Origin, SourceFile, check, index_entries
from reshard.core.stamps import Stamp
from reshard.engine.move.execute import execute
from reshard.engine.move.options import MoveOptions
from reshard.engine.planning.planner import Plan
from reshard.errors import UnsupportedError
from reshard.system.files import Section, SourceFiles
from tests.support.installed import NEW_RECORDS, TORCH_2_6, TORCH_DTYPES
from tests.support.sample_tensors import raw, same, sample_tensors


@dataclass
class Source:
    """Tensors' storages, dumped into one file; the slots that stand for the tensors."""

    path: Path
    data: bytearray = field(default_factory=bytearray)
    entries: list[Entry] = field(default_factory=list)
    made: dict[int, tuple[Storage, object]] = field(default_factory=dict)

    def stored(self, dtype: DType, content: bytes) -> Storage:
        name, numel = f"storage {len(self.entries)}", len(content) // dtype.itemsize
        chunk = contiguous(str(self.path), len(self.data), dtype, whole((numel,)))
        self.data += content
        self.entries.append(Entry(name, "param", dtype, (numel,), (chunk,)))
        part = StorageBlock("param", name, (numel,), whole((numel,)))
        return Storage(dtype, numel, (part,) if numel else ())

    def slot_of(self, tensor: object) -> StorageView | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        storage = tensor.untyped_storage()
        dtype = dtypes.BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        key = storage._cdata
        if key not in self.made:
            self.made[key] = self.stored(dtype, bytes(storage)), storage
        return StorageView(
            self.made[key][0],
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.requires_grad,
        )

    def fill(self, skeleton, directory: Path) -> Path:
        self.path.write_bytes(self.data)
        files = {str(self.path): SourceFile(str(self.path), len(self.data))}
        planned = Plan(index_entries(self.entries), skeleton, 4096)
        execute(planned, files, directory, MoveOptions())
        return directory / skeleton.files[0].name


@pytest.fixture
def source(tmp_path):
    return Source(tmp_path / "source")


def written(source, root, tmp_path):
    name = f"ours{len(list(tmp_path.iterdir()))}.pt"
    skeleton = lay_out_object(name, root, slot_of=source.slot_of)
    return source.fill(skeleton, tmp_path)


def saved_by_torch(value, ours: Path) -> Path:
    """Save a file of that name, which is the name of the archive's root, in another directory."""
    theirs = ours.parent / "theirs" / ours.name
    theirs.parent.mkdir(exist_ok=True)
    torch.save(value, theirs)
    return theirs


def unidentified(path: Path) -> bytes:
    """Return the file with zeros for its serialization id and that id's two CRCs."""
    data = bytearray(path.read_bytes())
    with SourceFiles() as files:
        archive = Section(files, str(path), 0, len(data))
        members = zip_reader.read_directory(archive)
        (name,) = (name for name in members if name.endswith("/.data/serialization_id"))
        member = members[name]
        start = member.data_offset(archive)
    assert bytes(data[start : start + 40]).isdigit()
    data[start : start + 40] = b"0" * 40
    for crc in (start + 44, member.entry_offset + 16):
        data[crc : crc + 4] = bytes(4)
    return bytes(data)


def records_of(path: Path) -> dict[str, bytes]:
    """Return the content of each record but the id, by its name in the archive's root."""
    with zipfile.ZipFile(path) as archive:
        found = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    del found[".data/serialization_id"]
    return found


def assert_same_file(ours: Path, theirs: Path) -> None:
    """Compare files but for their ids; with torch 2.6, only the records that it writes."""
    if not TORCH_2_6:
        assert unidentified(ours) == unidentified(theirs)
        return
    records, wanted = records_of(ours), records_of(theirs)
    assert records.keys() - wanted.keys() == NEW_RECORDS
    assert {name: records[name] for name in wanted} == wanted
    assert torch.load(ours, weights_only=False) is not None


def assert_as_torch(source, value, tmp_path, root=None):
    """Compare our file with torch's of ``value``; ``root`` is the value as it is given to us."""
    ours = written(source, value if root is None else root, tmp_path)
    assert_same_file(ours, saved_by_torch(value, ours))
    with zipfile.ZipFile(ours) as archive:
        assert archive.testzip() is None
    return ours


# ------------------------------------------------------------------------------- flat state dicts


def tensor_of(name: str, *shape: int) -> torch.Tensor:
    dtype = getattr(torch, name)
    count = torch.empty(shape, dtype=dtype).nbytes
    if name == "bool":
        return torch.arange(count).remainder(2).to(torch.bool).view(shape)
    return torch.arange(count).remainder(251).to(torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_state_dict_of_every_dtype(source, tmp_path, kind):
    state = kind((f"{dtype.name}.weight", tensor_of(dtype.name, 3, 5)) for dtype in TORCH_DTYPES)
    ours = assert_as_torch(source, state, tmp_path)
    for mmap in (False, True):
        loaded = torch.load(ours, weights_only=True, mmap=mmap)
        assert type(loaded) is kind
        assert list(loaded) == list(state)
        assert all(same(loaded[name], state[name]) for name in state)


def test_every_form_of_tensor(source, tmp_path):
    ours = assert_as_torch(source, sample_tensors(), tmp_path)
    loaded = torch.load(ours, weights_only=True)
    assert all(same(loaded[name], tensor) for name, tensor in sample_tensors().items())
    assert loaded["tied.a"].data_ptr() == loaded["tied.b"].data_ptr()


@pytest.mark.parametrize("count", [0, 1, 11, 1000, 1001, 2001])
def test_a_state_dict_of_many_tensors(source, tmp_path, count):
    state = {f"layers.{number}.weight": torch.full((2,), number) for number in range(count)}
    assert_as_torch(source, state, tmp_path)
    ordered = OrderedDict((name, number) for number, name in enumerate(state))
    assert_as_torch(Source(tmp_path / "2"), [ordered, list(state)], tmp_path)


def test_lay_out_writes_a_plain_dict_and_says_where_each_tensor_lies(tmp_path):
    state = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(7), "e": torch.empty(0, 3)}
    source = Source(tmp_path / "source")
    wanted = []
    for name, tensor in state.items():
        dtype = dtypes.BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        place = contiguous(str(source.path), len(source.data), dtype, whole(tensor.shape))
        source.data += raw(tensor)
        entry = Entry(name, "master", dtype, tuple(tensor.shape), (place,))
        source.entries.append(entry)
        wanted.append((entry, dtype))
    skeleton = lay_out("out.pt", wanted)
    assert [entry.key for entry in skeleton.entries] == [("master", name) for name in state]
    size = skeleton.files[0].nbytes
    manifest = Manifest(
        Origin("test", ""),
        index_entries(skeleton.entries),
        {"out.pt": SourceFile("out.pt", size)},
        ordered=True,
    )
    check(manifest)
    ours = source.fill(skeleton, tmp_path)
    assert_same_file(ours, saved_by_torch(state, ours))
    file = torch_reader.read(ours)
    for entry in skeleton.entries:
        found = file.root[entry.fqn].chunk
        assert entry.chunks[0].byte_offset == found.byte_offset
        assert found.byte_offset % 64 == 0


def test_a_cast_keeps_the_entrys_name_and_takes_the_new_dtype():
    entry = Entry("w", "param", dtypes.FLOAT32, (4, 2), ())
    (made,) = lay_out("o.pt", [(entry, dtypes.BFLOAT16)]).entries
    assert (made.key, made.dtype, made.nbytes) == (("param", "w"), dtypes.BFLOAT16, 16)


# --------------------------------------------------------------------------------- nested objects


def trained(optimizer, **options):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    made = optimizer(model.parameters(), lr=1e-3, **options)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        made.step()
    return made.state_dict()


SHARED = [1, "x" * 3]
LONG = "a text that is longer than 255 bytes " * 9
VALUES = {
    "floats": [0.1, -0.0, 0.0, float("inf"), -float("inf"), float("nan"), 1e-320, 1.0],
    "integers": [0, 1, -1, 255, 256, 65535, 65536, -128, -129],
    "32 bits": [2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32],
    "64 bits": [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 128 << 56, -(128 << 56)],
    "huge": [2**2031, 2**2032, -(2**2039), -(2**2039) - 1, 2**5000, -(2**5000)],
    "strings": ["", "a", LONG, LONG * 2000, "größe", "权重", "\U0001f600", "\ud800", "a\nb'\"\\"],
    "constants": [True, False, None],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),)), tuple(range(300))],
    "lists": [[], [[]], [1], [1, 2], list(range(1000)), list(range(1001)), list(range(2500))],
    "dicts": [{}, {1: 2}, {1: {2: {}}}, {n: n for n in range(1001)}, {None: 1, (1, "a"): True}],
    "ordered": [OrderedDict(), OrderedDict(a=1), OrderedDict((n, n) for n in range(2001))],
    "sets": [set(), {3, 1, 2}, frozenset((5, 4)), frozenset()],
    "bytes": [b"", b"a", b"a", bytes(range(256)), bytes(300)],
    "complex": [1 + 2j, complex("-0"), 1j],
    "shared": [SHARED, SHARED, (SHARED, SHARED), {"a": SHARED}],
    "shared tuple": [(SHARED,)] * 3,
    "one letter": {"0": 0, "1": "0", "a": b"a", "b": ["1"]},
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value(source, tmp_path, name):
    value = {"value": VALUES[name], "w": torch.ones(2)}
    ours = assert_as_torch(source, value, tmp_path)
    if name != "sets":
        assert repr(torch_reader.read(ours, builders=AS_WRITTEN).root["value"])
    loaded = torch.load(ours, weights_only=False)["value"]
    assert repr(loaded) == repr(VALUES[name])


def test_storage_names_and_keys_are_the_same_strings_where_they_are_in_python(source, tmp_path):
    """Strings of one character are one object in CPython: the pickle fetches them."""
    state = {str(number): torch.full((1,), number) for number in range(15)}
    assert_as_torch(source, {"storage": state, "cpu": 1}, tmp_path)


def test_values_that_hold_themselves(source, tmp_path):
    looped: list = [1]
    looped.append(looped)
    turned: dict = {}
    turned["me"] = (turned, looped)
    deep: list = []
    deep += [(deep,), (1, 2, 3, deep), 5]
    for short in ((deep,), (1, 2, 3, deep)):
        deep.append(short)
    assert_as_torch(source, [looped, turned, deep], tmp_path)
    inner: list = []
    outer = (1, inner)
    inner.append(outer)
    long: list = []
    wide = (1, 2, 3, long)
    long.append(wide)
    assert_as_torch(Source(tmp_path / "2"), [outer, wide], tmp_path)


def test_parameters(source, tmp_path):
    module = torch.nn.Linear(3, 2)
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    state = {"w": module.weight, "again": module.weight, "f": frozen}

    def told(parameter):
        args = (parameter.detach(), parameter.requires_grad, OrderedDict())
        return Call("torch._utils._rebuild_parameter", args)

    weight = told(module.weight)
    root = {"w": weight, "again": weight, "f": told(frozen)}
    ours = assert_as_torch(source, state, tmp_path, root)
    loaded = torch.load(ours, weights_only=True)
    assert isinstance(loaded["w"], torch.nn.Parameter)
    assert loaded["w"] is loaded["again"]
    assert [p.requires_grad for p in loaded.values()] == [True, True, False]


def test_a_tensor_that_requires_grad(source, tmp_path):
    assert_as_torch(source, [torch.ones(2, requires_grad=True)], tmp_path)


def test_a_modules_own_state_dict_keeps_its_metadata(source, tmp_path):
    state = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1)).state_dict()
    metadata = vars(state)
    root = Call("collections.OrderedDict", (), metadata, dict(state))
    ours = assert_as_torch(source, state, tmp_path, root)
    assert torch.load(ours)._metadata == state._metadata


def test_objects_of_every_make(source, tmp_path):
    import argparse
    import datetime as dt

    when = dt.timedelta(1, 2, 3)
    counted: defaultdict = defaultdict(list, a=[1])
    value = {
        "namespace": argparse.Namespace(lr=0.5),
        "time": when,
        "default": counted,
        "deque": deque([1, 2]),
        "count": Counter(a=2, b=1),
        "size": torch.Size([3, 4]),
        "dtype": torch.float16,
        "storage class": torch.FloatStorage,
        "w": torch.ones(2),
        "types": [int, str, set, torch.Tensor],
        "device": torch.device("cpu"),
    }
    root = {
        "namespace": Call("argparse.Namespace", (), {"lr": 0.5}),
        "time": Call("datetime.timedelta", (1, 2, 3)),
        "default": Call("collections.defaultdict", (Global("builtins.list"),), None, {"a": [1]}),
        "deque": Call("collections.deque", (), elements=[1, 2]),
        "count": Call("collections.Counter", ({"a": 2, "b": 1},)),
        "size": Call("torch.Size", ((3, 4),)),
        "dtype": Global("torch.float16"),
        "storage class": Global("torch.FloatStorage"),
        "w": value["w"],
        "types": [
            Global(name)
            for name in ("builtins.int", "builtins.str", "builtins.set", "torch.Tensor")
        ],
        "device": Call("torch.device", (str(torch.device("cpu")),)),  # not a tensor's own "cpu"
    }
    ours = assert_as_torch(source, value, tmp_path, root)
    assert torch.load(ours, weights_only=False)["namespace"].lr == 0.5


def test_a_nested_class_is_named_through_its_owner(source, tmp_path):
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    name = "torch.distributed._shard.sharded_tensor.api.ShardedTensor.ProcessGroupState"
    value = [ShardedTensor.ProcessGroupState, ShardedTensor, ShardedTensor.ProcessGroupState]
    root = [Global(name), Global(name.rpartition(".")[0]), Global(name)]
    # From 3.13 on, pickle memoizes neither the owner nor the attribute (`Pickler.save_global`).
    # Our bytes do not depend on the version of Python; every version reads both forms.
    if sys.version_info < (3, 13):
        assert_as_torch(source, value, tmp_path, root)
    ours = written(source, root, tmp_path)
    theirs = saved_by_torch(value, ours)
    safe = [getattr, ShardedTensor, ShardedTensor.ProcessGroupState]
    with torch.serialization.safe_globals(safe):
        for path in (ours, theirs):
            assert torch.load(path, weights_only=True) == value
            assert torch_reader.read(str(path)).root == root


# ---------------------------------------------------------------------------- what is not torch's


def test_files_that_differ_in_what_is_known_have_another_id():
    def known(value, data=b"abcd"):
        literal = StorageView(Storage(dtypes.UINT8, 4, data=data), (4,))
        return lay_out_object("x.pt", [value, literal]).files[0].literals

    def digits(literals):
        data = b"".join(data for _, data in literals)
        at = data.index(b"serialization_id") + len("serialization_id")
        return next(part for part in data[at:].split(b"Z") if part[:40].isdigit())[:40]

    ids = {digits(known(1)), digits(known(2)), digits(known(1, b"abce")), digits(known(1))}
    assert len(ids) == 3


@pytest.mark.parametrize(
    "wrong",
    [object(), bytearray(b"a"), torch.Size([1]), range(3), type, ...],
)
def test_a_value_that_cannot_be_written_is_refused(wrong):
    with pytest.raises(UnsupportedError, match=r"x\.pt"):
        lay_out_object("x.pt", {"a": [wrong]})


@pytest.mark.parametrize("name", ["", "plain", "a.b\nq", "größe.X", ".x\n"])
def test_a_name_that_would_change_the_pickle_is_refused(name):
    for value in (Global(name), Call(name, ())):
        with pytest.raises(UnsupportedError):
            lay_out_object("x.pt", [value])


def nested(kind, depth):
    value: object = 1
    for _ in range(depth):
        value = {
            "list": lambda v: [v],
            "tuple": lambda v: (v,),
            "dict": lambda v: {"a": v},
            "ordered": lambda v: OrderedDict(a=v),
            "call": lambda v: Call("a.B", (), {"v": v}),
            "wrapper": lambda v: Call("a.B", (Global("a.B"),), {"v": v}),
        }[kind](value)
    return value


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "ordered", "call", "wrapper"])
def test_deep_nesting_is_written_or_refused(kind):
    lay_out_object("x.pt", nested(kind, 40))
    for depth in (101, 900, 5000):
        with pytest.raises(UnsupportedError, match="deep"):
            lay_out_object("x.pt", nested(kind, depth))


def test_a_call_whose_argument_is_itself_is_refused():
    call = Call("a.B", ())
    call.args = (call,)
    with pytest.raises(UnsupportedError):
        lay_out_object("x.pt", call)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StorageView(Storage(dtypes.FLOAT32, 3), (2, 2)),
        lambda: StorageView(Storage(dtypes.FLOAT32, 4), (2,), (4,)),
        lambda: StorageView(Storage(dtypes.FLOAT32, 4), (2,), (1,), 3),
        lambda: StorageView(Storage(dtypes.FLOAT32, 4), (2,), (1, 1)),
        lambda: Storage(dtypes.FLOAT32, 4, data=b"1234"),
        lambda: Storage(dtypes.FLOAT32, 4, (StorageBlock("param", "a", (5,), whole((5,))),)),
        lambda: Storage(dtypes.FLOAT32, 4, (StorageBlock("param", "a", (4,), whole((4,)), 1),)),
    ],
)
def test_a_slot_or_part_past_its_storage_is_refused(make):
    with pytest.raises(ValueError, match=r"storage|strides"):
        make()


def test_storages_of_parts_of_literal_data_and_of_nothing(source, tmp_path):
    """A flat parameter: two blocks, each a box of its own tensor, and padding between them."""
    values = torch.arange(20.0)
    source.stored(dtypes.FLOAT32, raw(values))
    (entry,) = source.entries
    blocks = [StorageBlock("param", entry.fqn, (20,), Box((12,), (3,)), 1)]
    blocks += [StorageBlock("param", entry.fqn, (20,), Box((4,), (5,)), 6)]
    flat = Storage(dtypes.FLOAT32, 13, tuple(blocks))
    root = {
        "flat": StorageView(flat, (13,)),
        "column": StorageView(flat, (2, 3), (3, 1), 6),
        "step": StorageView(Storage(dtypes.FLOAT32, 1, data=raw(torch.tensor(3.0))), ()),
        "zeros": StorageView(Storage(dtypes.BFLOAT16, 4), (2, 2)),
    }
    skeleton = lay_out_object("o.pt", root)
    (made,) = skeleton.entries
    assert [chunk.box for chunk in made.chunks] == [part.box for part in blocks]
    ours = source.fill(skeleton, tmp_path)
    wanted = torch.zeros(13)
    wanted[1:4], wanted[6:11] = values[12:15], values[4:9]
    loaded = torch.load(ours, weights_only=True)
    assert torch.equal(loaded["flat"], wanted)
    assert torch.equal(loaded["column"], wanted[6:12].view(2, 3))
    assert (loaded["step"].item(), loaded["zeros"].sum().item()) == (3.0, 0.0)
    with zipfile.ZipFile(ours) as archive:
        assert archive.testzip() is None


# -------------------------------------------------------------------------- names and stamps


@pytest.mark.parametrize(
    "name", ["rank.0.pt", "lr_scheduler", "bf16_zero_pp_rank_10_mp_rank_00_optim_states.pt", "é.pt"]
)
def test_an_archive_is_named_as_torch_names_it(source, tmp_path, name):
    state = {"w": torch.arange(7), "b": torch.ones(3)}
    ours = source.fill(lay_out_object(name, state, slot_of=source.slot_of), tmp_path)
    assert_same_file(ours, saved_by_torch(state, ours))


STAMP = Stamp(save_id="9f3a", rank=300, world_size=400, step=70_000, file="rank.300.pt")


@pytest.mark.parametrize("keys", [0, 1, 999, 1000])
def test_a_stamp_is_the_last_key_of_the_root(source, tmp_path, keys):
    state = {f"w{n}": torch.ones(1) for n in range(keys)} | {"step": "rank"}
    template = Template("rank.300.pt", state, slot_of=source.slot_of)
    first, ours = template.lay_out("rank.0.pt"), template.lay_out("rank.300.pt", STAMP)
    assert template.lay_out("rank.0.pt") == first
    loaded = torch.load(source.fill(ours, tmp_path), weights_only=True)
    assert loaded == {**state, stamps.KEY: STAMP.as_dict()}
    assert list(loaded) == [*state, stamps.KEY]
    assert torch_reader.read(tmp_path / "rank.300.pt").stamp == STAMP


@pytest.mark.parametrize("stamp", [None, STAMP])
def test_a_file_of_a_template_is_that_of_its_own_root(tmp_path, stamp):
    """Two objects vary, one of them inside of another; later values are shared with them."""
    names, inner, other = (
        [f"layer {n}" for n in range(300)],
        Call("a.B", (), {}),
        Call("a.B", (), {}),
    )
    outer = Call("a.C", (names[0],), {"inner": inner, "rank": 0, "names": names})
    known = StorageView(Storage(dtypes.UINT8, 4, data=b"abcd"), (4,))
    root = {"a": outer, "b": [names, known, inner], "c": other, "d": [other, outer, known]}

    def move_to(rank):
        inner.state.update(at=(rank, rank), group=[f"group {rank}"])
        outer.state.update(rank=rank)
        other.state.update(at=rank, root=inner)

    move_to(7)
    template = Template("x", root, varying=[inner, outer, other])
    for rank in (7, 0, 123, 1000, 70000, 7):
        move_to(rank)
        name = f"rank{rank}.pt"
        file, ours = template.lay_out_file(name, stamp)[0], bytearray()
        for offset, literal in file.literals:
            assert offset == len(ours)
            ours += literal
        assert len(ours) == file.nbytes
        assert file == template.lay_out_file(name, stamp)[0]
        alone = Template("x", root).lay_out(name, stamp).files[0]
        assert ours == b"".join(literal for _, literal in alone.literals)
        (tmp_path / name).write_bytes(ours)
        assert zipfile.ZipFile(tmp_path / name).testzip() is None


def test_an_object_that_varies_cannot_memoize_more():
    inner = Call("a.B", (), {"at": 1})
    template = Template("x", [inner], varying=[inner])
    inner.state.update(at=(1,))
    with pytest.raises(AssertionError, match=r"a\.B memoizes another number"):
        template.lay_out_file("x")


def test_a_stamped_file_is_torchs(source, tmp_path):
    root = {"model": OrderedDict(sample_tensors()), "world": 3}
    ours = source.fill(
        lay_out_object("rank.300.pt", root, slot_of=source.slot_of, stamp=STAMP), tmp_path
    )
    theirs = saved_by_torch({**root, stamps.KEY: STAMP.as_dict()}, ours)
    assert_same_file(ours, theirs)


def test_a_modules_state_dict_has_its_stamp_as_an_attribute(source, tmp_path):
    model = torch.nn.Linear(3, 2)
    state = OrderedDict(model.state_dict())
    laid = lay_out_object("m.pt", state, slot_of=source.slot_of, stamp=STAMP)
    ours = source.fill(laid, tmp_path)
    state.reshard_stamp = STAMP.as_dict()
    assert_same_file(ours, saved_by_torch(state, ours))
    for weights_only in (True, False):
        loaded = torch.load(ours, weights_only=weights_only)
        assert loaded.reshard_stamp == STAMP.as_dict()
        model.load_state_dict(loaded)


# ------------------------------------------------------------------------------------ large files


def tensors_of(sizes):
    entries = (Entry(name, "param", dtypes.UINT8, (n,), ()) for name, n in sizes.items())
    return [(entry, dtypes.UINT8) for entry in entries]


def laid_out_by_torch(sizes, directory):
    """Return PyTorch's names, headers, sizes and directory, with holes for data and CRCs of 0."""
    hole = directory / "hole"
    with hole.open("wb") as out:
        out.truncate(max(sizes.values()))
    state = {
        name: torch.from_file(str(hole), size=n, dtype=torch.uint8) for name, n in sizes.items()
    }
    with torch.serialization.skip_data():
        return saved_by_torch(state, directory / "ours.pt")


def laid_out_by_us(sizes, directory):
    """Write the literals of our file into a sparse file of its size."""
    skeleton = lay_out("ours.pt", tensors_of(sizes))
    (file,) = skeleton.files
    with (directory / "ours.pt").open("wb") as out:
        out.truncate(file.nbytes)
        for offset, data in file.literals:
            out.seek(offset)
            out.write(data)
    assert all(entry.chunks[0].byte_offset % 64 == 0 for entry in skeleton.entries)
    return directory / "ours.pt"


def assert_same_structure(sizes, directory):
    """Check that torch lays a file out alike, and finds every tensor in ours."""
    directory.mkdir(exist_ok=True)
    ours = laid_out_by_us(sizes, directory)
    if not TORCH_2_6:
        theirs = laid_out_by_torch(sizes, directory)
        assert ours.stat().st_size == theirs.stat().st_size
        assert without_crcs(ours) == without_crcs(theirs)
    loaded = torch.load(ours, weights_only=True, mmap=True)
    assert {name: tensor.numel() for name, tensor in loaded.items()} == sizes


def without_crcs(path):
    """Return everything outside the data but CRCs and the id, each run with its offset."""
    size = path.stat().st_size
    with SourceFiles() as files:
        archive = Section(files, str(path), 0, size)
        members = zip_reader.read_directory(archive)
        gone = []
        for name, member in members.items():
            start = member.data_offset(archive)
            if "/data/" in name:
                gone.append((start, start + member.nbytes))
            elif name.endswith("_id"):
                gone.append((start, start + 40))
            gone.append((start + member.nbytes + 4, start + member.nbytes + 8))
            gone.append((member.entry_offset + 16, member.entry_offset + 20))
        kept, at = [], 0
        for start, stop in [*sorted(gone), (size, size)]:
            kept.append((at, archive.read(at, start - at)))
            at = stop
    return kept


FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    "sizes",
    [[FULL + 1000, 5, 70], [FULL - 1, 3], [FULL, 3], [3 << 30, 2 << 30, 1, 6 << 30, 8]],
)
def test_members_and_offsets_past_4_gib_are_laid_out_as_torch_does(tmp_path, sizes):
    assert_same_structure({f"w{n}": size for n, size in enumerate(sizes)}, tmp_path)


@pytest.mark.parametrize("shift", [-2, -1, 0, 1])
def test_a_header_at_the_last_32_bit_offset(tmp_path, shift):
    """The second member's header just before 4 GiB, at the last offset of 32 bits, and past it."""
    header = FULL + shift
    first = {"a": header - 1000, "b": 3}
    begins = lay_out("ours.pt", tensors_of(first)).entries[0].chunks[0].byte_offset
    sizes = {"a": header - 16 - begins, "b": 3}
    assert lay_out("ours.pt", tensors_of(sizes)).entries[0].chunks[0].byte_offset == begins
    assert_same_structure(sizes, tmp_path)


def test_a_directory_about_4_gib(tmp_path):
    for shift in range(0, 1600, 100):
        assert_same_structure({"a": FULL - shift}, tmp_path / f"{shift}")


@pytest.mark.slow
def test_more_members_than_16_bits_count(source, tmp_path):
    state = [torch.empty(0, dtype=torch.uint8) for _ in range(65_540)]
    ours = assert_as_torch(source, state, tmp_path)
    assert len(torch_reader.read(ours).records) == 65_540


# --------------------------------------------------------------------------------- files read again


def copied(path, tmp_path, builders=AS_WRITTEN):
    """Lay out what reshard read from a file, and fill it again."""
    file = torch_reader.read(path, builders=builders)
    data = Path(path).read_bytes()
    source = Source(tmp_path / "copied from")
    made: dict[str, Storage] = {}

    def slot_of(leaf):
        if not isinstance(leaf, torch_objects.Tensor):
            return None
        stored = leaf.storage
        if stored.key not in made:
            content = data[stored.byte_offset : stored.byte_offset + stored.nbytes]
            made[stored.key] = source.stored(leaf.dtype, content)
        return StorageView(made[stored.key], leaf.shape, leaf.strides, leaf.offset)

    return file, source.fill(lay_out_object("copy.pt", file.root, slot_of=slot_of), tmp_path)


def plain(value, path):
    """Return a comparable value: calls and tensors become tuples of their contents."""
    if isinstance(value, torch_objects.Tensor):
        stored = value.storage
        with SourceFiles() as files:
            held = files.read(path, stored.byte_offset, stored.nbytes)
        _file, *view = value.place
        return tuple(view), value.dtype, held
    if isinstance(value, Call):
        parts = (value.args, value.state, value.items, value.elements)
        return value.name, *(plain(part, path) for part in parts)
    if isinstance(value, dict):
        return {plain(k, path): plain(v, path) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v, path) for v in value)
    return value


def assert_copied(path, tmp_path, **options):
    file, copy = copied(path, tmp_path, **options)
    again = torch_reader.read(copy, builders=AS_WRITTEN)
    assert plain(again.root, str(copy)) == plain(file.root, str(path))
    return copy


def test_a_checkpoint_is_written_again_byte_for_byte(tmp_path):
    state = {
        "model": OrderedDict(sample_tensors()),
        "optimizer": trained(torch.optim.AdamW),
        "size": torch.Size([2, 3]),
        "counts": defaultdict(int, a=1),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    path = saved_by_torch(state, tmp_path / "copy.pt")
    copy = assert_copied(path, tmp_path)
    assert_same_file(copy, path)


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # torch 2.6, on a CPU
def test_dtensors_are_written_again_and_loaded_as_dtensors(tmp_path):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        weight = torch.arange(15.0).view(5, 3)
        local = DTensor.from_local(
            weight[3:].clone(), mesh, [Shard(0)], shape=weight.shape, stride=weight.stride()
        )
        whole_one = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        held = {"w": local, "b": whole_one, "plain": torch.ones(2)}
        path = saved_by_torch(held, tmp_path / "copy.pt")
    finally:
        distributed.destroy_process_group()
    copy = assert_copied(path, tmp_path)
    for weights_only in (True, False):
        loaded = torch.load(copy, weights_only=weights_only)
        assert isinstance(loaded["w"], DTensor)
        assert loaded["w"].shape == (5, 3)
        assert loaded["w"].placements == (Shard(0),)
        assert torch.equal(loaded["w"].to_local(), weight[3:])
        assert isinstance(loaded["w"]._spec.tensor_meta.shape, torch.Size)
        assert loaded["w"]._spec == torch.load(path, weights_only=weights_only)["w"]._spec
        assert loaded["w"].device_mesh.mesh.tolist() == [0, 1]
