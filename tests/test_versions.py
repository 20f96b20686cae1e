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
