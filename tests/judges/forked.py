"""Scripts on ranks that are forks of one process, which has imported the frameworks once.

``python forked.py SOCKET WORLD SCRIPT ARGUMENTS...`` stands for torchrun: it asks the process that
``python -m tests.judges.forked SOCKET`` began, ends as the ranks do, and they end with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

POLL_SECONDS = 0.02


def ask(path: str, world: str, script: str, arguments: list[str]) -> int:
    """Have the server run a script on that many ranks, which print here; its exit code."""
    order = {"world": int(world), "argv": [script, *arguments], "cwd": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(order).encode()], [1, 2])
        return int(server.recv(16) or b"1")


def serve(path: str) -> NoReturn:
    """Import everything, then serve one order after the other."""
    from tests.judges.deepspeed_worker import preload

    preload([])
    for module in ("torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers"):
        importlib.import_module(module)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            client, _ = listener.accept()
            with client:
                _serve_one(client)


def _serve_one(client: socket.socket) -> None:
    data, streams, _, _ = socket.recv_fds(client, 1 << 20, 2)
    order = json.loads(data)
    port = _free_port()
    running = {_fork(order, rank, port, streams) for rank in range(order["world"])}
    for stream in streams:
        os.close(stream)
    codes: list[int] = []
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            codes.append(os.waitstatus_to_exitcode(status))
        gone = select.select([client], [], [], 0)[0]  # a client says nothing more: it has ended
        if gone or any(codes):
            for other in running:
                os.kill(other, signal.SIGKILL)
        if not pid:
            time.sleep(POLL_SECONDS)
    with contextlib.suppress(BrokenPipeError):
        client.send(str(next((code for code in codes if code), 0) % 256).encode())


def _fork(order: dict[str, Any], rank: int, port: int, streams: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
        os.environ |= {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(order["world"])),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        os.chdir(order["cwd"])
        sys.argv = order["argv"]
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter ends a script
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    sys.exit(ask(*sys.argv[1:4], sys.argv[4:]))
