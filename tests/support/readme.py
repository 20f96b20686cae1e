"""Run what the README shows, with the reshard that this Python has installed.

    ./dev wheel    # from the wheel, outside of the source tree

The commands of the README's first block run one after another, as a reader would type them, on a
run of the trainer; then its blocks of Python, on the checkpoint of ``examples/``. One that fails
ends it, and so does a reshard that lies in a source tree.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
RUN = ROOT / "examples" / "llama-zero3-4ranks"
TRAIN = "python -m trainer --strategy zero3 --nproc 4 --steps 4 --global-batch 8 --save run"
TRAIN += " --seq-len 32 --no-progress"
FEWER = {"--world-size 8  ": "--world-size 2  "}  # ranks that train: the machine may have two cores
STATE = """
with reshard.open("run/") as checkpoint:
    kept = {name: checkpoint[name][...].float() for name in checkpoint}
state = {"model": {name: torch.zeros_like(value) for name, value in kept.items()}}
"""
LOADED = """
assert all(torch.equal(state["model"][name], value) for name, value in kept.items())
"""
HOME = """
import pathlib, shutil, sys
import reshard, trainer
for package in reshard, trainer:
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), package.__file__
assert (pathlib.Path(reshard.__file__).parent / "py.typed").exists()
if shutil.which("cc"):
    import reshard.move._cast
"""


def blocks(language: str) -> list[str]:
    """The README's blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Those of the first block, in its order."""
    lines = [line[2:] for line in blocks("console")[0].splitlines() if line.startswith("$ ")]
    for many, few in FEWER.items():
        lines = [line.replace(many, few) for line in lines]
    assert any("demo" in line for line in lines)
    return lines


def do(what: str, arguments: list[str], place: Path) -> None:
    """Run a program in a directory, and end if it fails."""
    began = time.perf_counter()
    done = subprocess.run(
        arguments,
        cwd=place,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    sys.stderr.write(f"{time.perf_counter() - began:6.1f} s  {what}\n")
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit status {done.returncode}: {what}")


def main() -> None:
    """Do all of it in a directory of its own."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as scratch:
        typed, called = Path(scratch, "typed"), Path(scratch, "called")
        typed.mkdir()
        shutil.copytree(RUN, called / "run")
        do("what is imported is what is installed", [sys.executable, "-c", HOME], typed)
        for line in [TRAIN, *commands()]:
            do(line, ["bash", "-c", line], typed)
        opened, loaded = blocks("python")
        do("the API", [sys.executable, "-c", opened], called)
        code = f"import torch, reshard{STATE}{loaded}{LOADED}"
        do("reshard.dcp", [sys.executable, "-c", code], called)


if __name__ == "__main__":
    main()
