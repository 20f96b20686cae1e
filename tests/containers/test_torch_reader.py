"""What ``torch.save`` writes is read bit for bit, in both of its formats."""

from __future__ import annotations

import contextlib
import math
import pickle
import random
import sys
import types
from argparse import Namespace
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import distributed
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import reshard
from reshard.containers import pickle_cache, torch_objects, torch_reader
from reshard.containers.pickle_cache import PickleCache
from reshard.containers.torch_objects import Tensor
from reshard.core import stamps
from reshard.core.box import whole
from reshard.core.manifest import Entry, Manifest, Origin, check
from reshard.core.stamps import Stamp
from reshard.errors import CorruptError, ReshardError, UnsupportedError
from reshard.state_dict import tree
from reshard.state_dict.sharded_reader import Saver
from reshard.system.files import SourceFiles
from reshard.tensors.lazy import read_block
from tests.support.sample_tensors import raw, same, sample_tensors

FORMATS = {"zip": True, "legacy": False}


def save(value, path, form="zip"):
    torch.save(value, path, _use_new_zipfile_serialization=FORMATS[form])
    return path


def bits(file, tensor):
    """Return a tensor's bits through the planner and the executor, which proves its coverage."""
    entry = Entry("x", "param", tensor.dtype, tensor.shape, (tensor.chunk,))
    check(
        Manifest(Origin("test", ""), {entry.key: entry}, {file.path: file.source()}, ordered=True)
    )
    with SourceFiles() as pool:
        return bytes(read_block(pool, entry, whole(entry.shape)))


@pytest.mark.parametrize("form", FORMATS)
def test_the_whole_menagerie_in_one_file_is_read_bit_for_bit(tmp_path, form):
    zoo = sample_tensors()
    path = save(zoo, tmp_path / "zoo.pt", form)
    with reshard.open(path) as checkpoint:
        assert set(checkpoint) == set(zoo)
        assert [name for name, t in zoo.items() if not same(checkpoint[name][...], t)] == []
        assert checkpoint.manifest.tied == {"tied.b": "tied.a"}


def test_a_save_that_failed_on_an_object_is_told(tmp_path):
    """Torch closes the archive properly if pickling raises."""
    with pytest.raises((AttributeError, pickle.PicklingError)):  # the second in Python 3.14
        torch.save({"w": torch.ones(2), "f": lambda: 0}, tmp_path / "x.pt")
    with pytest.raises(CorruptError, match=r"torch\.save failed while it wrote the file"):
        torch_reader.read(tmp_path / "x.pt")


