"""Run the commands of the README and the first documentation pages with the installed reshard.

    ./dev wheel    # from the wheel, outside of the source tree
    python tests/support/guides.py README.md    # with the reshard that is installed; one page

Each page has a directory of its own, with the checkpoints that its commands name. The commands of
its console blocks run one after another, as a reader would type them; then its blocks of Python. A
command that fails ends the program, and so does a reshard that is imported from a source tree.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LANDING = DOCS / "index.md"  # its commands stand in tables and in sentences
PAGES = (ROOT / "README.md", LANDING, *sorted((DOCS / "start").glob("*.md")), DOCS / "api.md")
_TRAIN = "python -m trainer --steps 4 --global-batch 8 --seq-len 32 --no-progress --strategy"
SOURCES = {  # name of a checkpoint in the pages -> how it is made
    "run": f"{_TRAIN} zero3 --nproc 4 --save run",
    "fsdp": f"{_TRAIN} fsdp2 --nproc 2 --save fsdp",
    "megatron": "reshard convert run/ megatron/ --to megatron --tp 2",
    "outputs": "reshard convert run/ outputs/ --to hf-trainer",
}
FILLED_IN = {r"\b(DIR|RUN|A|B|COPY)\b": "run/", "OUT": "out/", ' --command "..."': ""}
HOME = """
import pathlib, shutil, sys
import reshard, trainer
for package in reshard, trainer:
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), package.__file__
assert (pathlib.Path(reshard.__file__).parent / "py.typed").exists()
if shutil.which("cc"):
    import reshard.engine.move._cast
"""
STATE = """
import torch, reshard
with reshard.open("run/") as checkpoint:
    kept = {name: checkpoint[name][...].float() for name in checkpoint}
state = {"model": {name: torch.zeros_like(value) for name, value in kept.items()}}
"""
LOADED = """
assert all(torch.equal(state["model"][name], value) for name, value in kept.items())
"""
AROUND = {"reshard.dcp": (STATE, LOADED)}  # import of a block -> code before and after it
AT_ONCE = 2  # pages: most commands keep one core busy
FRAGMENTS = ("import reshard.transformers",)  # of a training script: tests/judged runs them


def find_blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def list_commands(page: Path) -> list[str]:
    """Return the commands of the console blocks, or of the sentences of the landing page."""
    if page == LANDING:
        text = page.read_text()
        for placeholder, value in FILLED_IN.items():
            text = re.sub(placeholder, value, text)
        return re.findall(r"`((?:reshard|eval) [^`]+)`", text)
    lines = [line for block in find_blocks(page, "console") for line in block.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ ")]


def run(what: str, arguments: list[str], place: Path) -> None:
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
    sys.stderr.write(f"{time.perf_counter() - began:6.1f} s  {place.name}: {what}\n")
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit status {done.returncode}: {what}")


def run_page(page: Path, sources: Path, scratch: Path) -> None:
    """Run the commands and the Python code of a page in a new directory."""
    place = scratch / f"{page.parent.name}-{page.stem}"
    place.mkdir()
    commands = list_commands(page)
    text = "\n".join([page.read_text(), *commands])
    for name in SOURCES:
        if re.search(rf"\b{name}/", text):
            shutil.copytree(sources / name, place / name)
    for line in commands:
        run(line, ["bash", "-c", line], place)
    for block in find_blocks(page, "python"):
        what = block.splitlines()[0]
        before, after = next((AROUND[key] for key in AROUND if f"import {key}" in block), ("", ""))
        compile(block, what, "exec")
        if not what.startswith(FRAGMENTS):
            code = f"import reshard\n{before}{block}{after}"
            run(what, [sys.executable, "-c", code], place)


def choose_fsdp() -> str:
    """Return the newest FSDP that this torch runs on CPUs: with 2.6, that is FSDP 1."""
    import torch

    return "fsdp2" if hasattr(torch.cpu.Stream, "record_event") else "fsdp"


def main() -> None:
    """Make the checkpoints, and run every page."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch, "sources")
        sources.mkdir()
        run("what is imported is what is installed", [sys.executable, "-c", HOME], sources)
        for line in SOURCES.values():
            known = line.replace("fsdp2", choose_fsdp())
            run(known, ["bash", "-c", known], sources)
        pages = [ROOT / name for name in sys.argv[1:]] or PAGES
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(lambda page: run_page(page, sources, Path(scratch)), pages))


if __name__ == "__main__":
    main()
