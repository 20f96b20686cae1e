"""Share fixtures between the tests of object stores."""

from __future__ import annotations

import pytest

import reshard
from tests.support.directories import read_files
from tests.support.object_stores import EXAMPLE


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the files that a split to a local directory writes."""
    place = tmp_path_factory.mktemp("local") / "dcp"
    reshard.split(EXAMPLE, place, to="dcp")
    return read_files(place)
