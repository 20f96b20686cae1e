"""Files that are computed when they are read have the bytes that `execute` writes."""

from __future__ import annotations

import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import reshard
from reshard.commands.split.options import SplitOptions
from reshard.core.box import whole
from reshard.core.chunks import Chunk
from reshard.core.dtypes import UINT8
from reshard.core.manifest import PARAM, Entry, OutputFile, Skeleton, index_entries
from reshard.engine.move.fill import Filler
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.engine.move.tiles import find_reader
from reshard.engine.planning.planner import Plan
from reshard.errors import CorruptError, DifferentError, IncompleteError, UsageError
from reshard.live.files import log_report, open_live_files, read_options
from reshard.system.derived import Derived
from reshard.system.files import SourceFiles
from tests.support.directories import read_files
from tests.support.random_checkpoints import run, scene, sharded_target, whole_target


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("workers", [1, 3])
def test_any_range_of_any_target(tmp_path, seed, workers):
    made, chance = scene(tmp_path / "in", seed), random.Random(seed)
    for number, skeleton in enumerate([whole_target(made, files=2), sharded_target(made, seed)]):
        out = tmp_path / f"out{number}"
        run(made, skeleton, out)
        with SourceFiles() as pool:
            plan = Plan(made.entries, skeleton, 64)
            files = OnDemandFiles(plan, made.files(), pool, workers=workers)
            for name, written in read_files(out).items():
                assert files.read(name, 0, files.nbytes(name)) == written
                for _ in range(20):
                    start = chance.randrange(len(written) + 1)
                    count = chance.randrange(len(written) + 1)
                    assert files.read(name, start, count) == written[start : start + count]


@pytest.fixture
def saved(tmp_path):
    """Save a training state of torch with an optimizer in one file."""
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 33)).sum().backward()
    optimizer.step()
    path = tmp_path / "state.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def test_checksums_of_records_are_those_of_the_written_file(saved, tmp_path):
    reshard.split(saved, tmp_path / "out", to="dcp", world_size=2)
    with reshard.open_files(saved, to="dcp", world_size=2) as files:
        for path in (tmp_path / "out").iterdir():
            assert files.open(path.name).read() == path.read_bytes()


def test_files_without_options_are_those_of_merge(saved, tmp_path):
    reshard.merge(saved, tmp_path / "out")
    with reshard.open_files(saved) as files:
        assert set(files) == {path.name for path in (tmp_path / "out").iterdir()}
        for name in files:
            assert files.open(name).read() == (tmp_path / "out" / name).read_bytes()


def test_torch_loads_a_file_that_is_nowhere(saved):
    with open_live_files(saved, SplitOptions(to="torch")) as live:
        (name,) = live.files
        state = torch.load(live.files.open(name), weights_only=True)
        live.files.check_records()
    expected = torch.load(saved, weights_only=True)
    for fqn, value in expected["model"].items():
        assert torch.equal(state["model"][fqn], value)
    for number, slots in expected["optimizer"]["state"].items():
        assert torch.equal(state["optimizer"]["state"][number]["exp_avg"], slots["exp_avg"])


def test_a_damaged_record_is_found_once_all_of_it_was_read(saved):
    data = bytearray(saved.read_bytes())
    weight = torch.load(saved, weights_only=True)["model"]["0.weight"].numpy().tobytes()
    data[data.find(weight) + 100] ^= 1
    saved.write_bytes(data)
    with open_live_files(saved, SplitOptions(to="torch", trust="none")) as live:
        (name,) = live.files
        live.files.read(name, 0, live.files.nbytes(name))
        with pytest.raises(CorruptError, match="does not match its stored CRC-32"):
            live.files.check_records()


def test_a_value_that_a_cast_makes_infinite_is_an_error(tmp_path):
    torch.save({"weight": torch.tensor([1.0, 1e6])}, tmp_path / "w.pt")
    with open_live_files(tmp_path / "w.pt", SplitOptions(to="torch", dtype="fp16")) as live:
        (name,) = live.files
        with pytest.raises(DifferentError, match="1 finite value"):
            live.files.read(name, 0, live.files.nbytes(name))
        torch.load(live.files.open(name, checks=False), weights_only=True)
        with pytest.raises(DifferentError, match="1 finite value"):
            live.files.check()


LARGE = torch.full((1000,), 1e6)


@pytest.fixture
def large(tmp_path):
    """Save a bfloat16 weight with values that float16 does not have."""
    weights = {"large": LARGE.bfloat16(), "small": torch.ones(1000).bfloat16()}
    torch.save(weights, tmp_path / "large.pt")
    return tmp_path / "large.pt"


@pytest.mark.parametrize("on_overflow", ["clamp", "allow"])
def test_open_files_follow_on_overflow_as_merge_does(large, tmp_path, on_overflow, caplog):
    options = {"dtype": "fp16", "on_overflow": on_overflow}
    written = reshard.merge(large, tmp_path / "out", **options)
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    with reshard.open_files(large, **options) as files:
        assert files.open("model.safetensors").read() == data
        assert files.read("model.safetensors", 501, len(data)) == data[501:]
        assert files.overflowed == written.overflowed == {"large": 1000}
    (warning,) = (record.message for record in caplog.records if "large" in record.message)
    done = {"allow": "infinite", "clamp": "clamped to the largest finite one"}[on_overflow]
    assert warning == f"overflowed: values of large became {done}"


