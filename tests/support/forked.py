"""Start Python programs as forks of one process, which has imported what they need once.

``with serving(modules) as path`` starts that process. ``python forked.py PATH WORLD PROGRAM ...``
then stands for torchrun: it runs the program, a script or ``-m`` and a module, on that many
ranks, prints what they print and ends as they do. A world of 0 stands for ``python PROGRAM ...``:
one process, with the environment, the signals, the stdin and the exit status of the caller.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

CLIENT = Path(__file__).resolve()
ROOT = CLIENT.parents[2]
PYTHON = "FORKED_PYTHON"  # the variable that names what `write_python` wrote
WRAPPER = """#!/bin/sh
# Stands for python. A preloaded library needs a process of its own, as do a text and no arguments.
test "$1" != -u || shift
if test -z "$LD_PRELOAD"; then
    case $1 in
        -m | *.py) exec {client} "$@" ;;
    esac
fi
exec {python} "$@"
"""
POLL_SECONDS = 0.02
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def serving(modules: list[str], environment: dict[str, str] | None = None) -> Iterator[str]:
    """Start a process that imports these modules and forks programs; yield its socket's path.

    It ends with the block, or with this process.
    """
    from tests.support.programs import LIMIT_S  # not for the client, a script

    with tempfile.TemporaryDirectory(prefix="forked-") as place:
        path, log = Path(place, "socket"), Path(place, "log")
        with log.open("wb") as file:
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forked", path, *modules],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
            )
        try:
            until = time.monotonic() + LIMIT_S
            while not path.exists():
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            yield str(path)
        finally:
            server.kill()
            server.communicate()


def build_command(path: str, world: int) -> list[str]:
    """Return what to write before a program, to have the server at ``path`` run it."""
    return [sys.executable, "-S", "-E", str(CLIENT), path, str(world)]


def write_python(path: str, place: Path) -> dict[str, str]:
    """Write a program that stands for ``python``, in programs and in what they start.

    Returns:
        The variables with which they find it, as ``sys.executable``.
    """
    python = place / "python"
    client, own = shlex.join(build_command(path, 0)), shlex.quote(sys.executable)
    python.write_text(WRAPPER.format(client=client, python=own))
    python.chmod(0o755)
    return {PYTHON: str(python)}


def request(path: str, world: int, argv: list[str]) -> int:
    """Have the server run a program, which prints here; return its exit code."""
    order = {"world": world, "argv": argv, "cwd": str(Path.cwd()), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(order).encode() + b"\n"], [0, 1, 2])
        answers = server.makefile()
        pids = json.loads(answers.readline() or "[]")
        if world == 0:
            _forward_signals(pids)
        code = int(answers.readline() or "1")
    if code < 0 and world == 0:
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code % 256


def _forward_signals(pids: list[int]) -> None:
    def forward(number: int, _frame: object) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)


def serve(path: str, modules: list[str]) -> NoReturn:
    """Import the modules, then serve every order in a fork of its own."""
    gc.disable()  # it would look through all that is imported again and again
    for module in modules:
        imported = importlib.import_module(module)
        if hasattr(imported, "preload"):
            imported.preload([])
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these forks
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen(64)
        Path(f"{path}.new").rename(path)  # whoever sees it can connect
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            client, _ = listener.accept()
            if os.fork():
                client.close()
                continue
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with contextlib.suppress(BrokenPipeError):
                _serve_one(client)
            os._exit(0)
    os._exit(0)


def _serve_one(client: socket.socket) -> None:
    from tests.support.ports import find_free_port  # not for the client, a script

    data, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
    while not data.endswith(b"\n"):
        data += client.recv(1 << 20)
    order = json.loads(data)
    port = find_free_port()
    ranks = range(order["world"]) if order["world"] else [None]
    started = [_fork(order, rank, port, streams) for rank in ranks]
    running = set(started)
    for stream in streams:
        os.close(stream)
    client.sendall(json.dumps(started).encode() + b"\n")
    codes: list[int] = []
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            codes.append(os.waitstatus_to_exitcode(status))
        gone = select.select([client], [], [], 0)[0]  # a client sends no more unless it has ended
        if gone or any(codes):
            for group in started:  # with what its program forked
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        if not pid:
            time.sleep(POLL_SECONDS)
    client.sendall(b"%d\n" % next((code for code in codes if code), 0))


def _fork(order: dict[str, Any], rank: int | None, port: int, streams: list[int]) -> int:
    pid = os.fork()
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # in both processes: whichever comes first
    if pid:
        return pid
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(order["environment"])
        if rank is not None:
            os.environ |= _rank_variables(rank, order["world"], port)
        sys.executable = os.environ.get(PYTHON, sys.executable)
        os.chdir(order["cwd"])
        _run(order["argv"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:  # noqa: BLE001 - as the interpreter ends a program
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _rank_variables(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[2].isdigit():
        sys.exit(request(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
    serve(sys.argv[1], sys.argv[2:])
