"""The worker side: one process imports a framework once, and forks itself into the ranks.

Importing torch and a framework takes many seconds; a fork takes none and shares no state
afterwards, so cases can neither slow nor poison each other. A worker module gives ``serve`` its own
part; the ``server`` side starts it as ``python -m <module> JOBS`` and reads a line of JSON a job.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import io
import json
import logging
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import TCPStore

RANKS_AT_ONCE = 4
RESULT = "found.pt"
POLL_SECONDS = 0.01
GC_THRESHOLD = 100_000  # objects; Python's 700 cost a short life of a rank more time than they free
STACKS_SECONDS = 0.2  # what a rank gets to write where it stands


@dataclass(frozen=True)
class Job:
    """One case to make; ``told`` is what one framework's judge tells its worker beside it."""

    case: str
    world: int
    out: Path
    logs: Path
    limit_s: float
    told: dict[str, Any] = field(default_factory=dict)

    def log(self, rank: int) -> Path:
        """Return the path of a rank's stdout and stderr."""
        return self.logs / f"{self.case}.rank{rank}.log"

    @property
    def result(self) -> Path:
        """Return the path where rank 0 saves the results."""
        return self.out / RESULT

    def mark(self, rank: int) -> Path:
        """Return the path of a file that exists when the rank is done."""
        return self.out / f".rank{rank}"


@dataclass(frozen=True)
class Report:
    """How a job ended; ``missing`` says why it was not begun."""

    case: str
    exits: list[int] = field(default_factory=list)
    seconds: float = 0.0
    missing: str | None = None


Work = Callable[[Job, int], None]
Prepare = Callable[[list[Job]], dict[str, str]]


@dataclass
class Crew:
    """The ranks of one fork, with the jobs that they do one after the other."""

    jobs: list[Job]
    world: int
    pids: dict[int, int] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    since: float = 0.0

    def finished(self) -> bool:
        """Return whether all ranks have done the first job."""
        return bool(self.jobs) and all(self.jobs[0].mark(r).exists() for r in range(self.world))

    def report(self, exits: dict[int, int]) -> Report:
        """Return the report of the first job, and remove the job from the list."""
        job, now = self.jobs.pop(0), time.monotonic()
        seconds, self.since = round(now - self.since, 2), now
        return Report(job.case, [exits.get(rank, 0) for rank in range(self.world)], seconds)


def join_group(job: Job, rank: int) -> None:
    """Join the job's process group, with the environment that a launcher would give."""
    import torch
    import torch.distributed as dist

    from tests.judges.device import DEVICE, IS_GPU

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0" if IS_GPU else str(rank),
        "WORLD_SIZE": str(job.world),
        "LOCAL_WORLD_SIZE": str(job.world),
    }
    torch.set_num_threads(1)
    if IS_GPU:
        torch.cuda.set_device(DEVICE)
    timeout = timedelta(seconds=job.limit_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if IS_GPU and job.world == 1 else "gloo",
        store=dist.PrefixStore(str(job.out), _open_store(timeout)),
        rank=rank,
        world_size=job.world,
        timeout=timeout,
    )


@functools.cache
def serve_store() -> int:
    """Start the store in which all ranks of this process meet, and return its port.

    Megatron and DeepSpeed make a dozen groups, each of which costs 30 ms with a store in a file.
    The store has a process of its own, because it has a thread, and a fork of a process with
    threads may wait forever for a lock. It ends with this process and its ranks.
    """
    from torch.distributed import TCPStore

    port, send = os.pipe()
    alive, _held_open = os.pipe()
    if os.fork() == 0:
        os.close(_held_open)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(send, str(store.port).encode())
        os.close(send)
        os.read(alive, 1)  # returns when no process is left that has the other end
        os._exit(0)
    os.close(send)
    with os.fdopen(port) as answer:
        return int(answer.read())


def _open_store(timeout: timedelta) -> TCPStore:
    """Connect to the store of the process from which this rank was forked."""
    from torch.distributed import TCPStore

    port = serve_store()
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)


