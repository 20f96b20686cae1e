"""Real process groups for tests: ``run(n, function, ...)`` on n ranks over gloo.

Ranks are forked from a server that has imported torch and the trainer once, so a world costs a
fraction of a second.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import multiprocessing
import os
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.support.crashed import crashed, warn_of
from tests.support.ports import find_free_port
from tests.support.programs import LIMIT_S

METHOD = "forkserver"  # or "fork", in a process that has imported what the ranks need
PRELOAD = [
    "torch",
    "torch.optim.adamw",
    "transformers.models.llama.modeling_llama",
    "reshard.dcp",
    "trainer.checkpoint.fsdp",
    "trainer.session",
]


class CrashError(AssertionError):
    """A rank crashed; see `tests.support.crashed`."""


def run(world, function, *args):
    """Return what ``function(ranks, *args)`` returns on each rank, in rank order.

    Raises:
        AssertionError: with the traceback of the first rank that failed.
    """
    return _fork_again(world, _in_group, function, *args)


def run_in_turn(enter, jobs):
    """Return what rank 0 returns in each job (ranks, function, ...), one after the other.

    All are forked from a process that called ``enter``, which imports what they need once.
    """
    return _fork_again(1, _in_turn, enter, jobs)[0]


def command(world, arguments):
    """Run ``python -m trainer`` with these arguments on ranks that a launcher started.

    Returns:
        What rank 0 printed.
    """
    codes_and_texts = _fork_again(world, _main, arguments)
    assert [code for code, _ in codes_and_texts] == [0] * world, codes_and_texts
    return codes_and_texts[0][1]


def _fork_again(world, *job, undo=lambda: None):
    """Call `_fork`, once more where a rank crashed, after ``undo``."""
    try:
        return _fork(world, *job)
    except CrashError as error:
        warn_of(f"done once more: {error}")
        undo()
        return _fork(world, *job)


def _make_context():
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(PRELOAD)
    return context


def _fork(world, function, *args):
    context, port = _make_context(), find_free_port()
    pipes, processes = [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(there, rank, world, port, function, args))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    results = [_receive(pipe) for pipe in pipes]
    for process in processes:
        process.join(30)
    failed = [text for ok, text in results if not ok]
    ends = [process.exitcode for process in processes]
    if crashed(ends):
        raise CrashError(f"ranks ended with {ends}: {failed}")
    # A rank that lost the others only says so; show the one that knows why.
    failed.sort(key=lambda text: "Connection" in text or "gloo" in text)
    assert not failed, failed[0]
    return [value for _, value in results]


def _receive(pipe):
    try:
        return pipe.recv()
    except EOFError:
        return False, "the rank died"


def _rank(pipe, rank, world, port, function, args):
    gc.freeze()  # what was imported before the fork stays until the end
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        pipe.send((True, function(*args)))
    except BaseException:  # noqa: BLE001
        pipe.send((False, traceback.format_exc()))
    pipe.close()


def _in_turn(enter, jobs):
    global METHOD  # noqa: PLW0603 - of this process alone
    METHOD = "fork"
    enter()
    return [run(*job)[0] for job in jobs]


def _in_group(function, *args):
    from trainer.process_group import join_process_group

    with join_process_group("cpu", LIMIT_S, 1) as ranks:
        return function(ranks, *args)


def _main(arguments):
    from trainer.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(
        printed
    ):  # a rank that fails ends at once: let its message through
        code = main(arguments)
    return code, printed.getvalue()


@dataclass
class Trained:
    """What a run logged: hex losses, hex norms and scales by step, and the final hash."""

    losses: list
    norms: list
    scales: list
    skipped: list
    digest: str

    def __add__(self, later):
        """Return the same run in two parts."""
        return Trained(
            self.losses + later.losses,
            self.norms + later.norms,
            self.scales + later.scales,
            self.skipped + later.skipped,
            later.digest,
        )

    def values(self):
        return [float.fromhex(loss) for loss in self.losses]


def train_on(world, jobs):
    """Run `train` on so many ranks; return what each logged."""
    made = [path for job in jobs for path in _written(job) if not path.exists()]

    def remove():
        for path in made:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    return _fork_again(world, _in_group, train, jobs, undo=remove)


def _written(job):
    return [Path(job[name]) for name in ("save", "log") if name in job]


def train(ranks, jobs):
    """Run several trainings, each a dict of chosen settings, one after the other.

    A run with ``is_saved=False`` writes no checkpoint, which would take a fifth of its time.
    """
    return [_train(ranks, dict(job)) for job in jobs]


def try_to_train(ranks, jobs):
    """Return what each training logged, or the exit code and message of its error."""
    from trainer.core.errors import TrainerError

    found = []
    for job in jobs:
        try:
            found += train(ranks, [job])
        except TrainerError as error:
            found.append((error.exit_code, str(error)))
    return found


def _train(ranks, chosen):
    from torch.distributed import barrier

    from trainer import session
    from trainer.checkpoint import state
    from trainer.resolve import resolve

    is_saved = chosen.pop("is_saved", True)
    if "resume" in chosen:
        chosen = {**state.read_inherited(chosen["resume"], chosen.get("tag")), **chosen}
    settings = resolve({"progress": False, **chosen}, ranks.world)
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(Path(os.devnull).open("w"))
        stack.enter_context(contextlib.redirect_stdout(nothing))
        if not is_saved:
            saves = contextlib.nullcontext(lambda _contents: None)
            stack.enter_context(mock.patch.object(session, "open_saves", return_value=saves))
            stack.enter_context(mock.patch.object(session.saving, "collect"))
        session.run(settings, ranks)
    barrier()
    return read_log(Path(settings.log))


def read_log(path):
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    return Trained(
        [line["loss_hex"] for line in steps],
        [line["grad_norm_hex"] for line in steps],
        [line["loss_scale"] for line in steps],
        [line["skipped"] for line in steps],
        lines[-1].get("parameter_hash"),
    )


def trained(jobs):
    """Run jobs by key, each (ranks, settings), with one start for each number of ranks."""
    found = {}
    for world in sorted({world for world, _ in jobs.values()}):
        mine = {key: job for key, (ranks, job) in jobs.items() if ranks == world}
        everyone = train_on(world, list(mine.values()))
        found |= dict(zip(mine, everyone[0], strict=True))
    return found
