"""One process becomes N, and what is said when one of them fails.

The ranks are started by PyTorch's elastic launcher, as torchrun does, with its reports left out:
the rank that knows why a run ended says so in one line, and the other ranks are stopped.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer.environment import STARTER, world_size_of_launcher
from trainer.errors import TrainerError
from trainer.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_PATIENCE_S = 2.0
"""How long a rank that does not know the cause waits to be stopped before it speaks, too."""

_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exit|timed? ?out",
    re.IGNORECASE,
)


def start(settings: Settings, arguments: Sequence[str], task: str) -> int:
    """Run ``task`` on every rank: here when this is one, else on ranks that are started now.

    Args:
        settings: of the run.
        arguments: of the command line, for the ranks.
        task: a function of ``trainer``, with its module, that takes settings and ranks.

    Returns:
        The exit code.

    Raises:
        TrainerError: the only rank failed.
    """
    if settings.nproc > 1 and world_size_of_launcher() is None:
        return _start_ranks(settings, arguments)
    if "RANK" in os.environ and STARTER in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[STARTER]),), daemon=True).start()
    with contextlib.ExitStack() as stack:
        try:
            from trainer.ranks import process_group

            module, _, function = task.partition(".")
            run = getattr(importlib.import_module(f"trainer.{module}"), function)
            group = process_group(settings.device, settings.timeout, settings.threads)
            run(settings, stack.enter_context(group))
        except Exception as error:
            if settings.nproc > 1:
                _leave(error, int(os.environ["RANK"]))
            raise
    return 0


def _end_with(starter: int) -> None:
    """End when the process that started the ranks was killed and could not stop them."""
    while os.getppid() == starter:
        time.sleep(1)
    os._exit(1)


def _start_ranks(settings: Settings, arguments: Sequence[str]) -> int:
    """Start the ranks, wait for them, and explain how they ended."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # this process only waits; the launcher is chatty
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    os.environ[STARTER] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.nproc,
        run_id=f"trainer-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "trainer", *arguments)
    except ChildFailedError as failed:
        return _explain(failed.failures)
    except SignalException as stopped:
        word = "interrupted" if stopped.sigval == signal.SIGINT else "terminated"
        _say(f"error: {word}; all ranks were stopped")
        return 128 + stopped.sigval
    return 0


def _explain(failures: dict[int, ProcessFailure]) -> int:
    """The exit code; and what happened, if the rank could not say it."""

    def consequence(rank: int) -> int:
        """How likely a rank failed because another one did, or was stopped by the launcher."""
        code = failures[rank].exitcode
        return 2 if code == -signal.SIGTERM else 1 if code == 1 else 0

    rank = min(failures, key=consequence)
    code = failures[rank].exitcode
    if code in (1, 2, 3):  # it was able to say why
        return code
    if code < 0:
        who = "a rank" if code == -signal.SIGTERM else f"rank {rank}"
        _say(f"error: {who} died ({_signal(-code)}); the other ranks were stopped")
        return 1
    _say(f"error: rank {rank} ended with exit code {code}; the other ranks were stopped")
    return code


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _leave(error: Exception, rank: int) -> NoReturn:
    """Say what happened, and end at once: to leave the group could mean to wait for the others.

    A rank that only sees that others have gone, or that fails as rank 0 does, waits a moment first:
    the rank that has more to say ends meanwhile, and the launcher stops this one.
    """
    lost = _lost(error)
    knows = error.one_rank if isinstance(error, TrainerError) else False
    if lost or not (knows or rank == 0):
        time.sleep(_PATIENCE_S)
    speaker = "error" if rank == 0 and not lost and not knows else f"rank {rank}"
    if lost:
        _say(f"{speaker}: {lost}")
    elif isinstance(error, TrainerError):
        _say(f"{speaker}: {error}")
    else:
        _say(f"{speaker}: a bug\n{''.join(traceback.format_exception(error))}".rstrip())
    sys.stdout.flush()
    os._exit(error.exit_code if isinstance(error, TrainerError) else 1)


def _lost(error: Exception) -> str:
    """What to say when the error means that other ranks are gone; empty when it does not."""
    import torch.distributed as dist

    reason = re.sub(r"^\[[^]]*\] *", "", next(iter(str(error).splitlines()), ""))
    always = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))
    if not always and not (isinstance(error, RuntimeError) and _GONE.search(str(error))):
        return ""
    home = Path(__file__).parent
    ours = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if home in Path(frame.filename).parents
    ]
    place = f"{Path(ours[-1].filename).relative_to(home)}, {ours[-1].name}" if ours else "joining"
    return f"lost the other ranks in {place} ({reason})"


def _say(message: str) -> None:
    """One write, so that the lines of several ranks do not mix."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
