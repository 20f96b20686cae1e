"""Other Python processes that tests start."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

LIMIT_S = 600  # not a measure of speed: a program that takes longer on a busy machine hangs


def run_python(
    *words: object, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run this Python to its end; ``options`` are those of `subprocess.run`."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, check=check, capture_output=True, text=True, **options)


def run_reshard(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return run_python("-m", "reshard", *words, **options)
