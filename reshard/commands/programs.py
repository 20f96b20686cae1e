"""Running other programs: those that a user names, and our trainer."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import UsageError
from reshard.system import signals

_GRACE_S = 35.0  # torchrun stops its ranks itself, which takes it up to 30 s
_WATCH_EVERY_S = 1.0
_CHECK_S = 0.1  # between two checks for a signal
_LAST_LINES = 12
_LAST_BYTES = 16 << 10
# Real-time signals have no names, so look-ups have a default.
_SIGNALS = {number.value: number.name for number in signal.Signals}
_CAUSE = re.compile(
    r"(\[rank\d+\]: ?)?[A-Za-z_][\w.]*(Error|Exception)\b"
    r"|\S+: (error: |can't open file |No module named )"  # argparse's, and python's own
)
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_NAMES = ("checkpoint", "world_size", "steps", "until", "log", "out", "zero_stage")
_LISTED = ", ".join(f"{{{name}}}" for name in _NAMES)


Watch = Callable[[float, str], None]
"""Called with the seconds that a program has run, and the last line that it printed."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended.

    Args:
        exit_code: minus the number of the signal, if one ended the program.
        last_lines: the last lines of stderr, or of stdout if stderr is empty.
    """

    exit_code: int
    seconds: float
    timed_out: bool
    last_lines: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Whether the program failed or was stopped."""
        return self.timed_out or self.exit_code != 0

    def describe(self) -> str:
        """Return how the program ended, as the end of a sentence."""
        if self.timed_out:
            return f"was stopped after {self.seconds:.0f} s (--timeout)"
        if self.exit_code < 0:
            return f"was ended by {_SIGNALS.get(-self.exit_code, f'signal {-self.exit_code}')}"
        return f"ended with exit code {self.exit_code}"


def split_command(template: str, needed: Sequence[str]) -> list[str]:
    """Split a command line into words like a shell, without its other features.

    Raises:
        UsageError: the quotes do not match, or a placeholder is unknown or missing.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise UsageError("--command", f"cannot be split into words: {error}") from error
    names = _PLACEHOLDER.findall(template)
    for name in names:
        if name not in _NAMES:
            raise UsageError(
                f"--command {{{name}}}",
                "is not a placeholder that reshard fills",
                f"use {_LISTED}",
            )
    for name in needed:
        if name not in names:
            raise UsageError(
                "--command",
                f"has no {{{name}}}",
                f"the placeholders are {_LISTED}",
            )
    return words


def fill_placeholders(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Return the words with every placeholder replaced by its value.

    Raises:
        UsageError: a placeholder has no value.
    """

    def find_value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UsageError(
                f"--command {match[0]}",
                "the checkpoint does not state its value",
                "leave it out",
            )
        return str(values[match[1]])

    return [_PLACEHOLDER.sub(find_value, word) for word in command]


def run(
    command: Sequence[str], folder: Path, timeout_s: float, watch: Watch | None = None
) -> ProgramResult:
    """Run a program in the working directory until it ends; its output goes to files.

    The program and its process group end with this function, also if a signal interrupts it.

    Args:
        folder: an existing directory for ``stdout.txt`` and ``stderr.txt``.
        watch: called every second while the program runs.

    Raises:
        UsageError: the program cannot be started.
    """
    began = time.monotonic()
    timed_out = False
    process: subprocess.Popen[bytes] | None = None
    with (
        signals.checked(),
        (folder / "stdout.txt").open("wb") as out,
        (folder / "stderr.txt").open("wb") as err,
    ):
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own program, without a shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # a process group of its own, for `_end`
            )
            _wait(process, folder, timeout_s, watch)
        except OSError as error:
            raise UsageError(command[0], f"cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            code = _end(process) if process is not None else 0
    seconds = time.monotonic() - began
    last_lines = _read_last_lines(folder / "stderr.txt") or _read_last_lines(folder / "stdout.txt")
    return ProgramResult(code, seconds, timed_out, last_lines)


def _wait(
    process: subprocess.Popen[bytes], folder: Path, timeout_s: float, watch: Watch | None
) -> None:
    began = called = time.monotonic()
    while (now := time.monotonic()) < began + timeout_s:
        signals.check()
        if watch is not None and now >= called + _WATCH_EVERY_S:
            watch(now - began, _read_newest_line(folder))
            called = now
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(_CHECK_S, began + timeout_s - now))
            return
    raise subprocess.TimeoutExpired(process.args, timeout_s)


def _read_newest_line(folder: Path) -> str:
    """Return the last line of the newer output file; of a progress bar, its last state."""
    files = [folder / name for name in ("stdout.txt", "stderr.txt")]
    written = [path for path in files if path.stat().st_size]
    newest = max(written, key=lambda path: path.stat().st_mtime_ns, default=None)
    lines = _read_last_lines(newest) if newest else ()
    return lines[-1].rstrip().rpartition("\r")[2].strip() if lines else ""


def _end(process: subprocess.Popen[bytes]) -> int:
    if process.returncode is not None:
        return process.returncode
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _read_last_lines(path: Path) -> tuple[str, ...]:
    """Earlier lines that state causes stay: a launcher prints a long summary below them."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    before, last = lines[:-_LAST_LINES], lines[-_LAST_LINES:]
    return (*dict.fromkeys(filter(_CAUSE.match, before)), *last)
