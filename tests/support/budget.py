"""Compare the size of the code with the numbers in ``.ci/budget.json``, and fail above them.

    python tests/support/budget.py [--write]

``--write`` replaces the numbers in the file. A commit that raises one says why in its body.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUDGET = ROOT / ".ci" / "budget.json"
FOLDERS = ("reshard", "trainer", "tests")


def measure(folder: Path) -> dict[str, int]:
    """Count the lines, the statements (docstrings included) and the modules of a folder."""
    texts = [path.read_text() for path in folder.rglob("*.py")]
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    return {
        "lines": sum(len(text.splitlines()) for text in texts),
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "modules": len(texts),
    }


def list_excesses(sizes: dict[str, dict[str, int]], most: dict[str, dict[str, int]]) -> list[str]:
    """Return what is above the budget.

    >>> list_excesses({"a": {"lines": 12, "modules": 2}}, {"a": {"lines": 9, "modules": 2}})
    ['a/ has 12 lines, 3 more than in .ci/budget.json']
    """
    return [
        f"{folder}/ has {size} {unit}, {size - most[folder][unit]} more than in .ci/budget.json"
        for folder, counted in sizes.items()
        for unit, size in counted.items()
        if size > most[folder][unit]
    ]


if __name__ == "__main__":
    sizes = {folder: measure(ROOT / folder) for folder in FOLDERS}
    for folder, counted in sizes.items():
        print(f"{folder:8}", *(f"{size:7,} {unit}" for unit, size in counted.items()))
    if "--write" in sys.argv[1:]:
        BUDGET.write_text(json.dumps(sizes, indent=2) + "\n")
    advice = "delete something, or run this with --write and say in the commit's body what it buys"
    excesses = list_excesses(sizes, json.loads(BUDGET.read_text()))
    sys.exit("\n".join([*excesses, advice]) if excesses else 0)
