"""Checkpoints in Google's store, by an emulator of it: what S3 has under other names."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.engine.move import receipts
from reshard.errors import CorruptError, ExistsError, ReshardError, UsageError
from reshard.system.remote import store
from tests.support.object_stores import CUT, DROP, EXAMPLE, Proxy, contents
from tests.support.ports import find_free_port

OUT = "gs://bucket/out/dcp"


async def wait_briefly(_seconds):
    """Stand for `asyncio.sleep` in gcsfs."""
    await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def proxy():
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    retry = pytest.importorskip("gcsfs.retry")
    port = find_free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    proxy = Proxy(port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        # gcsfs waits one second and more before it repeats a request
        patch.setattr(retry, "asyncio", SimpleNamespace(sleep=wait_briefly))
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        store.get_store.cache_clear()
        yield proxy
    store.get_store.cache_clear()
    proxy.shutdown()
    proxy.server_close()
    server.stop()


@pytest.fixture
def files(proxy):
    files = store.get_store("gs").files
    yield files
    proxy.reset()
    files.invalidate_cache()
    for name in files.find("bucket/out"):
        files.rm_file(name)
    store.get_store("gs").forget()


def split(source=EXAMPLE, **options):
    return reshard.split(source, OUT, to="dcp", workers=1, **options)


def test_a_checkpoint_is_read_and_written_whatever_the_network_does(files, proxy, whole):
    for path in EXAMPLE.rglob("*"):
        if path.is_file():
            files.put_file(str(path), f"bucket/run/{path.relative_to(EXAMPLE)}")
    waiting = [("GET", CUT), ("POST", DROP), ("POST", 503)]

    def fault(method, path, _number):
        if not waiting or waiting[0][0] != method:
            return None
        if waiting[0][1] == CUT and "alt=media" not in path:
            return None
        return waiting.pop(0)[1]

    proxy.fault = fault
    split("gs://bucket/run")
    assert waiting == []
    proxy.reset()
    assert contents(files, "bucket/out/dcp") == whole
    assert files.find("bucket/out") == files.find("bucket/out/dcp")
    with pytest.raises(ExistsError, match="not empty"):
        split()


def test_an_upload_that_was_cut_off_goes_on(files, proxy, whole, monkeypatch):
    monkeypatch.setattr(receipts, "MIN_BYTES", 1)
    proxy.fault = lambda _method, path, _number: 403 if "__2_0.distcp" in path else None
    with pytest.raises(ReshardError, match=r"__2_0.*Forbidden") as caught:
        split(resume=True)
    assert "provide credentials" in caught.value.remedy
    assert "pass --resume to continue" in caught.value.remedy
    proxy.reset()
    assert any(line.startswith("resumed") for line in split(resume=True).lines())
    assert contents(files, "bucket/out/dcp") == whole
    assert files.find("bucket/out") == files.find("bucket/out/dcp")


def test_there_must_be_a_bucket(files):
    with pytest.raises(UsageError, match="no bucket gs://nowhere"):
        reshard.merge(EXAMPLE, "gs://nowhere/model.safetensors")


@pytest.mark.parametrize("answers", [True, False], ids=["condition", "end"])
@pytest.mark.parametrize("after", [1, 3])
def test_an_object_that_is_replaced_between_two_reads_is_an_error(
    files, proxy, tmp_path, after, answers
):
    """By Google's answer to the condition of a read; the emulator ignores it, then by the end."""
    bodies = [tmp_path / "first", tmp_path / "second"]
    for path, value in zip(bodies, (1.0, 2.0), strict=True):
        save_file({f"w{n}": torch.full((1 << 15,), value + n) for n in range(6)}, path)
    name = "bucket/out/replaced.safetensors"
    files.put_file(str(bodies[0]), name)
    wanted = []

    def replace(method, path, _number):
        query = parse_qs(urlsplit(path).query)
        if method != "GET" or query.get("alt") != ["media"]:
            return None
        (generation,) = query["ifGenerationMatch"]
        wanted.append(generation)
        if len(wanted) == after + 1:
            files.put_file(str(bodies[1]), name)
        return 412 if answers and len(wanted) > after else None

    proxy.fault = replace
    with pytest.raises(CorruptError, match=f"gs://{name}: was modified or replaced while it was"):
        reshard.merge(
            f"gs://{name}", tmp_path / "out.safetensors", workers=1, max_memory_bytes=2 << 20
        )
    assert len(wanted) > after
    assert len(set(wanted)) == 1
    assert not (tmp_path / "out.safetensors").exists()
    proxy.reset()
    store.get_store("gs").forget()
    reshard.merge(f"gs://{name}", tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")["w5"][0] == 7.0
