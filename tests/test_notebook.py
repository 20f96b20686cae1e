"""The cells of examples/checkpoint.ipynb run one after another, and show something."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run_cell(source, scope):
    """Run a cell as a notebook does; return the value of its last line, if it is an expression."""
    *statements, last = ast.parse(source).body
    exec(compile(ast.Module(statements, []), "cell", "exec"), scope)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "cell", "eval"), scope)
    exec(compile(ast.Module([last], []), "cell", "exec"), scope)
    return None


@pytest.mark.slow
def test_every_cell_runs_and_reports_are_tables(tmp_path, monkeypatch):
    notebook = json.loads((EXAMPLES / "checkpoint.ipynb").read_text())
    shutil.copytree(EXAMPLES / "llama-zero3-4ranks", tmp_path / "llama-zero3-4ranks")
    monkeypatch.chdir(tmp_path)
    scope = {}
    shown = [
        run_cell("".join(cell["source"]), scope)
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]
    scope["checkpoint"].close()
    assert all(value is not None for value in shown)
    tables = [value for value in shown if hasattr(value, "_repr_html_")]
    assert len(tables) >= 6
    assert all("<td" in table._repr_html_() for table in tables)
