"""The course in docs/course: its quotations, its numbers, its commands, and its answers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import reshard
from tests.support import guides
from tests.support.programs import run_reshard
from tests.trainer import worlds

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "course").glob("*.md"))
EXERCISE = re.compile(r"^\*\*(\d)\.\*\* ", re.MULTILINE)
QUOTATION = re.compile(r'^```python title="(.+?)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
QUOTATIONS = [
    pytest.param(file, part, id=f"{page.stem}-{file}")
    for page in PAGES
    for file, text in QUOTATION.findall(page.read_text())
    for part in text.split("...\n")
]
ANSWERS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(guides.find_blocks(page, "python"), 1)
]
IDS = [page.stem for page in PAGES]


def is_quoted(part: str, source: str) -> bool:
    """Return whether the lines of ``part`` follow each other in ``source``, at any indentation."""
    lines, quoted = source.splitlines(), part.splitlines()
    windows = (lines[at : at + len(quoted)] for at in range(len(lines)))
    return any(dedent("\n".join(window)) == dedent("\n".join(quoted)) for window in windows)


@pytest.mark.parametrize(("file", "part"), QUOTATIONS)
def test_quoted_lines_are_those_of_the_source(file, part):
    assert part.strip()
    assert is_quoted(part, (ROOT / file).read_text()), f"quote {file} again:\n{part}"


def test_a_changed_line_is_not_a_quotation():
    assert is_quoted("  a\n    b\n", "x\na\n  b\ny\n")
    assert not is_quoted("a\nb\n", "a\nc\nb\n")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_page_quotes_the_source_and_answers_each_exercise(page):
    text = page.read_text()
    lines = [line for _, part in QUOTATION.findall(text) for line in part.splitlines()]
    assert 10 <= len(lines) - lines.count("...") <= 40
    numbers = EXERCISE.findall(text)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert 2 <= len(numbers) == len(guides.find_blocks(page, "python"))


@pytest.mark.parametrize("block", ANSWERS)
def test_the_answer_runs(block):
    assert "assert" in block
    with torch.random.fork_rng():
        exec(compile(block, "answer", "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = 0
    for line in guides.list_commands(page):
        words = shlex.split(line)
        if words[0] == "reshard":
            assert run_reshard(*words[1:]).returncode == 0, line
        else:
            assert words[:3] == ["python", "-m", "trainer"], line
            worlds.command(int(words[words.index("--nproc") + 1]), words[3:])
            trained += 1
    assert trained


def list_rows(name, heading):
    """Return the cells of the rows of the table that has a heading."""
    text = (ROOT / "docs" / "course" / name).read_text()
    table = text.split(heading, 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| (.+) \|$", table, re.MULTILINE)
    return [row.split(" | ") for row in rows if not row.startswith("---")]


def test_the_table_of_strategies_has_the_numbers_of_plan():
    report = reshard.plan(params="7B", gpus="8x80GB", micro_batch=1)
    planned = {row.strategy.name: row for row in report.rows}
    rows = list_rows("index.md", "| | formula | GB | sent |")
    assert {name for name, *_ in rows} == {"ddp", "fsdp", "zero1", "zero2", "zero3"}
    for name, formula, states, sent in rows:
        row = planned[name]
        total = row.parameters + row.gradients + row.masters + row.moments
        assert f"{total / 1e9:.3g}" == states
        assert f"{row.sent / 1e9:.3g}" == sent
        # tests/trainer/test_checkpoint.py compares the formula with the tensors of a rank.
        value = eval(formula.replace("P", " * 7e9").replace("/N", " / 8"))
        assert f"{value / 1e9:.3g}" == states


def test_the_pages_of_the_strategies_have_the_numbers_of_plan():
    for name, _, states, sent in list_rows("index.md", "| | formula | GB | sent |"):
        text = (ROOT / "docs" / "course" / f"{name}.md").read_text()
        assert f"{sent} GB" in text
        assert f"{states} GB" in text or name == "ddp"


def test_the_disk_of_a_checkpoint_is_that_of_plan():
    report = reshard.plan(params="7B", gpus="8x80GB", micro_batch=1)
    planned = {row.strategy.name: row.disk for row in report.rows}
    rows = list_rows("checkpoints.md", "| | bytes on disk | 7 billion parameters |")
    for names, _, size in rows:
        for name in names.split(", "):
            assert f"{planned[name] / 1e9:.3g} GB" in size
