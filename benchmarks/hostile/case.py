"""Run one case: pass a damaged checkpoint to the command line, and check what the command did.

A command may succeed or stop with a `ReshardError`. It may not raise anything else, take long, use
much memory, write outside its destination, leave files behind, start a program, or print terminal
control sequences.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import click

from benchmarks.hostile import damage
from benchmarks.hostile.seeds import ROOT, Seed
from reshard import cli, formats
from reshard.engine.move import execute
from reshard.errors import ReshardError

CPU_SECONDS = 30.0  # to import a class of transformers takes 15 if nothing is compiled yet
MEMORY_MB = 400  # above what the process held before
_MOST_PRINTED = 50_000  # characters of a message
_CODES = range(6)
_RUNS_CODE = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
)
_MOVES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
_FRAMES = 2
_TARGETS = (
    *("dcp", "fsdp", "fsdp2", "deepspeed", "ds-universal", "megatron", "hf-trainer", "meta"),
    *("torch", "nanotron", "colossalai", "verl", "accelerate"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a case came to: the exit code, and what was wrong ("" if nothing)."""

    code: int
    wrong: str = ""
    where: str = ""  # the frames of ours that raised
    trace: str = ""
    tripped: str = ""  # the frames of a reader that `errors.understood` answered for


class _TooLong(BaseException):
    """Not an Exception: no reader may take it for a damaged file."""


def run(seeds: list[Seed], seed: int, index: int, scratch: Path) -> tuple[str, Verdict]:
    """Make a case, run it, and clean up; its description and what came of it."""
    chance = Random(f"{seed}:{index}")
    tree = damage.damaged(chance, chance.choice(seeds))
    return ran(chance, tree, scratch)


def ran(
    chance: Random, tree: damage.Tree, scratch: Path, *, headers: bool = False
) -> tuple[str, Verdict]:
    """Lay a damaged checkpoint out and give it to some command.

    Args:
        headers: mostly one that reads no tensors, which is soon done.
    """
    place, out = scratch / "in", scratch / "out"
    for directory in (place, out):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    given = tree.lay_out(place)
    words = _words(chance, given, out)
    if headers and words[0] in ("merge", "split") and "--dry-run" not in words:
        words += ["--dry-run"]
    verdict = judged(words, out)
    told = f"{tree.seed.name}: {', '.join(tree.log)}: {' '.join(words[:1] + words[2:])}"
    return told, verdict


def _words(chance: Random, given: Path, out: Path) -> list[str]:
    """Choose a command; every case is at least opened, and some are written."""
    kind, name = chance.random(), chance.choice(("x.safetensors", "x.pt", "directory"))
    if kind < 0.3:
        return ["inspect", str(given), *chance.choice(([], ["--tensors"], ["--json"]))]
    if kind < 0.65:
        return ["merge", str(given), str(out / name), "--dry-run", "--workers", "1"]
    if kind < 0.8:
        return ["merge", str(given), str(out / name), "--workers", "1"]
    if kind < 0.92:
        return ["verify", str(given), "--workers", "1", *chance.choice(([], ["--deep"]))]
    to = chance.choice(_TARGETS)
    write = chance.choice(([], ["--dry-run"], ["--dry-run"]))
    size = ["--world-size", chance.choice("123")]
    return [
        "split",
        str(given),
        str(out / "directory"),
        "--to",
        to,
        *size,
        "--workers",
        "1",
        *write,
    ]


def judged(words: list[str], out: Path) -> Verdict:
    """Run a command and say what was wrong with what it did."""
    said, complained = io.StringIO(), io.StringIO()
    _watch.start(out.parent)
    error: BaseException | None = None
    code = 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained), _limited():
        try:
            code = cli.cli.main(args=words, prog_name="reshard", standalone_mode=False) or 0
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # noqa: BLE001 - this is what is judged
            error = raised
            code = 70 if isinstance(raised, _TooLong) else cli._explain(raised)  # noqa: SLF001
    wrong = (
        _watch.stop()
        or _bad_error(error, code)
        or _bad_text(words, said.getvalue(), complained.getvalue(), code)
        or _bad_output(words, out, code, error)
    )
    trace = "".join(traceback.format_exception(error)) if error and wrong else ""
    return Verdict(code, wrong, frames(error) if wrong else "", trace, tripped(error))