def test_files_without_checksums_are_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save(sample_tensors(), tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    file = torch_reader.read(path)
    assert all(record.crc32 is None for record in file.records.values())
    with reshard.open(path) as checkpoint:
        assert all(same(checkpoint[name][...], t) for name, t in sample_tensors().items())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_a_lazily_conjugated_or_negated_tensor_has_its_right_values(tmp_path, form, lazy):
    """PyTorch stores the plain bits and a flag; reading the bits alone would flip signs."""
    base = torch.complex(torch.arange(1.0, 4.0), torch.arange(5.0, 8.0)).conj()
    tensor = base if lazy == "conj" else base.imag
    assert tensor.is_conj() or tensor.is_neg()
    path = save({"x": tensor, "y": torch.ones(2)}, tmp_path / "x.pt", form)
    with contextlib.suppress(UnsupportedError), reshard.open(path) as checkpoint:
        assert same(checkpoint["x"][...], tensor.resolve_conj().resolve_neg())


class Codes(torch.Tensor):
    """What torchao's quantised tensors are: a class that computes its elements from others."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), given=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(function)


def test_a_weight_that_its_class_computes_is_refused_by_name(tmp_path):
    state = {"odd.weight": Codes(torch.ones(3, dtype=torch.int8)), "plain.weight": torch.ones(2)}
    path = save({"model": state}, tmp_path / "x.pt")
    with pytest.raises(
        UnsupportedError, match=r"odd\.weight is a tests\.containers\.test_torch_reader\.Codes"
    ):
        reshard.open(path)


@pytest.fixture
def cast_weight(monkeypatch):
    """Give `Codes` the name of a class of torchao that holds a weight and casts it when used."""
    name = "torchao.float8.fsdp_utils"
    held = type("WeightWithDynamicFloat8CastTensor", (Codes,), {"__module__": name})
    module = types.ModuleType(name)
    module.WeightWithDynamicFloat8CastTensor = held
    for parent in ("torchao", "torchao.float8"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    return held


def test_a_weight_that_is_cast_when_used_is_the_tensor_that_its_class_holds(cast_weight, tmp_path):
    weight = cast_weight(torch.arange(3.0))
    weight._tensor = torch.arange(3.0)
    path = save({"model": {"a.weight": weight}}, tmp_path / "x.pt")
    with reshard.open(path) as checkpoint:
        assert torch.equal(checkpoint["a.weight"][...], torch.arange(3.0))


def test_a_weight_with_rows_of_padding_is_refused_by_name(tmp_path):
    """As xtuner's ``WeightWithDynamicTilewiseFloat8CastTensor``: its shape is the padded one."""
    weight = Codes(torch.ones(128, 2))
    weight._tensor, weight._ori_shape = torch.ones(128, 2), (100, 2)
    path = save({"model": {"a.weight": weight, "b.weight": torch.ones(2)}}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedError, match=r"a\.weight is a .*Codes, xtuner's weight") as told:
        reshard.open(path)
    assert told.value.remedy == "save the model with xtuner's save_hf"


@pytest.mark.parametrize("held", [None, torch.ones(4), torch.ones(3, dtype=torch.float64)])
def test_a_weight_that_is_cast_when_used_must_hold_its_tensor(cast_weight, held, tmp_path):
    weight = cast_weight(torch.ones(3))
    weight._tensor = held
    path = save({"model": {"a.weight": weight}}, tmp_path / "x.pt")
    with pytest.raises(CorruptError, match=r"WeightWithDynamicFloat8CastTensor"):
        reshard.open(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "quantized", "complex32", "meta"])
def test_a_tensor_that_cannot_be_read_is_never_skipped_in_silence(tmp_path, kind):
    odd = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "complex32": lambda: torch.ones(3, dtype=torch.complex32),
        "meta": lambda: torch.ones(3, device="meta"),
    }[kind]()
    path = save({"odd.weight": odd, "plain.weight": torch.ones(2)}, tmp_path / "x.pt")
    with contextlib.suppress(ReshardError):
        manifest = reshard.open(path).manifest
        assert any("odd.weight" in warning for warning in manifest.warnings)


def test_names_that_become_equal_as_text_are_never_merged_in_silence(tmp_path):
    path = save({0: torch.ones(2), "0": torch.zeros(2)}, tmp_path / "x.pt")
    with pytest.raises(ReshardError):
        reshard.open(path)


def test_a_scalar_counter_is_read_as_a_number(tmp_path):
    counters = {
        "f": torch.tensor(7.0),
        "d": torch.tensor(7.5, dtype=torch.float64),
        "i": torch.tensor([9]),
        "j": torch.arange(5, dtype=torch.int32)[3],
    }
    file = torch_reader.read(save(counters, tmp_path / "x.pt"))
    assert {name: file.read_number(t) for name, t in file.root.items()} == {
        "f": 7.0,
        "d": 7.5,
        "i": 9,
        "j": 3,
    }


@pytest.mark.parametrize(
    "wrong", [torch.ones(2), torch.ones(1, dtype=torch.bfloat16), torch.empty(0)]
)
def test_a_counter_that_is_no_number_is_refused(tmp_path, wrong):
    file = torch_reader.read(save({"x": wrong}, tmp_path / "x.pt"))
    with pytest.raises(ReshardError):
        file.read_number(file.root["x"])


