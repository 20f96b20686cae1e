"""Run reshard with old and new libraries: ``python -m tests.versions OUT [--only ROW ...]``.

Each row of `ROWS` is a Python and the versions of libraries. A new environment in ``OUT/ROW`` gets
them and the wheel of reshard. Three things run in it: commands on the checkpoint in ``examples/``,
whose output must have the same bytes in every row; the commands of the README; the tests of
`TESTS`. ``OUT/ROW.json`` has the result, and ``OUT/ROW.log`` what the programs printed; once all
rows have a result, they are written to ``docs/versions.md``.

This module needs no library. An interpreter is looked for on PATH and below ``~/.pyenv/versions``;
a row whose interpreter is missing is reported as not run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
TESTS = ("cli", "containers", "engine", "formats", "state_dict")  # folders of tests/
SHOWN = ("torch", "transformers", "numpy", "safetensors", "click")


@dataclass(frozen=True)
class Row:
    """An environment: the versions that pip must choose. It takes the newest of other packages.

    Args:
        extra: the extra of reshard that is installed; without ``test``, only the commands run.
        pinned: whether ``constraints.txt`` chooses the versions, as in CI.
    """

    python: str
    libraries: tuple[str, ...] = ()
    extra: str = ""
    pinned: bool = False


_OLDEST = ("click==8.1.0", "jinja2==3.1.0", "pyyaml==6.0", "safetensors==0.4.3", "tqdm==4.60.0")
ROWS = {
    "core-oldest": Row("3.10", (*_OLDEST, "numpy==1.24.0")),
    "core-newest": Row("3.13"),
    # Models of transformers take `dtype` since 4.56. Files in tests/data have arrays of numpy 2,
    # which torch.load reads with numpy 1.26 and later.
    "torch-oldest": Row(
        "3.10", (*_OLDEST, "numpy==1.26.4", "torch==2.6.0", "transformers==4.56.0"), "test"
    ),
    "pinned": Row("3.11", extra="test", pinned=True),
    "newest": Row("3.13", extra="test"),
    "python-newest": Row("3.14", extra="test"),
}
COMMANDS = (
    "inspect run/ --json",
    "merge run/ model.safetensors --dtype fp16",
    "merge run/ whole.pt",
    "split run/ run3/ --world-size 3",
    "convert run/ dcp/ --to dcp",
    "diff run3/ dcp/",
    "verify run3/ --deep",
)
_FAILED = re.compile(r"^FAILED ([^:]+)::", re.MULTILINE)
_SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] [^:]+:\S* (.+)$", re.MULTILINE)
_SUMMARY = re.compile(r"^(?:=+ )?(\d+ (?:passed|failed).*?) in [\d.]+s", re.MULTILINE)


class StepError(Exception):
    """A program of a row failed.

    Args:
        message: what ended, and how.
        output: what the program printed.
    """

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def run(*words: object, folder: Path, log: Path) -> str:
    """Run a program, add its output to the log and return it.

    Raises:
        StepError: it failed.
    """
    command = [str(word) for word in words]
    done = subprocess.run(
        command,
        cwd=folder,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{done.stdout}\n")
    if done.returncode:
        ended = f"exit status {done.returncode}: {Path(command[0]).name} {' '.join(command[1:])}"
        raise StepError(ended, done.stdout)
    return done.stdout


def find_python(version: str) -> str | None:
    """Return the path of an interpreter of a version, for example 3.12; None if there is none."""
    found = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    # Below ~/.pyenv/shims are names of interpreters that pyenv may not start here.
    return str(found[-1]) if found else shutil.which(f"python{version}")


def run_row(name: str, out: Path) -> Iterator[dict[str, Any]]:
    """Make the environment of a row, run everything in it, and yield the result after each step."""
    row, folder, log = ROWS[name], out / name, out / f"{name}.log"
    result: dict[str, Any] = {
        "python": row.python,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }
    interpreter = find_python(row.python)
    if interpreter is None:
        yield {**result, "not_run": f"no interpreter of Python {row.python} was available"}
        return
    shutil.rmtree(folder, ignore_errors=True)
    log.unlink(missing_ok=True)
    copy_tree(folder / "tree")
    try:
        python = install(row, interpreter, folder, log)
        result["versions"] = read_versions(python, folder, log)
        result["python"] = result["versions"].pop("python")
        result["digest"] = run_commands(python, folder / "commands", log)
        yield result
        if row.extra:
            run(python, "tests/support/guides.py", "README.md", folder=folder / "tree", log=log)
            result["readme"] = "run"
            yield result
            result |= run_tests(python, folder / "tree", log)
            yield result
    except StepError as error:
        yield result | {"failure": str(error)}  # keep the environment, to repeat what failed
    else:
        shutil.rmtree(folder)  # CUDA builds of torch have gigabytes


def copy_tree(folder: Path) -> None:
    """Copy the files that git knows, so that builds of one row do not reach another."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def install(row: Row, interpreter: str, folder: Path, log: Path) -> Path:
    """Create the environment, install the libraries and reshard; return its interpreter."""
    run(interpreter, "-m", "venv", folder / "venv", folder=folder, log=log)
    python = folder / "venv" / "bin" / "python"
    extra = f"[{row.extra}]" if row.extra else ""
    pins = ("-c", "constraints.txt") if row.pinned else ()
    words = (*pins, *row.libraries, f".{extra}")
    # Compiling every module of torch and CUDA's packages takes longer than what runs here.
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-compile",
        *words,
        folder=folder / "tree",
        log=log,
    )
    run(python, "-m", "pip", "check", folder=folder, log=log)
    return python