def import_all(modules: Iterable[str]) -> dict[str, str]:
    """Import once what a framework would import late, in every rank; no case is missing for it."""
    for module in modules:
        importlib.import_module(module)
    return {}


def mean_over_ranks(loss: Tensor, world: int) -> float:
    """Return the mean of all ranks' losses, summed in float64."""
    from torch import distributed

    total = loss.detach().double()
    if world > 1:
        distributed.all_reduce(total)
    return float(total) / world


def average_gradient(world: int, parameter: Tensor) -> None:
    """Average the gradient of a parameter that FSDP does not reduce."""
    from torch import distributed

    distributed.all_reduce(parameter.grad)
    parameter.grad /= world


def gather_states(own: Any) -> list[Any]:
    """Return the states of all ranks on rank 0, and an empty list on the others.

    ``torch.save`` writes all tensors at once. ``gather_object`` alone pickles each by itself, which
    takes three times as long.
    """
    import torch
    from torch import distributed

    saved = io.BytesIO()
    torch.save(own, saved)
    first = distributed.get_rank() == 0
    of_ranks: list[Any] | None = [None] * distributed.get_world_size() if first else None
    distributed.gather_object(saved.getvalue(), of_ranks)
    return [torch.load(io.BytesIO(each), weights_only=False) for each in of_ranks or ()]


def record_warnings() -> list[str]:
    """Return a list to which every later warning in reshard's log is added."""
    messages: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("reshard").addHandler(Recorder(logging.WARNING))
    return messages


