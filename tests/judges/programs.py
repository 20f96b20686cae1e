"""Programs that only judges run: ``./dev install`` puts each into a folder of its own.

What they require would replace torch, and what one brings would change what another imports.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FOLDER = Path(sys.prefix, "programs")


def enter(program: str) -> None:
    """Let this process import what a program's folder holds, after everything else."""
    path = str(FOLDER / program)
    if path not in sys.path:
        sys.path.append(path)


def need(program: str) -> pytest.MarkDecorator:
    """Return the mark of tests that are skipped without a program."""
    import pytest

    place = FOLDER / program
    return pytest.mark.skipif(not place.is_dir(), reason=f"{place} is missing: run ./dev install")