def read_versions(python: Path, folder: Path, log: Path) -> dict[str, str]:
    """Return the versions that are installed."""
    code = (
        "import json, platform\n"
        "from importlib.metadata import distributions\n"
        "found = {each.metadata['Name'].lower(): each.version for each in distributions()}\n"
        f"chosen = {{name: found.get(name, '') for name in {SHOWN!r}}}\n"
        "print(json.dumps({'python': platform.python_version(), **chosen}))\n"
    )
    versions: dict[str, str] = json.loads(run(python, "-c", code, folder=folder, log=log))
    return versions


def run_commands(python: Path, folder: Path, log: Path) -> str:
    """Run the commands of `COMMANDS`; return a SHA-256 of the names and bytes of their outputs."""
    shutil.copytree(ROOT / "examples" / "llama-zero3-4ranks", folder / "run")
    for line in COMMANDS:
        run(python.with_name("reshard"), *line.split(), folder=folder, log=log)
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def run_tests(python: Path, tree: Path, log: Path) -> dict[str, Any]:
    """Run the tests; return how many passed, and what was skipped.

    They import the copy of the tree, for which the compiled module is built first.

    Raises:
        StepError: some failed.
    """
    run(python, "-m", "pip", "install", "-q", "setuptools>=77", folder=tree, log=log)
    run(python, "setup.py", "-q", "build_ext", "--inplace", folder=tree, log=log)
    words = ("-rfEs", "-n", "2", "--dist", "loadfile", "-m", "not judge and not slow")
    folders = [f"tests/{name}" for name in TESTS]
    try:
        text = run(python, "-m", "pytest", "-q", *words, *folders, folder=tree, log=log)
    except StepError as error:
        raise StepError(describe_failures(error.output) or str(error)) from error
    found = _SUMMARY.search(text)
    return {"tests": found[1] if found else "no test", "skipped": list_skipped(text)}


def list_skipped(text: str) -> list[str]:
    """Return how many tests were skipped for each reason."""
    found = Counter[str]()
    for count, reason in _SKIPPED.findall(text):
        found[reason] += int(count)
    return [f"{count} ({reason})" for reason, count in sorted(found.items())]


def describe_failures(text: str) -> str:
    """Return how the tests ended, and how many failed in each file; empty if they did not end."""
    ended, failed = _SUMMARY.search(text), Counter(_FAILED.findall(text))
    if ended is None:
        return ""
    files = ", ".join(f"{count} in `{name}`" for name, count in sorted(failed.items()))
    return f"the tests ended with {ended[1]}; failed: {files}"


