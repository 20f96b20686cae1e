"""The ranges that a client of ``reshard serve`` can request."""

from __future__ import annotations

import pytest

from reshard.commands.serve import _parse_range


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, (0, 665)),
        ("bytes=0-0", (0, 1)),
        ("bytes=5-", (5, 665)),
        ("bytes=-5", (660, 665)),
        ("bytes=-9999", (0, 665)),
        ("bytes=600-9999", (600, 665)),
        ("bytes=665-", None),
        ("bytes=5-3", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("rows=0-1", None),
        (f"bytes={'9' * 5000}-", None),
    ],
)
def test_a_range_is_inside_the_file_or_refused(header, expected):
    assert _parse_range(header, 665) == expected
