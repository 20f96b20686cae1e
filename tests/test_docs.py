"""docs/formats-tests.csv names every case of the judges' tables once, under a form of a format.

And the commands that the documents show exist, with the options that they show; so do the files and
headings that they link to.
"""

from __future__ import annotations

import csv
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from reshard.cli import cli
from tests import hub_page, options_page
from tests.judges import (
    deepspeed_cases,
    library_cases,
    megatron_cases,
    parallel_cases,
    torch_cases,
)
from tests.support import recording

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "formats.md").read_text()
with (ROOT / "docs" / "formats-tests.csv").open(newline="") as data:
    ROWS = [(row["section"], row["test"], row["cases"].split()) for row in csv.DictReader(data)]
CASES = {
    "test_deepspeed.py": deepspeed_cases.CASES,
    "test_parallel.py": parallel_cases.CASES,
    "test_libraries.py": library_cases.CASES,
    "test_megatron_reader.py": megatron_cases.CASES,
    "test_torch.py": torch_cases.CASES,
}
CODE = re.compile(r"`([^`]+)`")
REFUSED_KINDS = ("moe_refused",)


def verdict(case):
    """Return the section in which a case is listed, if it is not its family's."""
    if getattr(case, "kind", "") in REFUSED_KINDS or getattr(case, "expect", "")[:7] == "refused":
        return "What is refused"
    return "What cannot be written" if getattr(case, "expect", "")[:6] == "cannot" else ""


@pytest.mark.parametrize("file", CASES)
def test_every_case_is_named_once_and_every_name_is_a_case(file):
    named = Counter(name for _, of, names in ROWS if of == file for name in names)
    assert named == Counter(dict.fromkeys(CASES[file], 1))


def test_every_row_names_a_case_and_a_section_of_the_page():
    assert all(names and f"\n## {section}\n" in TEXT for section, _, names in ROWS)


def test_what_is_refused_or_cannot_be_written_stands_there():
    for section, file, names in ROWS:
        if file not in CASES:
            continue
        apart = section if section in ("What is refused", "What cannot be written") else ""
        for name in names:
            assert verdict(CASES[file][name]) == apart, name


def shown(text):
    """Return the commands of a document that a reader would type, each with its options."""
    text = re.sub(r"\\\n", " ", text)
    for line in re.findall(r"^\$ reshard (.+)", text, re.MULTILINE):
        typed = re.sub(r'"[^"]*"?', "", line.split("  #")[0])  # not another program's options
        yield typed.split()[0], re.findall(r"(?<!\S)(--[a-z][\w-]*)", typed)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted(ROOT.glob("plugins/*/README.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_shown_exists_with_its_options(path):
    for command, options in shown(path.read_text()):
        if command in ("--help", "--version"):
            continue
        known = {name for param in cli.commands[command].params for name in param.opts}
        known |= {name for p in cli.commands[command].params for name in p.secondary_opts}
        assert set(options) <= known | {"--help"}, command


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_file_of_the_tree_that_a_page_names_exists(path):
    files = set(
        re.findall(
            r"(?<![\w/-])(?:tests|docs|examples|benchmarks|plugins)/[\w./-]+", path.read_text()
        )
    )
    assert {name for name in files if not (ROOT / name.rstrip(".")).exists()} == set()


def test_every_message_that_the_page_of_errors_quotes_is_in_the_source():
    page = (ROOT / "docs" / "errors.md").read_text().split("## What to do")[1]
    quoted = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    source = "".join(path.read_text() for path in (ROOT / "reshard").rglob("*.py"))
    assert quoted
    for message in (part for cell in quoted for part in CODE.findall(cell)):
        assert message in source, message


def anchors(path):
    """Return the headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            name, _, heading = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), link
            assert not heading or heading in anchors(target), link


def test_the_documents_do_show_commands():
    assert len(list(shown((ROOT / "README.md").read_text()))) >= 9


def test_the_page_of_options_is_what_the_declarations_say():
    text = options_page.options_page()
    assert options_page.PAGE.read_text() == text, "run: python -m tests.options_page"


def test_the_page_of_hub_names_is_what_its_data_say():
    assert hub_page.PAGE.read_text() == hub_page.render(hub_page.read_rows()), (
        "run: python -m tests.hub_page"
    )


def test_the_recording_shows_what_the_commands_print(tmp_path):
    shutil.copytree(ROOT / "examples" / "llama-zero3-4ranks", tmp_path / "run")
    screens = [(command, recording.run(command, tmp_path)) for command in recording.COMMANDS]
    shown, stored = (
        [line for line in text.splitlines() if ">time  " not in line]
        for text in (recording.draw(screens), (ROOT / "docs" / "terminal.svg").read_text())
    )
    assert shown == stored, "run: python -m tests.support.recording docs/terminal.svg"


def test_the_list_of_pages_for_language_models_has_every_page():
    pages = re.findall(r": (\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    listed = re.findall(r"\]\((\S+)\.html\)", (ROOT / "docs" / "llms.txt").read_text())
    assert listed == pages