def test_open_files_refuse_only_the_ranges_that_overflow(large):
    with reshard.open_files(large, dtype="fp16") as files:
        name = "model.safetensors"
        data = files.nbytes(name)
        for _ in range(2):
            with pytest.raises(DifferentError, match="1000 finite values"):
                files.read(name, 0, data)
            with pytest.raises(DifferentError, match="1000 finite values"):
                files.read(name, data - 2003, 2000)
        with pytest.raises(DifferentError, match="1000 finite values"):
            files.open(name).read()
        assert files.read(name, data - 2000, 2000) == torch.ones(1000).half().numpy().tobytes()
        assert files.overflowed == {"large": 1000}


def test_a_live_load_clamps(large):
    options = SplitOptions(to="torch", dtype="fp16", on_overflow="clamp")
    with open_live_files(large, options) as live:
        (name,) = live.files
        loaded = torch.load(live.files.open(name, checks=False), weights_only=True)
        live.files.check()
    assert torch.equal(loaded["model"]["large"], torch.full((1000,), 65504.0).half())


def test_the_log_tells_what_is_loaded(saved, caplog):
    caplog.set_level("INFO", logger="reshard")
    with open_live_files(saved, SplitOptions(to="dcp", world_size=3)) as live:
        log_report(live.planned.report)
    assert caplog.messages[0] == f"loading {saved} without a copy on a disk"
    assert any("3 ranks" in message for message in caplog.messages)
    assert not any("would write" in message for message in caplog.messages)


def test_an_option_that_the_program_decides_is_refused():
    with pytest.raises(UsageError, match="decided by the running program"):
        read_options({"world_size": 3}, {"world_size": 2})
    with pytest.raises(UsageError, match="is not an option of split"):
        read_options({"nothing": 3}, {"world_size": 2})
    with (
        pytest.raises(UsageError, match="temporary file"),
        open_live_files("nowhere", SplitOptions(replicas="mean")),
    ):
        pass


def test_a_name_that_is_no_file(saved):
    with (
        open_live_files(saved, SplitOptions(to="torch")) as live,
        pytest.raises(IncompleteError, match="not a file of this checkpoint"),
    ):
        live.files.open("nothing.pt")


def test_buffers_are_freed_without_garbage_collection():
    """Those of computations too, which read from the object that keeps them."""

    class Kept:
        def read_into(self, pool, _byte_offset, _target):
            pool.kept.reader = find_reader(pool)
            made.append(weakref.ref(pool.kept.reader))

    made = []
    with SourceFiles() as pool:
        filler = Filler(pool, needs_checksum=lambda _path: False)
        made.append(weakref.ref(filler))
        filler.read_into(Derived("file", "computed", Kept()), 0, memoryview(bytearray(1)))
        del filler
        assert [each() for each in made] == [None, None]


class Tabled:
    """Bytes that a table gives, which takes long to make and is kept between two reads."""

    nbytes, tile_nbytes, files = 4096, 1, ()

    def __init__(self, made):
        self.made = made

    def read_into(self, pool, byte_offset, target):
        table = find_reader(pool).keep("table", self, self.make)
        target[:] = table[byte_offset : byte_offset + len(target)]

    def make(self):
        self.made.append(threading.get_ident())
        return bytes(range(256)) * 16


def computed(names, made, limit):
    """Return a plan of one file per name, whose parts of ``limit`` bytes are all computed."""
    box, strides = whole((Tabled.nbytes,)), (1,)
    source, target = [], []
    for name in names:
        chunk = Chunk(box, Derived("source", name, Tabled(made)), 0, strides, UINT8)
        source.append(Entry(name, PARAM, UINT8, box.shape, (chunk,)))
        chunk = Chunk(box, f"{name}.bin", 0, strides, UINT8)
        target.append(Entry(name, PARAM, UINT8, box.shape, (chunk,)))
    files = tuple(OutputFile(f"{name}.bin", Tabled.nbytes) for name in names)
    return Plan(index_entries(source), Skeleton(files, tuple(target)), limit)


@pytest.mark.parametrize("step", [100, 512, 1500])
def test_what_computations_keep_serves_the_next_read(step):
    """Also if the reads of two files alternate, and come from other threads."""
    made, content = [], Tabled([]).make()
    with SourceFiles() as pool:
        files = OnDemandFiles(computed("ab", made, 512), {}, pool, workers=2)
        for at in range(0, Tabled.nbytes, step):
            for name in ("a.bin", "b.bin"):
                with ThreadPoolExecutor(1) as other:
                    read = other.submit(files.read, name, at, step).result()
                assert read == content[at : at + step]
    assert len(made) == 2


def test_only_as_many_fillers_wait_as_there_are_workers():
    made, names = [], "abcdef"
    with SourceFiles() as pool:
        files = OnDemandFiles(computed(names, made, 512), {}, pool, workers=2)
        for name in (*names, *names, "f", "e", "f", "e"):
            files.read(f"{name}.bin", 0, 512)
    assert len(made) == 2 * len(names)


def test_a_filler_whose_read_failed_is_not_used_again():
    class Failing(Tabled):
        def read_into(self, pool, byte_offset, target):
            super().read_into(pool, byte_offset, target)
            if byte_offset == 512 and len(self.made) == 1:
                raise CorruptError("source", "damaged")

    made = []
    with SourceFiles() as pool:
        plan = computed("a", made, 512)
        entry = plan.target.entries[0]
        chunk = Chunk(whole((4096,)), Derived("source", "f", Failing(made)), 0, (1,), UINT8)
        source = index_entries([replace(entry, chunks=(chunk,))])
        files = OnDemandFiles(Plan(source, plan.target, 512), {}, pool)
        files.read("a.bin", 0, 512)
        with pytest.raises(CorruptError):
            files.read("a.bin", 512, 512)
        assert files.read("a.bin", 512, 512) == bytes(range(256)) * 2
    assert len(made) == 2
