"""The rows of `tests.versions`, the minimum versions, the page and the workflow agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests import versions

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


def minimums(text):
    """Return the minimum version of each requirement in a part of pyproject.toml."""
    return {
        name: tuple(map(int, least.split(".")))
        for name, least in re.findall(r'"(\w+)>=([\d.]+)"', text)
    }


def pins(row):
    """Return the versions of a row; zeros at the end do not count."""
    found = dict(each.split("==") for each in versions.ROWS[row].libraries)
    return {
        name: tuple(map(int, re.sub(r"(\.0)+$", "", text).split(".")))
        for name, text in found.items()
    }


@pytest.mark.parametrize("name", versions.TESTS)
def test_the_rows_run_tests_that_exist(name):
    assert list((ROOT / "tests" / name).glob("test_*.py"))


def test_the_oldest_row_of_the_core_has_the_minimum_of_each_dependency():
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", PROJECT, re.DOTALL | re.MULTILINE)[1]
    assert pins("core-oldest") == minimums(dependencies)
    python = re.search(r'requires-python = ">=([\d.]+)"', PROJECT)[1]
    assert versions.ROWS["core-oldest"].python == versions.ROWS["torch-oldest"].python == python


def test_the_oldest_row_with_torch_has_the_minimum_of_torch_and_transformers():
    extra = re.search(r"^transformers = \[(.*?)\]", PROJECT, re.MULTILINE)[1]
    oldest = pins("torch-oldest")
    assert {name: oldest[name] for name in ("torch", "transformers")} == minimums(extra)


def test_the_workflow_runs_every_row_with_its_python():
    rows = WORKFLOW["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert {each["row"]: each["python"] for each in rows} == {
        name: row.python for name, row in versions.ROWS.items()
    }
    quick = WORKFLOW["jobs"]["quick"]["strategy"]["matrix"]["python"]
    assert {row.python for row in versions.ROWS.values()} <= set(quick)


def test_the_page_has_every_row():
    assert re.findall(r"^\| `([\w.-]+)` \|", versions.PAGE.read_text(), re.MULTILINE) == [
        *versions.ROWS
    ]


def test_a_page_of_different_bytes_says_so():
    result = {
        "python": "3.12.1",
        "versions": {"torch": "2.6.0"},
        "digest": "a",
        "date": "2026-01-01",
    }
    page = versions.make_page({"core-oldest": result, "core-newest": {**result, "digest": "b"}})
    assert "| `core-oldest` | 3.12.1 | 2.6.0 | - | - | - | - | run | - | - | 2026-01-01 |" in page
    assert "DID NOT WRITE THE SAME BYTES" in page


def test_a_step_that_failed_is_named_and_those_after_it_did_not_run():
    result = {"python": "3.13.0", "date": "2026-01-01", "digest": "a", "failure": "the reason"}
    assert "| run | failed | not run | 2026-01-01 |" in versions.make_page({"newest": result})
    result["readme"] = "run"
    assert "| run | run | failed | 2026-01-01 |" in versions.make_page({"newest": result})


@pytest.mark.parametrize("key", ["not_run", "failure"])
def test_a_row_without_a_result_states_the_reason(key):
    page = versions.make_page(
        {"newest": {"python": "3.13", "date": "2026-01-01", key: "the reason"}}
    )
    assert "Row `newest`: the reason." in page


def test_failures_are_counted_by_file():
    text = (
        "FAILED tests/a.py::test_x[1] - assert 1\n"
        "FAILED tests/a.py::test_y\n"
        "FAILED tests/b.py::test_z\n"
        "3 failed, 7 passed in 1.25s\n"
    )
    assert versions.describe_failures(text) == (
        "the tests ended with 3 failed, 7 passed; failed: 2 in `tests/a.py`, 1 in `tests/b.py`"
    )
    assert not versions.describe_failures("killed")


def test_what_was_skipped_is_counted_and_named():
    printed = (
        "SKIPPED [2] tests/a/test_b.py:70: no dtype uint16\n"
        "SKIPPED [1] tests/a/test_b.py:71: no dtype uint16\n"
        "SKIPPED [1] tests/c/test_d.py: no torch: 2.6\n"
        "5 passed, 4 skipped in 1.00s\n"
    )
    skipped = versions.list_skipped(printed)
    assert skipped == [
        "3 in `tests/a/test_b.py` (no dtype uint16)",
        "1 in `tests/c/test_d.py` (no torch: 2.6)",
    ]
    result = {"python": "3.10.1", "date": "2026-01-01", "digest": "a", "skipped": skipped}
    assert f"\nRow `newest` skipped {skipped[0]}, {skipped[1]}.\n" in versions.make_page(
        {"newest": result}
    )