def run_in_turn(ranks: Any, jobs: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    """Run (name, function, arguments) one after the other; return name -> result.

    A job that raises has in its place the traceback, the text and the type of every rank's error.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    warnings.simplefilter("ignore")  # FSDP1 and DDP warn that they are deprecated
    found: dict[str, Any] = {}
    for name, function, *arguments in jobs:
        try:
            found[name] = function(ranks, *arguments)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - the result tells it
            reasons = getattr(error, "failures", {ranks.rank: (error, None)})
            known = {rank: type(reason).__name__ for rank, (reason, _) in reasons.items()}
            found[name] = {"raised": known, "text": str(error), "at": traceback.format_exc()}
    return found


def serve(work: Work, prepare: Prepare | Iterable[str], *, keep_ranks: bool = False) -> None:
    """Do the jobs of the file that the command line names, and print a report as each ends.

    Args:
        work: a rank's life: it makes the job, all ranks of which end together.
        prepare: the modules that are imported once, before the forks; or what is done there, which
            returns case -> why it cannot be made here.
        keep_ranks: the same ranks make all cases of a world size. Their caches then serve case
            after case, but the framework must leave a process as it found it.
    """
    jobs: list[Job] = pickle.loads(Path(sys.argv[1]).read_bytes())
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers and frameworks print: stdout is kept apart for the reports
    gc.disable()  # it would look through all that is imported again and again
    missing = prepare(jobs) if callable(prepare) else import_all(prepare)
    _vary_runs()
    serve_store()
    gc.freeze()
    gc.enable()
    gc.set_threshold(GC_THRESHOLD)
    for job in jobs:
        if job.case in missing:
            _tell(Report(job.case, missing=missing[job.case]), reports)
    ready = [job for job in jobs if job.case not in missing]
    crews = [Crew([job], job.world) for job in ready]
    if keep_ranks:
        worlds = sorted({job.world for job in ready}, reverse=True)
        crews = [Crew([job for job in ready if job.world == w], w) for w in worlds]
    _run(crews, work, reports)


def _vary_runs() -> None:
    """Make another run of the same cases, where the environment asks for one.

    ``JUDGE_SEED_SHIFT`` is added to every seed, ``JUDGE_MORE_STEPS`` to the number of steps before
    the save. What comes out has the same files as the case itself, with other values in them.
    """
    shift = int(os.environ.get("JUDGE_SEED_SHIFT", "0"))
    more = int(os.environ.get("JUDGE_MORE_STEPS", "0"))
    if shift:
        import torch

        seed = torch.manual_seed
        torch.manual_seed = lambda number: seed(number + shift)
    if more:
        ours = [module for name, module in sys.modules.items() if name.startswith("tests.judges.")]
        for module in [*ours, sys.modules["__main__"]]:
            if isinstance(getattr(module, "STEPS", None), int):
                module.STEPS += more
        for cases in {id(m.CASES): m.CASES for m in ours if hasattr(m, "CASES")}.values():
            later = {n: replace(c, steps=c.steps + more) for n, c in cases.items() if _counts(c)}
            cases.update(later)


def _counts(case: Any) -> bool:
    return is_dataclass(case) and isinstance(getattr(case, "steps", None), int)


def _run(crews: list[Crew], work: Work, reports: TextIO) -> None:
    """Run crews in order, as many side by side as fit; one may always run."""
    parent, running = os.getppid(), list[Crew]()
    while crews or running:
        if os.getppid() != parent:
            for crew in running:
                _end(crew, "the judge is gone")
            sys.exit("the judge is gone")
        while crews and (
            not running or sum(c.world for c in [*running, crews[0]]) <= RANKS_AT_ONCE
        ):
            running.append(crews.pop(0))
            _start(running[-1], work)
        running = [crew for crew in running if not _poll(crew, work, reports)]
        time.sleep(POLL_SECONDS)


def _tell(report: Report, reports: TextIO) -> None:
    print(json.dumps(asdict(report)), file=reports, flush=True)


def _start(crew: Crew, work: Work) -> None:
    """Fork all ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    crew.pids, crew.exits, crew.since = {}, {}, time.monotonic()
    for rank in range(crew.world):
        pid = os.fork()
        if pid == 0:
            _become_rank(crew, rank, work)
        crew.pids[rank] = pid


def _become_rank(crew: Crew, rank: int, work: Work) -> NoReturn:
    """Run one rank; never return, so that it does not run the parent's exit handlers."""
    code = 0
    try:
        for job in crew.jobs:
            log = os.open(job.log(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            faulthandler.register(signal.SIGUSR1)
            work(job, rank)
            sys.stdout.flush()
            job.mark(rank).touch()
    except BaseException:  # noqa: BLE001 - the traceback is the report; the exit code carries the failure
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _poll(crew: Crew, work: Work, reports: TextIO) -> bool:
    """Report what is finished; True when the crew is done.

    One rank's failure or the time limit ends the others. The job is given up, the rest begun anew.
    """
    for rank, pid in crew.pids.items():
        if rank not in crew.exits:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                crew.exits[rank] = os.waitstatus_to_exitcode(status)
    while crew.finished():
        _tell(crew.report({}), reports)
    if not crew.jobs:
        return len(crew.exits) == crew.world
    late = time.monotonic() - crew.since > crew.jobs[0].limit_s
    if late or any(crew.exits.values()):
        _end(crew, "time limit" if late else "another rank failed")
        _tell(crew.report(crew.exits), reports)
        if not crew.jobs:
            return True
        _start(crew, work)
    return False


def _end(crew: Crew, why: str) -> None:
    """Kill the ranks that still run; without their peers they would hang in a collective.

    Each first writes where it stands to its log.
    """
    hanging = [rank for rank in crew.pids if rank not in crew.exits]
    for rank in hanging:
        os.kill(crew.pids[rank], signal.SIGUSR1)
    time.sleep(STACKS_SECONDS if hanging else 0)
    for rank in hanging:
        os.kill(crew.pids[rank], signal.SIGKILL)
        os.waitpid(crew.pids[rank], 0)
        crew.exits[rank] = -signal.SIGKILL
        if crew.jobs:
            with crew.jobs[0].log(rank).open("a") as log:
                log.write(f"\n[judge] killed: {why}\n")
