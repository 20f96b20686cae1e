"""Start N ranks from one process, and report why they ended.

PyTorch's elastic launcher starts the ranks, as torchrun does, but without its own reports: the rank
that knows why a run ended prints one message, and the other ranks are stopped.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import TYPE_CHECKING, NoReturn

from trainer.core.errors import SettingsError, TrainerError
from trainer.environment import read_launcher_world_size
from trainer.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_PATIENCE_S = 2.0
"""Seconds that a rank that does not know the cause waits to be stopped before it reports."""

_PRELOAD = ["trainer.session", "torch.optim.adamw", "transformers.models.llama.modeling_llama"]
"""Modules that one process imports for all ranks on CPU, which are forked from it."""

_LOST_RANK = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exit|timed? ?out",
    re.IGNORECASE,
)


def start(settings: Settings) -> int:
    """Train on every rank: in this process if it is a rank, else on ranks started now.

    Returns:
        The exit code.

    Raises:
        TrainerError: the only rank failed.
    """
    if settings.nproc > 1 and read_launcher_world_size() is None:
        return _start_ranks(settings)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # our own launcher and torchrun set it
        threading.Thread(target=_exit_with_starter, args=(os.getppid(),), daemon=True).start()
    with contextlib.ExitStack() as stack:
        try:
            from trainer import session
            from trainer.process_group import join_process_group

            group = join_process_group(settings.device, settings.timeout, settings.threads)
            with explain_permissions():
                session.run(settings, stack.enter_context(group))
        except Exception as error:
            if settings.nproc > 1:
                _report_and_exit(error, int(os.environ["RANK"]))
            raise
    return 0


@contextlib.contextmanager
def explain_permissions() -> Iterator[None]:
    """Report a path that the user may not access as an error of the settings.

    Raises:
        SettingsError: the block raised a PermissionError.
    """
    try:
        yield
    except PermissionError as error:
        raise SettingsError(
            f"{error.filename} cannot be accessed: {error.strerror}",
            "give paths that this user may read, and a --save that this user may write to",
        ) from error


def _exit_with_starter(parent: int) -> None:
    """Exit if the process that started the ranks was killed and could not stop them.

    Args:
        parent: the process id of torchrun; our own ranks are forked from a process that ends after
            them, and know their starter from `multiprocessing`.
    """
    starter = multiprocessing.parent_process()
    if starter is None:
        while os.getppid() == parent:
            time.sleep(1)
    else:
        starter.join()
    os._exit(1)


def _run_rank(settings: Settings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the starter reports the interrupt
    start(settings)
    sys.stdout.flush()


def _start_ranks(settings: Settings) -> int:
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    multiprocessing.set_forkserver_preload(_PRELOAD)
    if settings.device != "cuda":
        forkserver.ensure_running()  # it imports while this process imports the launcher
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # this process only waits, and the launcher logs a lot
    # CUDA does not work in a fork of a process that has asked for its devices, as imports may do.
    has_gpu = settings.device != "cpu" and torch.cuda.is_available()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.nproc,
        run_id=f"trainer-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="spawn" if has_gpu else "forkserver",
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        elastic_launch(config, _run_rank)(settings)
    except ChildFailedError as failed:
        return _report_failures(failed.failures)
    except SignalException as stopped:
        word = "interrupted" if stopped.sigval == signal.SIGINT else "terminated"
        _print_error(f"error: {word}; all ranks were stopped")
        return 128 + stopped.sigval
    return 0


def _report_failures(failures: dict[int, ProcessFailure]) -> int:
    """Return the exit code of the run; print what happened if no rank could print it."""

    def rank_as_cause(rank: int) -> int:
        """Return 0 for a likely cause, more for a rank that only lost the others or was stopped."""
        code = failures[rank].exitcode
        return 2 if code == -signal.SIGTERM else 1 if code == 1 else 0

    rank = min(failures, key=rank_as_cause)
    code = failures[rank].exitcode
    if code in (1, 2, 3):  # the rank has printed why
        return code
    if code < 0:
        who = "a rank" if code == -signal.SIGTERM else f"rank {rank}"
        _print_error(f"error: {who} died ({_name_signal(-code)}); the other ranks were stopped")
        return 1
    _print_error(f"error: rank {rank} ended with exit code {code}; the other ranks were stopped")
    return code


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _report_and_exit(error: Exception, rank: int) -> NoReturn:
    """Print what happened, and exit at once: leaving the process group could block.

    A rank that only sees that others are lost, or that fails in the same way as rank 0, waits a
    moment first: the rank that knows the cause exits meanwhile, and the launcher stops this one.
    """
    lost = _describe_lost_ranks(error)
    knows = error.one_rank if isinstance(error, TrainerError) else False
    if lost or not (knows or rank == 0):
        time.sleep(_PATIENCE_S)
    speaker = "error" if rank == 0 and not lost and not knows else f"rank {rank}"
    if lost:
        _print_error(f"{speaker}: {lost}")
    elif isinstance(error, TrainerError):
        _print_error(f"{speaker}: {error}")
    else:
        trace = "".join(traceback.format_exception(error)).rstrip()
        _print_error(f"{speaker}: a bug in the trainer\n{trace}")
    sys.stdout.flush()
    os._exit(error.exit_code if isinstance(error, TrainerError) else 1)


def _describe_lost_ranks(error: Exception) -> str:
    """Return a message if the error means that other ranks are lost, else an empty string."""
    import torch.distributed as dist

    reason = re.sub(r"^\[[^]]*\] *", "", next(iter(str(error).splitlines()), ""))
    is_lost = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))
    if not is_lost and not (isinstance(error, RuntimeError) and _LOST_RANK.search(str(error))):
        return ""
    return f"lost the other ranks ({reason})"


def _print_error(message: str) -> None:
    """Print with one write, so that the lines of several ranks do not mix."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
