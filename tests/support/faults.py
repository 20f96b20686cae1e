"""A process that can be killed, or fail, at every call that changes a disk.

It reads trials from stdin, a line of JSON each, and forks for each: the child runs a program with
its system calls counted, and at the chosen one it is killed, loses power, is refused or signalled.
Losing power means that what was not made durable by ``fsync`` may be lost: writes are undone, names
of new files go, renames and links are taken back, each by the throw of a coin.

Or a signal comes at one of the `points` of its main thread.
"""

from __future__ import annotations

import errno
import faulthandler
import functools
import importlib
import json
import os
import random
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

from reshard.engine.move import compiled
from reshard.engine.output import files
from tests.support.programs import LIMIT_S
from tests.support.signal_points import Points

_NAMES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir"}


class Disk:
    """The calls of one process that change a disk, counted, noted, and ended by one fault.

    Args:
        fault: ``kind`` of ``kill``, ``torn``, ``power``, ``signal`` or the name of an errno; ``at``
            which call, from 0; ``only`` a kind of call that counts; ``seed``.
        within: where calls count.
    """

    def __init__(self, fault: dict, within: str) -> None:
        self.fault, self.within = fault, within
        self.calls: list[list[str]] = []
        self.undo: list[tuple[set[str], object]] = []  # what makes it durable, how it is lost
        self.lock = threading.RLock()
        names = ("pwrite", "fsync", "ftruncate", "preadv", "close")
        self.real = {name: getattr(os, name) for name in names}

    def install(self) -> None:
        os.pwrite, os.fsync = self.pwrite, self.fsync
        os.ftruncate, os.preadv, os.close = self.ftruncate, self.preadv, self.close
        sys.addaudithook(self.audit)
        # The calls of compiled modules cannot be counted. Python makes them without these modules.
        compiled._compiled = files._reads = None

    def path(self, descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink()).removesuffix(" (deleted)")

    def pwrite(self, descriptor, data, offset):
        with self.lock:
            path = self.path(descriptor)
            if self.fault.get("short"):
                data = data[: (len(data) + 1) // 2]
            if self.call("pwrite", path) == "torn":
                self.real["pwrite"](descriptor, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            before = _bytes(path, offset, len(data)).ljust(len(data), b"\0")

            def lose() -> None:
                with Path(path).open("r+b") as file:
                    file.seek(offset)
                    file.write(before)

            self.undo.append(({path}, lose))
            return self.real["pwrite"](descriptor, data, offset)

    def ftruncate(self, descriptor, size):
        with self.lock:
            self.call("ftruncate", self.path(descriptor))
            return self.real["ftruncate"](descriptor, size)

    def fsync(self, descriptor):
        with self.lock:
            path = self.path(descriptor)
            self.call("fsync", path)
            self.real["fsync"](descriptor)
            for needed, _ in self.undo:
                needed.discard(path)
            self.undo = [item for item in self.undo if item[0]]

    def preadv(self, descriptor, buffers, offset):
        path = self.path(descriptor)
        if self.fault.get("short") and len(buffers[0]) > 1:
            buffers = [memoryview(buffers[0])[: len(buffers[0]) // 2]]
        if self.fault.get("only") == "preadv":
            with self.lock:
                self.call("preadv", path)
        return self.real["preadv"](descriptor, buffers, offset)

    def close(self, descriptor):
        if self.fault.get("only") == "close":
            with self.lock:
                self.call("close", self.path(descriptor))
        return self.real["close"](descriptor)

    def audit(self, event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path, flags = os.fsdecode(arguments[0]), arguments[2] or 0
            if flags & os.O_CREAT and self.within in path and not os.path.lexists(path):
                with self.lock:
                    self.call("create", path)
                    self.undo.append(({_parent(path)}, Path(path).unlink))
        elif event in _NAMES and self.within in (names := _named(arguments)):
            with self.lock:
                first, last = names.split("\0")[0], names.split("\0")[-1]
                if event != "os.mkdir" or not os.path.lexists(first):
                    self.call(event, *names.split("\0"))
                if event == "os.link":
                    self.undo.append(({_parent(last)}, Path(last).unlink))
                elif event == "os.rename" and not os.path.lexists(last):
                    back = functools.partial(Path(last).rename, first)
                    self.undo.append(({_parent(last)}, back))

    def call(self, kind: str, *paths: str) -> str:
        """Note a call that is about to be made; the fault strikes before it."""
        if threading.current_thread().name == "quiet" or self.within not in paths[0]:
            return ""
        if self.fault.get("only") not in (None, kind):
            return ""
        number = len(self.calls)
        self.calls.append([kind, *paths])
        if number != self.fault.get("at"):
            return ""
        fate = self.fault["kind"]
        if fate == "torn" and kind == "pwrite":
            return fate
        if fate in ("kill", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == "power":
            self.lose_power()
        if fate == "signal":
            os.kill(os.getpid(), self.fault["signal"])
            return ""
        raise OSError(getattr(errno, fate), os.strerror(getattr(errno, fate)))

    def lose_power(self) -> None:
        """Leave on the disk what it may hold after a power failure; then die."""
        threading.current_thread().name = "quiet"
        coin = random.Random(self.fault["seed"])
        for needed, lose in reversed(self.undo):
            if needed and coin.random() < 0.6:
                with suppress(FileNotFoundError, IsADirectoryError):  # lost with its directory
                    lose()
        os.kill(os.getpid(), signal.SIGKILL)


def _bytes(path: str, offset: int, nbytes: int) -> bytes:
    with Path(path).open("rb") as file:
        file.seek(offset)
        return file.read(nbytes)


def _parent(path: str) -> str:
    return str(Path(path).parent)


def _named(arguments: tuple) -> str:
    return "\0".join(os.fsdecode(a) for a in arguments if isinstance(a, (str, bytes)))


def reshard(arguments: list[str], batch_bytes: int) -> None:
    """Run the command line with more frequent lines in the journal."""
    from reshard.cli import main
    from reshard.engine.move import journal

    journal.BATCH_BYTES = batch_bytes
    sys.argv = ["reshard", *arguments]
    main()


def _child(trial: dict) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(trial[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    module, name = trial["run"].split(":")
    run = getattr(importlib.import_module(module), name)
    fault, found = trial["fault"], None
    disk = Disk(fault, trial["within"])
    disk.install()
    if "files" in fault:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        found = Points(fault["files"], fault.get("strike"), fault.get("signal", 0))
        found.install()
    code = 0
    try:
        run(*trial["arguments"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - a child of a fork must not go on in its parent's code
        traceback.print_exc()
        code = 99
    sys.settrace(None)
    threading.current_thread().name = "quiet"
    sys.stdout.flush()
    Path(trial["calls"]).write_text(json.dumps(disk.calls if found is None else found.all))
    os._exit(code)


def _answer(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    _answer("ready")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _child(json.loads(line))
        _, status = os.waitpid(child, 0)
        _answer(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
