"""Fuzz all targets in turn, one process each, and print executions, edges and findings."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

_EXECUTED = re.compile(r"^#(\d+)\s", re.MULTILINE)
_EDGES = re.compile(r"cov: (\d+)")
_GRACE = 600  # seconds to begin, where the corpus is run once, and to end


Fuzz = Callable[[str, Path, Path], object]


def run(names: Sequence[str], seconds: int, scratch: Path, fuzz: Fuzz) -> int:
    """Exit code 1 if anything did not end as it should; what tripped a reader is only told.

    Args:
        fuzz: fuzzes the target of that name in a directory, appends its findings to a file there,
            and does not return: libFuzzer ends its process.
    """
    wrong = 0
    print(f"{'target':20} {'executions':>10} {'edges':>7} {'tripped':>7} {'wrong':>5}", flush=True)
    for name in names:
        with tempfile.TemporaryDirectory(prefix="fuzz-", dir=scratch) as made:
            folder = Path(made)
            findings, log = folder / "findings", folder / "log"
            findings.touch()
            act = partial(fuzz, name, folder, findings)
            code = _forked(act, log, seconds + _GRACE)
            found = [json.loads(line) for line in findings.read_text().splitlines()]
            said = log.read_text(errors="replace")
        bad = [line for line in found if line["wrong"]]
        wrong += len(bad) + (code != 0)
        counts = f"{_last(_EXECUTED, said):>10} {_last(_EDGES, said):>7}"
        print(f"{name:20} {counts} {len(found) - len(bad):>7} {len(bad):>5}")
        for line in found:
            print(f"  {line['wrong'] or 'tripped'}: {line['where']}")
            print(f"    {line['told'][:200]}\n    --replay {line['input'][:400]}")
        if code:
            print(f"  ended with {code}:", *said.splitlines()[-12:], sep="\n    ")
        sys.stdout.flush()
    return int(wrong > 0)


def _forked(act: Callable[[], object], log: Path, limit: float) -> int:
    """Act in a fork, which has all modules imported and is killed after a time limit."""
    child = os.fork()
    if child == 0:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            act()
        finally:
            os._exit(70)  # not reached: libFuzzer has ended it
    late = time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > late:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.2)


def _last(pattern: re.Pattern[str], log: str) -> str:
    found = pattern.findall(log)
    return found[-1] if found else "-"