@pytest.mark.parametrize("form", FORMATS)
def test_random_views_are_read_bit_for_bit(tmp_path, form):
    chance = random.Random(1)
    base = torch.arange(4 * 5 * 6, dtype=torch.int32).view(4, 5, 6)
    views = {"base": base}
    for number in range(60):
        view = base
        for _ in range(chance.randint(1, 4)):
            dim = chance.randrange(view.ndim) if view.ndim else 0
            kind = chance.randrange(4) if view.ndim else 3
            if kind == 0:
                start = chance.randint(0, view.shape[dim])
                view = view.narrow(dim, start, chance.randint(0, view.shape[dim] - start))
            elif kind == 1:
                view = view.transpose(dim, chance.randrange(view.ndim))
            elif kind == 2:
                index = [slice(None)] * view.ndim
                index[dim] = slice(None, None, chance.randint(1, 3))
                view = view[tuple(index)]
            else:
                view = view.unsqueeze(0).expand(chance.randint(1, 2), *view.shape)
        views[f"v{number}"] = view
    file = torch_reader.read(save(views, tmp_path / "v.pt", form))
    wrong = [name for name, view in views.items() if bits_or_empty(file, name) != raw(view)]
    assert wrong == []
    assert len(file.records) == 1  # they share a storage
    assert len({id(tensor.storage) for tensor in file.root.values()}) == 1


def bits_or_empty(file, name):
    tensor: Tensor = file.root[name]
    return bits(file, tensor) if tensor.numel else b""


def test_a_file_that_is_not_torchs_is_refused(tmp_path):
    for content in (b"", b"PK", b"\x80\x02}q\x00.", b"x" * 100, b"PK\x03\x04" + b"\0" * 60):
        path = tmp_path / "x.pt"
        path.write_bytes(content)
        with pytest.raises(CorruptError, match=r"x\.pt"):
            torch_reader.read(path)


def test_a_pickle_that_is_known_is_not_parsed_again_and_its_storages_lie_in_its_own_file(tmp_path):
    empty = {"module": {"w": torch.empty(0), "v": torch.empty(0, dtype=torch.bfloat16)}, "step": 3}
    full = {"module": {"w": torch.arange(4.0)}}
    files = {"a": empty, "b": empty, "c": full, "d": full}
    for name, root in files.items():
        torch.save(root, tmp_path / name)
    cache = PickleCache()
    read = {name: torch_reader.read(tmp_path / name, cache=cache) for name in files}
    assert read["b"].root is read["a"].root
    assert read["d"].root is not read["c"].root  # whose tensor lies in the file itself
    for name, file in read.items():
        alone = torch_reader.read(tmp_path / name)
        assert (file.records, file.globals, file.path) == (
            alone.records,
            alone.globals,
            str(tmp_path / name),
        )
    for name in "cd":
        assert read[name].root["module"]["w"].storage.file == str(tmp_path / name)


def make_nested(n):
    tensor = torch.ones(n)
    state = {0: {"exp_avg": tensor[1:], "steps": (tensor, [3, tensor])}}
    return {"param": tensor, "optimizer": {"state": state, "param_groups": [{"lr": 0.1}]}}


@pytest.fixture
def parsed(monkeypatch):
    """Return a list of the pickles that are parsed."""
    loads, seen = pickle_cache.loads, []
    counted = lambda data, **options: seen.append(data) or loads(data, **options)  # noqa: E731
    monkeypatch.setattr(pickle_cache, "loads", counted)
    return seen


@pytest.mark.parametrize(
    "make", [torch.arange, lambda n: {"cat_dim": 0, "param": torch.ones(n)}, make_nested]
)
def test_a_simple_pickle_that_is_known_is_not_parsed_again(tmp_path, parsed, make):
    cache, read = PickleCache(), {}
    for name in ("a", "b", "longer_by_far"):
        torch.save(make(5), tmp_path / name)
        read[name] = torch_reader.read(tmp_path / name, cache=cache)
    assert len(parsed) == 1
    for name, file in read.items():
        alone = torch_reader.read(tmp_path / name)
        held, wanted = (
            f.root["param"] if isinstance(f.root, dict) else f.root for f in (file, alone)
        )
        assert (file.records, file.source()) == (alone.records, alone.source())
        assert held.place == wanted.place
        assert held.chunk == wanted.chunk
        assert held.storage.file == str(tmp_path / name)
    assert read["a"].root is not read["b"].root


