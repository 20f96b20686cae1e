"""The one place where other programs are started: those that a user names, and our trainer."""

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

from reshard import signals
from reshard.errors import UsageError

_GRACE_S = 35.0  # torchrun stops its ranks itself, and gives them 30
_TOLD_EVERY_S = 1.0
_CHECK_S = 0.1  # between two looks for a signal
_LAST_LINES = 12
_LAST_BYTES = 16 << 10
_SIGNALS = {number.value: number.name for number in signal.Signals}  # not those of real time
_EXCEPTION = re.compile(r"(\[rank\d+\]: ?)?[A-Za-z_][\w.]*(Error|Exception)\b")
_PLACE = re.compile(r"\{([a-z_]+)\}")


Watch = Callable[[float, str], None]
"""Told how many seconds a program runs, and what it printed last."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended; ``exit_code`` is minus the signal that ended it."""

    exit_code: int
    seconds: float
    timed_out: bool
    said: tuple[str, ...]  # the last lines of stderr, or of stdout where that is empty

    @property
    def failed(self) -> bool:
        """Whether it did not do what was asked."""
        return self.timed_out or self.exit_code != 0

    def why(self) -> str:
        """What happened to it, in words."""
        if self.timed_out:
            return f"was stopped after {self.seconds:.0f} s (--timeout)"
        if self.exit_code < 0:
            return f"was ended by {_SIGNALS.get(-self.exit_code, f'signal {-self.exit_code}')}"
        return f"ended with exit code {self.exit_code}"


def words(template: str, known: Sequence[str], needed: Sequence[str]) -> list[str]:
    """A command line cut into words as a shell does it; nothing else of a shell.

    Raises:
        UsageError: it cannot be cut, or a placeholder is unknown or missing.
    """
    try:
        found = shlex.split(template)
    except ValueError as error:
        raise UsageError("--command", f"cannot be cut into words: {error}") from error
    names = _PLACE.findall(template)
    for name in names:
        if name not in known:
            raise UsageError(f"--command {{{name}}}", f"is none of {_listed(known)}")
    for name in needed:
        if name not in names:
            raise UsageError("--command", f"has no {{{name}}}", f"it may have {_listed(known)}")
    return found


def filled(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The words with each placeholder replaced.

    Raises:
        UsageError: there is no value for one.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UsageError(f"--command {match[0]}", "this checkpoint tells none", "leave it out")
        return str(values[match[1]])

    return [_PLACE.sub(value, word) for word in command]


def run(command: Sequence[str], place: Path, timeout_s: float, watch: Watch | None = None) -> Ended:
    """Run a program to its end, in the working directory, what it prints going to files.

    Whatever ends this, a signal included, the program and its process group end too.

    Args:
        place: an existing directory for ``stdout.txt`` and ``stderr.txt``.
        watch: called every second while the program runs.

    Raises:
        UsageError: it cannot be started.
    """
    began = time.monotonic()
    timed_out = False
    process: subprocess.Popen[bytes] | None = None
    with (
        signals.checked(),
        (place / "stdout.txt").open("wb") as out,
        (place / "stderr.txt").open("wb") as err,
    ):
        try:
            process = subprocess.Popen(  # noqa: S603 - what the user asked for, without a shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            _wait(process, place, timeout_s, watch)
        except OSError as error:
            raise UsageError(command[0], f"cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            code = _end(process) if process is not None else 0
    seconds = time.monotonic() - began
    said = _last_lines(place / "stderr.txt") or _last_lines(place / "stdout.txt")
    return Ended(code, seconds, timed_out, said)


def _wait(
    process: subprocess.Popen[bytes], place: Path, timeout_s: float, watch: Watch | None
) -> None:
    """Wait for the end, and tell every second how long it takes and what was printed last.

    Raises:
        subprocess.TimeoutExpired: there is none.
    """
    began = told = time.monotonic()
    while (now := time.monotonic()) < began + timeout_s:
        signals.check()
        if watch is not None and now >= told + _TOLD_EVERY_S:
            watch(now - began, _newest_line(place))
            told = now
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(_CHECK_S, began + timeout_s - now))
            return
    raise subprocess.TimeoutExpired(process.args, timeout_s)


def _newest_line(place: Path) -> str:
    """Return the last line of the file that was written last; a bar's last state of its line."""
    files = [place / name for name in ("stdout.txt", "stderr.txt")]
    written = [path for path in files if path.stat().st_size]
    newest = max(written, key=lambda path: path.stat().st_mtime_ns, default=None)
    lines = _last_lines(newest) if newest else ()
    return lines[-1].rstrip().rpartition("\r")[2].strip() if lines else ""


def _end(process: subprocess.Popen[bytes]) -> int:
    """Ask the group to end, and make it, if the program has not ended; its exit code."""
    if process.returncode is not None:
        return process.returncode
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _last_lines(path: Path) -> tuple[str, ...]:
    """The last lines, and exceptions named before them: a launcher's own summary comes last."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    before, last = lines[:-_LAST_LINES], lines[-_LAST_LINES:]
    return (*dict.fromkeys(filter(_EXCEPTION.match, before)), *last)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in names)
