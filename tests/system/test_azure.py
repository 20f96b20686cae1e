"""What Azure says while it copies: its answer comes when a copy has begun, not when it has ended.

The client here has the methods of adlfs 2026.8 that are asked; the real one, against Azurite, was
tried by hand (docs/remote.md).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fsspec.asyn import get_loop

from reshard.engine.output import publish
from reshard.errors import ReshardError


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