def make_rank(form, stamp):
    """Return a state with a stamp: the last key of it, the first one, or an attribute."""
    if form == "attribute":
        state = OrderedDict(param=torch.ones(3)[1:])
        state._metadata = {"version": 1}
        setattr(state, stamps.KEY, stamp.as_dict())
        return state
    names = dict.fromkeys(map(str, range(300 if form == "long" else 3)), "text")
    state = {"step": 7, "names": names, "param": torch.ones(3)[1:]}
    own = {stamps.KEY: stamp.as_dict()}
    return own | state if form == "first" else state | own


@pytest.mark.parametrize("form", ["key", "long", "attribute", "first"])
def test_a_pickle_that_differs_in_its_stamp_alone_is_not_parsed_again(tmp_path, parsed, form):
    cache, ranks = PickleCache(), [0, 1, 255, 256, 65_536, 69_999]
    for rank in ranks:
        path = tmp_path / f"rank_{rank}.pt"
        torch.save(make_rank(form, Stamp("9f3a", rank, 70_000, 7, path.name)), path)
        file = torch_reader.read(path, cache=cache)
        assert file.stamp == Stamp("9f3a", rank, 70_000, 7, path.name)
        assert stamps.KEY not in file.root
        assert file.is_known == (form != "first" and rank > 0)
        assert file.root["param"].storage.file == str(path)
        assert file.source() == torch_reader.read(path).source()
    assert len(parsed) == len(ranks) + (len(ranks) if form == "first" else 1)


def test_a_pickle_whose_stamp_differs_in_more_is_parsed(tmp_path, parsed):
    cache, first = PickleCache(), Stamp("9f3a", 0, 2, 7, "a")
    others = [replace(first, save_id="9f3b"), replace(first, world_size=3), replace(first, step=8)]
    for number, stamp in enumerate([first, *others]):
        torch.save(make_rank("key", stamp), tmp_path / f"{number}")
        assert torch_reader.read(tmp_path / f"{number}", cache=cache).stamp == stamp
    assert len(parsed) == 4
    torch.save(make_rank("key", replace(first, rank=2)), tmp_path / "high")
    with pytest.raises(CorruptError, match="reshard_stamp states rank 2 of 2 ranks"):
        torch_reader.read(tmp_path / "high", cache=cache)


def test_a_text_that_looks_like_a_stamp_is_none(tmp_path, parsed):
    """The text ends a pickle as a stamp does, but the number in it is no rank."""
    cache, stamp = PickleCache(), Stamp("9f3a", 0, 9, 7, "a")
    for number in (1, 2):
        last = make_rank("key", replace(stamp, rank=number))
        pickled = pickle.dumps(last[stamps.KEY], 2)
        start = pickled.index(b"X\x07\0\0\0save_id")
        text = "X\r\0\0\0reshard_stampq\0}q\0(" + pickled[start:].decode()
        torch.save({stamps.KEY: stamp.as_dict(), "text": {"more": text}}, tmp_path / f"{number}")
        file = torch_reader.read(tmp_path / f"{number}", cache=cache)
        assert (file.stamp, file.root) == (stamp, {"text": {"more": text}})
    assert len(parsed) == 2


def test_the_tensors_of_a_nested_pickle_lie_in_their_own_file(tmp_path):
    cache = PickleCache()
    for name in ("a", "longer_by_far"):
        torch.save(make_nested(5), tmp_path / name)
        root = torch_reader.read(tmp_path / name, cache=cache).root
        state = root["optimizer"]["state"][0]
        tensor, (three, again) = state["steps"]
        assert three == 3
        assert tensor is again
        assert tensor is root["param"]
        assert tensor.storage is state["exp_avg"].storage
        assert tensor.storage.file == str(tmp_path / name)
        offsets = [each.chunk.byte_offset for each in (tensor, state["exp_avg"])]
        assert offsets == [tensor.storage.byte_offset, tensor.storage.byte_offset + 4]


