"""Lazy tensors: torch's own indexing, and no byte read that is not needed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.containers import torch_reader
from reshard.core import dtypes
from reshard.core.box import Box, whole
from reshard.core.chunks import contiguous
from reshard.core.manifest import Entry, Manifest, Origin, SourceFile, index_entries
from reshard.errors import UnsupportedError, UsageError
from reshard.system.files import Section, SourceFiles
from reshard.tensors.lazy import Checkpoint, LazyTensor, find_first_difference, read_block
from tests.support.sample_tensors import raw, same, sample_tensors


class CountingFiles(SourceFiles):
    """Remembers every read."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def read_into(self, path, byte_offset, target):
        self.reads.append((path, byte_offset, len(target)))
        super().read_into(path, byte_offset, target)

    @property
    def nbytes(self):
        return sum(nbytes for _, _, nbytes in self.reads)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Open a zip of the sample tensors lazily."""
    path = tmp_path_factory.mktemp("zoo") / "zoo.pt"
    torch.save(sample_tensors(), path)
    with reshard.open(path) as checkpoint:
        yield checkpoint


def random_index(chance, shape):
    items = []
    for size in shape:
        kind = chance.randrange(5)
        if kind == 0 and size:
            items.append(chance.randint(-size, size - 1))
        elif kind == 1:
            items.append(slice(None))
        else:
            edges = [chance.choice((None, chance.randint(-size - 2, size + 2))) for _ in range(2)]
            items.append(slice(*edges, chance.choice((None, None, 1, 2, 3, size + 1))))
    if chance.random() < 0.4:
        start = chance.randint(0, len(items))
        items[start : chance.randint(start, len(items))] = [Ellipsis]
    elif chance.random() < 0.4:
        del items[chance.randint(0, len(items)) :]
    if len(items) == 1 and chance.random() < 0.5:
        return items[0]
    return tuple(items)


@pytest.mark.parametrize("name", list(sample_tensors()))
def test_any_index_gives_what_torch_gives(zoo, name):
    tensor = sample_tensors()[name]
    chance = random.Random(name)
    for _ in range(40):
        index = random_index(chance, tensor.shape)
        assert same(zoo[name][index], tensor[index]), index


@pytest.mark.parametrize("index", [5, -6, (0, 0, 0), (0, 17), (slice(None), -18), (0, ..., 0, 0)])
def test_an_index_out_of_range_is_an_index_error(zoo, index):
    tensor = torch.zeros(5, 17)
    lazy = LazyTensor(Entry("x", "param", dtypes.FLOAT32, (5, 17), ()), SourceFiles())
    with pytest.raises(IndexError):
        tensor[index]
    with pytest.raises(IndexError):
        lazy[index]


@pytest.mark.parametrize(
    "index", [None, "x", 1.0, [0, 1], (..., ...), slice(None, None, -1), slice(None, None, 0), True]
)
def test_an_index_that_is_not_supported_is_a_plain_error_and_no_wrong_tensor(index):
    lazy = LazyTensor(Entry("x", "param", dtypes.FLOAT32, (5, 17), ()), SourceFiles())
    with pytest.raises((IndexError, TypeError, ValueError)):
        lazy[index]


def test_a_dtype_that_the_installed_torch_lacks_is_named(zoo, monkeypatch):
    """As float8_e8m0fnu with torch 2.6."""
    monkeypatch.delattr(torch, "float8_e5m2")
    with pytest.raises(
        UnsupportedError, match=r"(?s)float8_e5m2: the installed torch .* install torch 2\.7"
    ):
        zoo["float8_e5m2"][0]


def test_indexing_gives_tensors_of_their_own(zoo):
    first = zoo["prime"][...]
    first.zero_()
    assert same(zoo["prime"][...], sample_tensors()["prime"])


def test_a_lazy_tensor_describes_itself_without_reading(zoo):
    assert zoo["prime.2d"].shape == (11, 17)
    assert zoo["bfloat16"].dtype == "bfloat16"
    assert repr(zoo["scalar"]) == "LazyTensor('scalar', shape=(), dtype=float32)"


@pytest.mark.parametrize(
    ("index", "nbytes"),
    [
        ((slice(3, 5),), 2 * 256 * 4),
        ((7,), 256 * 4),
        ((7, slice(10, 20)), 40),
        ((99, 255), 4),
        ((slice(4, 4),), 0),
        ((Ellipsis,), 100 * 256 * 4),
    ],
)
def test_only_the_bytes_of_the_block_are_read(tmp_path, index, nbytes):
    path = tmp_path / "w.safetensors"
    tensor = torch.arange(25600.0).view(100, 256)
    save_file({"w": tensor, "other": torch.zeros(5000)}, path)
    pool = CountingFiles()
    with reshard.open(path) as checkpoint:
        lazy = LazyTensor(checkpoint.manifest.entries["param", "w"], pool)
        assert same(lazy[index], tensor[index])
    assert pool.nbytes == nbytes


@pytest.mark.parametrize("columns", [1, 3, 100])
def test_narrow_columns_are_not_read_row_by_row_with_all_between(tmp_path, columns):
    path = tmp_path / "w.safetensors"
    tensor = torch.arange(200_000.0).view(50, 4000)
    save_file({"w": tensor}, path)
    pool = CountingFiles()
    with reshard.open(path) as checkpoint:
        lazy = LazyTensor(checkpoint.manifest.entries["param", "w"], pool)
        assert same(lazy[:, 17 : 17 + columns], tensor[:, 17 : 17 + columns])
    assert pool.nbytes <= max(4 * columns * 50 * 4, 50 * (32 << 10))
    assert pool.nbytes < tensor.nbytes


@pytest.mark.parametrize("turned", [False, True])
def test_a_narrow_block_of_many_short_rows_takes_few_reads(tmp_path, turned):
    """Runs of 16 bytes, 256 bytes apart: read together, not one system call each."""
    path = tmp_path / "w.pt"
    tensor = torch.arange(640_000.0).view(10_000, 64)
    torch.save({"w": tensor.t() if turned else tensor}, path)
    pool = CountingFiles()
    with reshard.open(path) as checkpoint:
        lazy = LazyTensor(checkpoint.manifest.entries["param", "w"], pool)
        block = lazy[3:7].t() if turned else lazy[:, 3:7]
    assert torch.equal(block, tensor[:, 3:7])
    assert len(pool.reads) < 500


def test_opening_reads_headers_only(tmp_path):
    path = tmp_path / "big.pt"
    torch.save({"w": torch.zeros(1 << 20), "v": torch.ones(1 << 20)}, path)
    pool = CountingFiles()
    file = torch_reader.read_archive(Section(pool, str(path), 0, path.stat().st_size))
    assert set(file.root) == {"w", "v"}
    assert pool.nbytes < 100_000


def test_read_block_casts_when_asked(tmp_path):
    path = tmp_path / "w.safetensors"
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    save_file({"w": tensor}, path)
    with reshard.open(path) as checkpoint, SourceFiles() as pool:
        entry = checkpoint.manifest.entries["param", "w"]
        data = read_block(pool, entry, Box((1, 2), (4, 3)), dtypes.BFLOAT16)
    assert bytes(data) == raw(tensor[1:5, 2:5].to(torch.bfloat16))


@pytest.mark.parametrize("at", [None, 0, 1, 41, 104])
def test_first_difference_finds_the_first_element(tmp_path, at):
    left = torch.arange(105, dtype=torch.int16).view(3, 5, 7)
    right = left.clone()
    if at is not None:
        right.view(-1)[at] ^= 256
        right.view(-1)[104] ^= 1
    save_file({"a": left, "b": right}, tmp_path / "x.safetensors")
    with reshard.open(tmp_path / "x.safetensors") as checkpoint, SourceFiles() as pool:
        held = checkpoint.manifest.entries
        assert find_first_difference(pool, held["param", "a"], held["param", "b"]) == at


def test_a_negative_zero_is_different_and_equal_nans_are_not(tmp_path):
    tensors = {"a": torch.tensor([float("nan"), 0.0]), "b": torch.tensor([float("nan"), -0.0])}
    save_file({**tensors, "c": tensors["a"].clone()}, tmp_path / "x.safetensors")
    with reshard.open(tmp_path / "x.safetensors") as checkpoint, SourceFiles() as pool:
        held = checkpoint.manifest.entries
        assert find_first_difference(pool, held["param", "a"], held["param", "b"]) == 1
        assert find_first_difference(pool, held["param", "a"], held["param", "c"]) is None


def test_a_checkpoint_is_a_mapping_with_its_aliases(zoo):
    names = set(sample_tensors())
    assert set(zoo) == set(zoo.keys()) == names
    assert len(zoo) == len(list(zoo)) == len(names)
    assert "tied.b" in zoo
    assert "nothing" not in zoo
    assert zoo.get("nothing") is None
    assert same(zoo["tied.b"][...], zoo["tied.a"][...])
    assert {name for name, lazy in zoo.items() if lazy.shape == ()} == {
        name for name, tensor in sample_tensors().items() if tensor.shape == ()
    }
    with pytest.raises(KeyError):
        zoo["nothing"]
    with pytest.raises(UsageError):
        zoo.optimizer("exp_avg")


def test_a_weight_is_its_master_and_slots_are_apart(tmp_path):
    path = tmp_path / "data"
    values = torch.arange(12.0)
    path.write_bytes(raw(values) + raw(values.bfloat16()))
    held = []
    for kind, at, dtype, shape in (
        ("param", 48, dtypes.BFLOAT16, (3,)),
        ("master", 0, dtypes.FLOAT32, (3,)),
        ("exp_avg", 12, dtypes.FLOAT32, (3,)),
    ):
        chunk = contiguous(str(path), at, dtype, whole(shape))
        held.append(Entry("w", kind, dtype, shape, (chunk,)))
    files = {str(path): SourceFile(str(path), 72)}
    manifest = Manifest(
        Origin("test", ""), index_entries(held), files, tied={"alias": "w"}, ordered=True
    )
    with Checkpoint(manifest) as checkpoint:
        assert list(checkpoint) == ["w", "alias"]
        assert checkpoint["w"].dtype == checkpoint["alias"].dtype == "float32"
        assert checkpoint["alias"][1:].tolist() == [1.0, 2.0]
        assert checkpoint.optimizer("exp_avg")["w"][...].tolist() == [3.0, 4.0, 5.0]
        for slot in ("param", "buffer", "momentum"):
            with pytest.raises(UsageError, match="exp_avg"):
                checkpoint.optimizer(slot)


def test_a_file_that_leaves_the_pool_while_it_is_read_is_still_that_file(tmp_path, monkeypatch):
    """Another thread opens others meanwhile: the number of its descriptor must not go to them."""
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name * 8)
    pread = os.pread

    def crowded(number, nbytes, offset):
        monkeypatch.setattr(os, "pread", pread)
        for other in paths[1:]:
            pool.read(str(other), 0, 8)
        return pread(number, nbytes, offset)

    with SourceFiles() as pool:
        monkeypatch.setattr(pool, "_most_open", 1)
        monkeypatch.setattr(os, "pread", crowded)
        assert pool.read(str(paths[0]), 0, 8) == b"a" * 8


def test_a_lazy_tensor_is_taken_by_numpy_and_by_torch(zoo):
    import numpy as np

    tensor = zoo["prime.2d"]
    expected = sample_tensors()["prime.2d"]
    assert (len(tensor), tensor.ndim, tensor.numel) == (11, 2, 187)
    assert tensor.nbytes == expected.nbytes
    assert same(tensor.torch(), expected)
    assert same(torch.from_dlpack(tensor), expected)
    assert np.array_equal(np.asarray(tensor), expected.numpy())
    assert np.asarray(tensor, dtype="float64").dtype == np.float64
    with pytest.raises(TypeError, match="BFloat16"):
        zoo["bfloat16"].numpy()
    with pytest.raises(TypeError, match="no length"):
        len(zoo["scalar"])


LLAMA = Path(__file__).resolve().parents[2] / "examples" / "llama-zero3-4ranks"


def test_a_checkpoint_shows_itself_in_a_line_and_as_a_table():
    with reshard.open(LLAMA) as checkpoint:
        assert checkpoint.format == "deepspeed"
        assert checkpoint.world_size == 4
        assert checkpoint.step == checkpoint.manifest.train.step is not None
        assert repr(checkpoint).startswith("<Checkpoint ")
        assert len(repr(checkpoint)) < 200
        table = checkpoint._repr_html_()
        assert table.count("<tr>") == len(checkpoint)
        assert "model.norm.weight" in table


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one():
    with reshard.open(LLAMA) as checkpoint:
        assert "model.norm.wieght" not in checkpoint
        with pytest.raises(KeyError, match=r"model\.norm\.weight"):
            checkpoint["model.norm.wieght"]


def test_a_model_loads_the_state_dict():
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(LLAMA)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with reshard.open(LLAMA) as checkpoint:
        state = checkpoint.state_dict()
        model.load_state_dict(state)
        assert same(model.model.norm.weight, checkpoint["model.norm.weight"][...])
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


def test_a_report_prints_as_the_command_does(tmp_path):
    report = reshard.merge(LLAMA, tmp_path / "model.safetensors")
    assert str(report).splitlines() == list(report.lines())
    assert repr(report).startswith("<MergeReport: wrote ")
    assert len(repr(report)) < 300
    assert report._repr_html_().count("<tr>") == len(list(report.lines()))
    for other in (reshard.inspect(LLAMA), reshard.verify(LLAMA), reshard.diff(LLAMA, LLAMA)):
        assert len(repr(other)) < 300
        assert "<td" in other._repr_html_()
