"""Checkpoints in an object store: the bytes are those of a local run, whatever the network does."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.engine.output import uploads
from reshard.errors import CorruptError, ExistsError, IncompleteError, ReshardError, UsageError
from reshard.system.remote import attempts, reading
from tests.support import object_stores
from tests.support.directories import read_files
from tests.support.object_stores import EXAMPLE, bucket, calm, contents, started  # noqa: F401
from tests.support.programs import run_python


def test_a_checkpoint_is_read_from_a_store(files, tmp_path):
    reshard.merge("s3://bucket/run", tmp_path / "remote")
    reshard.merge(EXAMPLE, tmp_path / "local")
    assert read_files(tmp_path / "remote") == read_files(tmp_path / "local")
    with reshard.open("s3://bucket/run") as there, reshard.open(EXAMPLE) as here:
        assert there.keys() == here.keys()
        name = "model.norm.weight"
        assert torch.equal(there[name][...], here[name][...])


def test_a_header_costs_few_requests(files, proxy):
    proxy.seen.clear()
    reshard.inspect("s3://bucket/run")
    checkpoint = [path for _, path in proxy.seen if ".pt" in path]
    assert len(list((EXAMPLE / "global_step4").glob("*.pt"))) == 8
    assert len(checkpoint) <= 2 * 8  # rank files of some hundred records each
    assert len(proxy.seen) <= 40


def count_in_flight(proxy, seconds, word=""):
    """Let requests for such paths wait; return a list of how many of them do, one by one."""
    lock, waiting, counts = threading.Lock(), [0], []

    def count(_method, path, _number):
        if word in path:
            with lock:
                waiting[0] += 1
                counts.append(waiting[0])
            time.sleep(seconds)
            with lock:
                waiting[0] -= 1

    proxy.reset()
    proxy.fault = count
    return counts


def test_blocks_of_all_ranks_are_fetched_at_a_time(files, proxy):
    reshard.split("s3://bucket/run", "s3://bucket/blocks/dcp", to="dcp", world_size=8)
    counts = count_in_flight(proxy, 0.2, ".distcp")
    reshard.inspect("s3://bucket/blocks/dcp")
    assert max(counts) >= 4  # of 8 files, each of which has some hundred small blocks
    assert len(counts) <= 2 * 8


def test_each_folder_is_listed_once_before_the_headers_are_read(files, proxy, tmp_path):
    reshard.merge("s3://bucket/run", tmp_path / "out")
    paths = [path for _, path in proxy.seen]
    before = proxy.seen[: next(number for number, path in enumerate(paths) if ".pt" in path)]
    assert [method for method, _ in before if method != "GET"] == []
    assert len(before) <= 4  # the run, its tag, its pointer to the tag
    assert all(method == "GET" for method, _ in proxy.seen)
    listed = [path for path in paths if "list-type" in path]
    assert len(listed) <= len(set(listed)) + 1  # at the end, the files that were read once more


def test_many_ranges_are_in_flight_at_once(files, proxy):
    name = next(each for each in files.find("bucket/run") if each.endswith("model_states.pt"))
    file = reading.RemoteFile(f"s3://{name}")
    counts = count_in_flight(proxy, 0.5)
    data = file.fetch_all([(start, 16) for start in range(0, 1024, 16)])
    assert b"".join(data) == files.cat_file(name)[:1024]
    assert max(counts) >= 32


def test_a_checkpoint_is_written_to_a_store(files, whole, monkeypatch):
    order = []
    copied = files.cp_file
    monkeypatch.setattr(
        files, "cp_file", lambda a, b, **more: (order.append(b), copied(a, b, **more))
    )
    report = reshard.split("s3://bucket/run", "s3://bucket/out/dcp", to="dcp")
    assert contents(files, "bucket/out/dcp") == whole
    assert order[-1].endswith(".metadata")  # without which nobody finds a checkpoint there
    assert report.verified
    assert files.find("bucket/out") == files.find("bucket/out/dcp")  # nothing else is left
    assert reshard.diff("s3://bucket/out/dcp", EXAMPLE).exit_code == 0


def test_what_fails_once_is_asked_again(files, proxy, whole):
    kinds = [object_stores.DROP, 500, object_stores.CUT, 503, object_stores.SLOW]
    counts, struck = Counter(), []

    def fault(method, _path, _number):
        counts[method] += 1
        kind = kinds[len(struck) % len(kinds)]
        if counts[method] % 4 != 1:  # the first request of each method, and every fourth from there
            return None
        if kind == object_stores.CUT and method != "GET":
            kind = 500
        struck.append((kind, method))
        return kind

    proxy.fault = fault
    reshard.split("s3://bucket/run", "s3://bucket/faults/dcp", to="dcp")
    proxy.reset()
    assert {kind for kind, _ in struck} >= set(kinds)
    assert {method for _, method in struck} >= {"GET", "PUT"}
    assert contents(files, "bucket/faults/dcp") == whole
    assert files.find("bucket/faults") == files.find("bucket/faults/dcp")


def test_a_large_file_is_sent_in_parts_and_a_lost_part_again(files, proxy, tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "_PART", 5 << 20)
    source = tmp_path / "model.safetensors"
    save_file({f"w{n}": torch.randn(1024, 1024) for n in range(4)}, source)  # 16 MiB
    lost, barrier = [], threading.Barrier(4)

    def fault(method, path, _number):
        if method == "PUT" and "partNumber=" in path and not barrier.broken:
            barrier.wait(timeout=60)  # until all parts are in flight
            if "partNumber=2" in path:
                barrier.abort()
                lost.append(path)
                return object_stores.DROP
        return None

    proxy.fault = fault
    reshard.merge(source, "s3://bucket/parts/model.safetensors", dtype="keep")
    assert len(lost) == 1
    assert len({path for method, path in proxy.seen if "partNumber=" in path}) == 4
    reshard.merge(source, tmp_path / "local.safetensors", dtype="keep")
    wanted = (tmp_path / "local.safetensors").read_bytes()
    assert contents(files, "bucket/parts") == {"model.safetensors": wanted}


def test_a_store_that_stays_away_is_an_error_that_names_the_url(proxy, monkeypatch):
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    proxy.fault = lambda _method, path, _number: 500 if "optim_states" in path else None
    with pytest.raises(ReshardError, match=r"(?s)s3://bucket/run/.*optim_states.*2 attempts"):
        reshard.merge("s3://bucket/run", "s3://bucket/never/model.safetensors")


def test_what_may_not_be_read_is_said_at_once(files, proxy):
    proxy.fault = lambda _method, path, _number: 403 if "optim_states" in path else None
    with pytest.raises(ReshardError, match=r"s3://bucket/run/.*optim_states"):
        reshard.merge("s3://bucket/run", "s3://bucket/never/model.safetensors")


@pytest.mark.parametrize("stage", ["upload", "copy", "marker"])
def test_a_write_that_fails_leaves_nothing(files, proxy, monkeypatch, stage):
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)

    def fault(method, path, _number):
        copying = method == "PUT" and ".partial/" not in path
        wanted = {
            "upload": method == "PUT" and "__2_0" in path,
            "copy": copying and "__2_0" in path,
            "marker": copying and ".metadata" in path,
        }
        return 500 if wanted[stage] else None

    proxy.fault = fault
    with pytest.raises(ReshardError, match="s3://bucket/failed/"):
        reshard.split("s3://bucket/run", "s3://bucket/failed/dcp", to="dcp")
    proxy.reset()
    assert contents(files, "bucket/failed") == {}
    assert files.list_multipart_uploads("bucket") == []


def test_a_missing_object_is_said_by_its_url(files):
    with pytest.raises(ReshardError, match="s3://bucket/nothing"):
        reshard.inspect("s3://bucket/nothing")
    files.put(f"{EXAMPLE}/", "bucket/torn/", recursive=True)
    rank = "zero_pp_rank_2_mp_rank_00_model_states.pt"
    files.rm_file(f"bucket/torn/global_step4/{rank}")
    with pytest.raises(IncompleteError, match="s3://bucket/torn/global_step4"):
        reshard.inspect("s3://bucket/torn")


def test_nothing_is_overwritten_unless_asked(files, tmp_path):
    files.pipe_file("bucket/taken/model.safetensors", b"mine")
    files.pipe_file("bucket/full/notes.doc", b"mine")
    with pytest.raises(ExistsError, match=r"s3://bucket/taken/model\.safetensors"):
        reshard.merge(EXAMPLE, "s3://bucket/taken/model.safetensors")
    with pytest.raises(ExistsError, match=r"s3://bucket/full.*notes"):
        reshard.merge(EXAMPLE, "s3://bucket/full")
    with pytest.raises(ExistsError, match="would delete"):
        reshard.merge(EXAMPLE, "s3://bucket/full", overwrite=True)
    assert files.cat_file("bucket/taken/model.safetensors") == b"mine"
    with pytest.raises(ExistsError, match="inside the source"):
        reshard.merge("s3://bucket/run", "s3://bucket/run/model")
    reshard.merge(EXAMPLE, "s3://bucket/taken/model.safetensors", overwrite=True)
    reshard.merge(EXAMPLE, tmp_path / "model.safetensors")
    wanted = (tmp_path / "model.safetensors").read_bytes()
    assert files.cat_file("bucket/taken/model.safetensors") == wanted


def test_what_cannot_be_put_in_place_of_the_old_is_kept(files, proxy, monkeypatch):
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    reshard.merge(EXAMPLE, "s3://bucket/lost/model")
    wanted = contents(files, "bucket/lost/model")
    proxy.fault = lambda method, path, _number: (
        500 if method == "PUT" and path == "/bucket/lost/model/config.json" else None
    )
    with pytest.raises(
        ReshardError, match=r"complete and checked output is at s3://bucket/lost/\.model\.partial/"
    ):
        reshard.merge(EXAMPLE, "s3://bucket/lost/model", overwrite=True)
    proxy.reset()
    place = next(name for name in files.find("bucket/lost") if "/output-" in name)
    assert contents(files, place.rpartition("/")[0]) == wanted
    reshard.merge(EXAMPLE, "s3://bucket/lost/model", overwrite=True, resume=True)
    assert contents(files, "bucket/lost") == {f"model/{name}": wanted[name] for name in wanted}


def test_there_must_be_a_bucket(files):
    with pytest.raises(UsageError, match="no bucket s3://nowhere"):
        reshard.merge(EXAMPLE, "s3://nowhere/model.safetensors")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(files, tmp_path):
    """What it may have of buffers is the same, and a file is sent in parts."""
    peaks = []
    for count in (2, 6):
        source = tmp_path / f"{count}.safetensors"
        save_file({f"w{n}": torch.zeros(2 << 20) for n in range(count)}, source)
        files.put_file(str(source), f"bucket/big/{source.name}")
        program = (
            "import reshard, sys\n"
            "from reshard.engine.output import uploads\n"
            "uploads._PART = 5 << 20\n"
            "reshard.merge(*sys.argv[1:], dtype='keep', verify=False, max_memory_bytes=16 << 20)\n"
            "lines = open('/proc/self/status').read().splitlines()\n"
            "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')))\n"
        )
        words = f"s3://bucket/big/{source.name}", f"s3://bucket/big/out/{source.name}"
        done = run_python("-c", program, *words, check=True)
        peaks.append(int(done.stdout.split()[-1]) >> 10)
    assert peaks[1] - peaks[0] < 20, peaks  # MiB, of 32 MiB more that were moved


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_an_object_that_is_replaced_between_two_reads_is_an_error(
    files, proxy, tmp_path, name, after
):
    bodies = []
    for value in (1.0, 2.0):
        state = {f"w{n}": torch.full((1 << 18,), value + n) for n in range(6)}
        (save_file if name.endswith("safetensors") else torch.save)(state, tmp_path / name)
        bodies.append((tmp_path / name).read_bytes())
    url = f"s3://bucket/replaced/{name}"
    files.pipe_file(url, bodies[0])
    reads = []

    def replace(method, path, _number):
        if method == "GET" and path.endswith(name):
            reads.append(path)
            if len(reads) == after + 1:
                files.pipe_file(url, bodies[1])

    proxy.fault = replace
    with pytest.raises(CorruptError, match=f"{url}: was modified or replaced while it was read"):
        reshard.merge(url, tmp_path / "out.safetensors", workers=1, max_memory_bytes=2 << 20)
    assert len(reads) > after
    assert not (tmp_path / "out.safetensors").exists()
    proxy.reset()
    reshard.merge(url, tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")["w5"][0] == 7.0
    with reshard.open(url) as checkpoint:
        checkpoint["w0"][...]
        files.pipe_file(url, bodies[0])
        with pytest.raises(CorruptError, match="while it was read"):
            checkpoint["w5"][...]