def tripped(error: BaseException | None) -> str:
    """Return the frames of the Python error that `errors.understood` replaced, or ""."""
    is_replaced = (
        isinstance(error, ReshardError)
        and "does not have the structure of its format" in error.problem
    )
    return frames(error.__cause__) if error and is_replaced else ""


def _bad_error(error: BaseException | None, code: int) -> str:
    if error is None or isinstance(error, (ReshardError, click.exceptions.Exit)):
        return "" if code in _CODES else f"exit code {code}"
    return f"{type(error).__name__}: {error!s:.200}"


def _bad_text(words: list[str], said: str, complained: str, code: int) -> str:
    """Return what is wrong with the output: control characters, invalid JSON, a missing message."""
    odd = {c for c in said + complained if not c.isprintable() and c != "\n"}
    if odd:
        return f"prints {sorted(odd)[:5]!r}"
    if code and not said and not complained.startswith("reshard: "):
        return "fails without a message"
    if len(complained) > _MOST_PRINTED:
        return f"prints {len(complained)} characters"
    if "--json" in words and code == 0:
        json.loads(said)
    return ""


def _bad_output(words: list[str], out: Path, code: int, error: BaseException | None) -> str:
    """Return what is wrong with the files: partial output, or one that its library cannot open."""
    left = sorted(os.listdir(out))  # noqa: PTH208
    writes = words[0] in ("merge", "split") and "--dry-run" not in words
    if (code or error or not writes) and left:
        return f"leaves {left[:3]!r}"
    if not writes or code:
        return ""
    if len(left) != 1:
        return f"wrote {left[:3]!r}"
    if left[0].endswith(".safetensors"):
        from safetensors import safe_open

        with safe_open(out / left[0], framework="np") as file:
            file.keys()
    return ""


def frames(error: BaseException | None) -> str:
    """Return where in reshard an error was raised, to tell findings apart."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    ours = [f for f in frames if f.filename.startswith(str(ROOT / "reshard"))]
    return " < ".join(
        f"{Path(f.filename).relative_to(ROOT)}:{f.lineno} {f.name}"
        for f in ours[: -_FRAMES - 1 : -1]
    )


# ----------------------------------------------------------------------------------------- limits


def _rss_mb(field: str) -> int:
    with open("/proc/self/status") as status:  # noqa: PTH123 - thousands of times
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) >> 10


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """End a case that computes for too long; `_Watch` limits memory."""

    def too_long(_number: int, _frame: Any) -> NoReturn:
        raise _TooLong(f"more than {CPU_SECONDS} s of CPU time")

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _Watch:
    """Notes what the interpreter is asked to do, by its audit events, and its peak of memory."""

    def __init__(self) -> None:
        self._scratch: str | None = None
        self._seen = ""
        self._held_mb = 0
        self._hooked = False

    def start(self, scratch: Path) -> None:
        """Watch from here on; writing is allowed below ``scratch``."""
        if not self._hooked:
            sys.addaudithook(self._event)
            self._hooked = True
        with open("/proc/self/clear_refs", "w") as peak:  # noqa: PTH123
            peak.write("5")
        self._held_mb, self._seen = _rss_mb("VmRSS"), ""
        self._scratch = str(scratch)

    def stop(self) -> str:
        """Stop, and return what was wrong, if anything."""
        self._scratch = None
        took_mb = _rss_mb("VmHWM") - self._held_mb
        return self._seen or (f"took {took_mb} MB" if took_mb > MEMORY_MB else "")

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if self._scratch is None:
            return
        if event in _RUNS_CODE or event == "pickle.find_class":
            self._seen = f"{event} {args!r:.100}"
        writes = event == "open" and isinstance(args[2], int) and args[2] & _WRITES
        if writes or event in _MOVES:
            path = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes)) else ""
            if path.startswith("/") and not path.startswith((self._scratch, "/dev/null")):
                self._seen = f"{event} {args!r:.100}"


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_watch = _Watch()
PRELOADED = (execute, formats)  # once, before the processes part
