"""What a terminal shows: wrapped lines and coloured verdicts; a pipe gets the lines as they are."""

from __future__ import annotations

import io

import pytest

from reshard.cli.terminal import lay_out


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _terminal_of_forty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


NOTE = "warning     the file model.layers.0.mlp.up_proj.weight_is_long has no counterpart"
LOAD = 'load it     transformers.AutoModelForCausalLM.from_pretrained("a-long/directory")'
TABLE = "  zero2-offload-optimizer    12.5 GB    234 GB  fits with 16 bytes left"


def test_a_pipe_gets_lines_unchanged():
    assert [lay_out(line, io.StringIO()) for line in (NOTE, LOAD, TABLE)] == [NOTE, LOAD, TABLE]


def test_a_note_has_a_hanging_indent_and_whole_words(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert lay_out(NOTE, Terminal()).splitlines() == [
        "warning     the file",
        "            model.layers.0.mlp.up_proj.weight_is_long",
        "            has no counterpart",
    ]
    assert lay_out("  -> pass the model with --model config.json", Terminal()).splitlines() == [
        "  -> pass the model with --model",
        "     config.json",
    ]


def test_what_is_copied_and_tables_stay_on_their_lines():
    assert lay_out(LOAD, Terminal()) == LOAD
    assert lay_out(TABLE, Terminal()) == TABLE


@pytest.mark.parametrize(
    ("line", "colour"),
    [
        ("headers     ok       8 files", 32),
        ("warning     no index", 33),
        ("slots       FAILED   exp_avg", 31),
        ("a and b: DIFFERENT", 31),
        ("note        ok then", None),
    ],
)
def test_verdicts_have_colours(line, colour, monkeypatch):
    shown = lay_out(line, Terminal())
    assert (f"\x1b[{colour}m" in shown) if colour else shown == line
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert lay_out(line, Terminal()) == line
        monkeypatch.undo()
        monkeypatch.setenv("COLUMNS", "40")
