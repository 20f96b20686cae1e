"""Run a script whose Accelerate takes CPUs for GPUs: python on_cpu.py SCRIPT ARGUMENTS..."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main(script: str) -> None:
    """Run a script as ``python SCRIPT`` does, after the change."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.judges.library_cpu import pass_for_gpus

    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    pass_for_gpus()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