_HEAD = """# Versions of Python and of libraries

`python -m tests.versions OUT` writes this page; do not edit it. The table shows what was run, with
the versions that were installed. Where a row names no version, `pip` chose the newest of that day.

- *Commands*: `inspect`, `merge`, `split`, `convert`, `diff` and `verify` of the checkpoint in
  `examples/`.
- *README*: every command and Python block of the README. FSDP 2 of torch 2.6 runs on GPUs only;
  with it, `fsdp/` is a run of FSDP 1.
- *Tests*: the quick tests in these folders of `tests/`: {tests}.

A row without torch runs the commands only. Tests of `containers` compare files byte for byte with
those that the installed torch and safetensors write. The archives that torch 2.6 writes lack two
records which `reshard` writes, as torch 2.7 and later do: with it, the tests compare all other
records, and load each file; files over 4 GiB are only loaded. Tests of a dtype that the installed
safetensors cannot save are skipped.

"""
_COLUMNS = ("Row", "Python", *SHOWN, "Commands", "README", "Tests", "Date")
_TAIL = """
{same}

The minimum versions in `pyproject.toml` are those of the rows `core-oldest` and `torch-oldest`. All
tests, also those with the real frameworks, run with the versions of the row `pinned`, which are in
`constraints.txt`. `.github/workflows/ci.yml` runs every row.
"""


def make_page(results: dict[str, dict[str, Any]]) -> str:
    """Return the text of the page for the results of all rows."""
    rows = [_COLUMNS, ["---"] * len(_COLUMNS), *map(_list_cells, results, results.values())]
    lines = [f"| {' | '.join(cells)} |\n" for cells in rows]
    failures = [
        f"\nRow `{name}`: {result.get('failure') or result['not_run']}.\n"
        for name, result in results.items()
        if "failure" in result or "not_run" in result
    ]
    skipped = [
        f"\nRow `{name}` skipped {', '.join(result['skipped'])}.\n"
        for name, result in results.items()
        if result.get("skipped")
    ]
    digests = {result["digest"] for result in results.values() if "digest" in result}
    same = "The commands wrote the same bytes in every row"
    if len(digests) > 1:
        same = "THE COMMANDS DID NOT WRITE THE SAME BYTES IN EVERY ROW"
    listed = ", ".join(f"`{name}`" for name in TESTS)
    ending = _TAIL.format(
        same=f"{same} (SHA-256 {', '.join(sorted(each[:16] for each in digests))})."
    )
    return "".join([_HEAD.format(tests=listed), *lines, *skipped, *failures, ending])


def _list_cells(name: str, result: dict[str, Any]) -> list[str]:
    versions = [result.get("versions", {}).get(library, "") or "-" for library in SHOWN]
    done = {**result, "commands": "run"} if "digest" in result else result
    steps = ["commands", "readme", "tests"] if ROWS[name].extra else ["commands"]
    cells = [done.get(step, "not run") for step in steps] + ["-"] * (3 - len(steps))
    if "failure" in result:
        cells[cells.index("not run")] = "failed"
    return [f"`{name}`", result["python"], *versions, *cells, result["date"]]


def main() -> None:
    """Run the rows, and write the page if all rows have a result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--only", nargs="+", choices=tuple(ROWS), default=tuple(ROWS), metavar="ROW"
    )
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.update(OMP_NUM_THREADS="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    os.environ.pop("PYTHONPATH", None)
    # Without it, each of four ranks compiles torch and transformers from source at each start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in chosen.only:
        for result in run_row(name, out):
            (out / f"{name}.json").write_text(json.dumps(result, indent=2))
            sys.stdout.write(f"{name}: {json.dumps(result)}\n")
            sys.stdout.flush()
    files = {name: out / f"{name}.json" for name in ROWS}
    results = {name: json.loads(path.read_text()) for name, path in files.items() if path.is_file()}
    if len(results) == len(ROWS):
        PAGE.write_text(make_page(results))
    digests = {result["digest"] for result in results.values() if "digest" in result}
    failed = any("failure" in results[name] for name in chosen.only)
    sys.exit(1 if failed or len(digests) > 1 else 0)


if __name__ == "__main__":
    main()