def test_a_pickle_with_a_tensor_in_an_object_is_not_parsed_again(tmp_path, parsed):
    cache = PickleCache()
    for name in ("a", "longer_by_far"):
        held = Namespace(weight=torch.ones(3))
        torch.save({"args": held, "again": [held]}, tmp_path / name)
        root = torch_reader.read(tmp_path / name, cache=cache).root
        assert root["args"] is root["again"][0]
        assert root["args"].get("weight").storage.file == str(tmp_path / name)
    assert len(parsed) == 1


def test_a_pickle_with_a_tensor_as_a_key_is_parsed_for_each_file(tmp_path, parsed):
    cache = PickleCache()
    for name in ("a", "b"):
        torch.save({torch.ones(3): "value"}, tmp_path / name)
        (key,) = torch_reader.read(tmp_path / name, cache=cache).root
        assert key.storage.file == str(tmp_path / name)
    assert len(parsed) == 2


def save_dtensors(rank, world, path):
    """Save what a rank has of two tensors that are cut over a mesh, and return its stamp."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, world // 2))
        cut = [Shard(0), Shard(0)]
        state = {name: DTensor.from_local(torch.zeros(2, 3), mesh, cut) for name in "ab"}
        torch.save(reshard.stamp(state, step=1, save_id="x", file=path.name), path)
    finally:
        distributed.destroy_process_group()


def test_dtensors_that_differ_in_their_rank_alone_are_not_parsed_again(tmp_path):
    cache = PickleCache()
    for rank in (0, 1, 150, 256, 299):
        path = tmp_path / f"rank_{rank}.pt"
        save_dtensors(rank, 300, path)
        file, alone = torch_reader.read(path, cache=cache), torch_reader.read(path)
        saver = tree.find_saver(alone)  # torch states it since 2.10
        assert file.is_known == (rank > 0 and saver is not None)
        assert (file.stamp, file.source()) == (alone.stamp, alone.source())
        assert tree.find_saver(file) == saver
        assert saver in (None, Saver(rank, tuple(range(300)), needed=True))
        described = tree.convert_file(file, rank)
        assert described == tree.convert_file(alone, rank)
        assert described["b"].chunks[0].box.origin == (2 * rank, 0)
        assert described["b"].chunks[0].file == str(path)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_pickle_that_holds_itself_is_read_again_and_again(tmp_path, lost):
    """A tensor that is a key of a dict is not found, which may make up for the cycle."""
    cache, root = PickleCache(), {"weight": torch.ones(3)}
    root["self"] = [root, {torch.ones(1): None for _ in range(lost)}]
    for name in ("a", "b"):
        torch.save(root, tmp_path / name)
        read = torch_reader.read(tmp_path / name, cache=cache).root
        assert read["self"][0]["self"] is read["self"]
        assert read["weight"].storage.file == str(tmp_path / name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_an_element_is_read_where_it_lies(tmp_path, dtype):
    torch.save(torch.arange(6).reshape(2, 3).T.to(dtype), tmp_path / "x.pt")
    chunk = torch_reader.read(tmp_path / "x.pt").root.chunk
    with SourceFiles() as files:
        assert [torch_objects.read_weight(files, chunk, at) for at in range(6)] == [
            0,
            3,
            1,
            4,
            2,
            5,
        ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_an_element_that_is_no_plain_float_is_no_number(tmp_path, dtype):
    torch.save(torch.arange(6).to(dtype), tmp_path / "x.pt")
    chunk = torch_reader.read(tmp_path / "x.pt").root.chunk
    with SourceFiles() as files:
        assert math.isnan(torch_objects.read_weight(files, chunk, 1))


def test_the_result_of_a_collective_that_was_not_read_yet(tmp_path):
    """``full_tensor`` of a DTensor returns one, which a script may save."""
    want = torch.arange(6.0).view(2, 3)
    torch.save({"w": AsyncCollectiveTensor(want)}, tmp_path / "model.pt")
    with reshard.open(tmp_path / "model.pt") as checkpoint:
        assert torch.equal(checkpoint["w"][...], want)
