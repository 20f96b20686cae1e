"""What Azure says while it copies: its answer comes when a copy has begun, not when it has ended.

The client here has the methods of adlfs 2026.8 that are asked; the real one, against Azurite, was
tried by hand (docs/remote.md).
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest
import torch
from fsspec.asyn import get_loop
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save

import reshard
from reshard.engine.output import publish
from reshard.errors import CorruptError, ReshardError
from reshard.system.remote import store


class Blob:
    """A blob whose copy stands as said, one word a look."""

    def __init__(self, files):
        self.files = files

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_error):
        return None

    async def get_blob_properties(self):
        status = self.files.said.pop(0)
        return SimpleNamespace(copy=SimpleNamespace(status=status))


class Files:
    """As `adlfs.AzureBlobFileSystem`."""

    loop = get_loop()

    def __init__(self, *said):
        self.said, self.copied, self.asked = list(said), [], []
        self.service_client = self

    def cp_file(self, source, target):
        self.copied.append((source, target))

    def split_path(self, path):
        return *path.split("/", 1), None  # container, blob, version

    def get_blob_client(self, container, blob):
        self.asked.append((container, blob))
        return Blob(self)


class Path(SimpleNamespace):
    """As much of a `RemotePath` as a copy asks for."""

    def __str__(self):
        return f"az://{self.key}"


@pytest.fixture
def copied(monkeypatch):
    """Copy by a store that says this of its copy; the waits between."""

    def copy(*said):
        files, waits = Files(*said), []
        monkeypatch.setattr(publish.time, "sleep", waits.append)
        store = SimpleNamespace(files=files)
        source, target = (Path(key=f"box/{name}", store=store) for name in ("sent", "dcp/x"))
        publish._copy(source, target)
        assert files.copied == [("box/sent", "box/dcp/x")]
        assert set(files.asked) == {("box", "dcp/x")}
        assert files.said == [], "it stopped asking too early"
        return waits

    return copy


def test_a_copy_that_has_ended_is_not_waited_for(copied):
    assert copied("success") == []


def test_a_blob_that_was_never_copied_is_not_waited_for(copied):
    assert copied(None) == []


def test_a_copy_under_way_is_waited_for_with_growing_waits(copied):
    waits = copied(*["pending"] * 8, "success")
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("end", ["failed", "aborted"])
def test_a_copy_that_fails_is_an_error_that_names_the_blob(copied, end):
    with pytest.raises(ReshardError, match=f"az://box/dcp/x.*could not be copied.*{end}"):
        copied("pending", end)


class Container(MemoryFileSystem):
    """Blobs that state an ETag, which no read takes as its condition, as in adlfs 2026.8."""

    protocol = ("az",)
    store: dict = {}  # noqa: RUF012 - fsspec's own is one of the class, too
    pseudo_dirs = [""]  # noqa: RUF012
    replaced_after = None

    def info(self, path, **kwargs):
        found = dict(super().info(path, **kwargs))
        found.pop("created", None)
        if found["type"] == "file":
            data = self.store[found["name"]].getvalue()
            found["etag"] = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return found

    def ls(self, path, detail=True, **kwargs):  # noqa: FBT002 - as fsspec's
        names = super().ls(path, detail=False, **kwargs)
        return [self.info(name) for name in names] if detail else names

    def cat_file(self, path, start=None, end=None, **kwargs):
        left, body = self.replaced_after or (None, b"")
        if left == 0:
            self.pipe_file(path, body)
        if left is not None:
            type(self).replaced_after = left - 1, body
        return super().cat_file(path, start, end, **kwargs)


@pytest.mark.parametrize("after", [1, 3])
def test_a_blob_that_is_replaced_between_two_reads_is_an_error(monkeypatch, tmp_path, after):
    bodies = [
        save({f"w{n}": torch.full((1 << 18,), value + n) for n in range(6)}) for value in (1.0, 2.0)
    ]
    files = Container(skip_instance_cache=True)
    monkeypatch.setattr(store, "_filesystem", lambda _scheme: files)
    store.get_store.cache_clear()
    try:
        files.pipe_file("az://box/run.safetensors", bodies[0])
        Container.replaced_after = after, bodies[1]
        with pytest.raises(CorruptError, match="was modified or replaced while it was read"):
            reshard.merge(
                "az://box/run.safetensors",
                tmp_path / "out.safetensors",
                workers=1,
                max_memory_bytes=2 << 20,
            )
        assert Container.replaced_after[0] < 0, "it was not replaced"
        assert not (tmp_path / "out.safetensors").exists()
        store.get_store("az").forget()
        reshard.merge("az://box/run.safetensors", tmp_path / "out.safetensors")
        assert load_file(tmp_path / "out.safetensors")["w5"][0] == 7.0
    finally:
        Container.replaced_after = None
        store.get_store.cache_clear()
