"""The process that imports DeepSpeed once and forks a fresh set of ranks for every job.

Importing torch, transformers and DeepSpeed takes many seconds; a fork takes none and shares no
state afterwards, so cases can neither slow nor poison each other. Started by ``deepspeed_judge`` as
``python -m tests.judges.deepspeed_worker JOBS.json``; prints one JSON line per finished job.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

import deepspeed

from tests.judges import deepspeed_refused, deepspeed_train, deepspeed_trainers
from tests.judges.deepspeed_cases import CASES

KINDS = {
    "train": deepspeed_train.make,
    "moe": deepspeed_refused.make_moe,
    "pipeline": deepspeed_refused.make_pipeline,
    "trainer": deepspeed_trainers.make_trainer,
    "accelerate": deepspeed_trainers.make_accelerate,
}
POLL_SECONDS = 0.02
PRELOADED = (
    "deepspeed.runtime.zero.muon.muon_optimizer",  # pulls in torch._inductor, seconds of import
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.moe.layer",
    "deepspeed.pipe",
    "deepspeed.checkpoint.ds_to_universal",
    "accelerate",
    "transformers.trainer",
    "transformers.integrations.deepspeed",
)
"""What DeepSpeed would import late, once in every rank; here it is imported before the forks."""


@dataclass
class Job:
    """One process group's work, as the judge asked for it."""

    case: str
    world: int
    out: str
    log: str
    limit_s: float
    load: str | None = None
    steps: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    started: float = 0.0

    def rank_log(self, rank: int) -> Path:
        """Where a rank's stdout and stderr go."""
        return Path(f"{self.log}.rank{rank}.log")


def work(job: Job, rank: int) -> None:
    """A rank's life between fork and exit."""
    case, out = CASES[job.case], Path(job.out)
    deepspeed_train.start_rank(rank, job.world, out / ".rendezvous")
    if job.load is not None:
        deepspeed_train.load(case, Path(job.load), job.steps, out)
    else:
        KINDS[case.kind](case, out)


def fork_rank(job: Job, rank: int) -> int:
    """Fork one rank with its output in its own file; returns the child's id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become_rank(job, rank)
    return pid


def _become_rank(job: Job, rank: int) -> NoReturn:
    """Never returns: a forked rank must not run the parent's exit handlers."""
    log = os.open(job.rank_log(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    code = 0
    try:
        work(job, rank)
    except deepspeed_train.CaseSkipped as skip:
        Path(job.out, "skipped.txt").write_text(str(skip))
        code = deepspeed_train.SKIPPED_EXIT
    except BaseException:  # noqa: BLE001 - the traceback is the report; the exit code carries the failure
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start(job: Job) -> None:
    """Fork all ranks of a job."""
    Path(job.out, ".rendezvous").unlink(missing_ok=True)
    job.started = time.monotonic()
    job.pids = {fork_rank(job, rank): rank for rank in range(job.world)}


def poll(job: Job) -> bool:
    """Collect finished ranks; one failure or the time limit ends the others. True when over."""
    for pid, rank in job.pids.items():
        if rank not in job.exits:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                job.exits[rank] = os.waitstatus_to_exitcode(status)
    late = time.monotonic() - job.started > job.limit_s
    if late or any(job.exits.values()):
        end(job, "time limit" if late else "another rank failed")
    return len(job.exits) == job.world


def end(job: Job, why: str) -> None:
    """Kill the ranks that still run; without their peers they would hang in a collective.

    Each first writes where it stands to its log.
    """
    hanging = [pid for pid, rank in job.pids.items() if rank not in job.exits]
    for pid in hanging:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(POLL_SECONDS * 10 if hanging else 0)
    for pid, rank in job.pids.items():
        if rank not in job.exits:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            job.exits[rank] = -9
            with job.rank_log(rank).open("a") as log:
                log.write(f"\n[judge] killed: {why}\n")


def report(job: Job) -> dict[str, Any]:
    """What the judge is told."""
    return {
        "case": job.case,
        "out": job.out,
        "log": job.log,
        "exits": [job.exits[rank] for rank in range(job.world)],
        "seconds": round(time.monotonic() - job.started, 2),
    }


def serve(jobs: list[Job], ranks_at_once: int, reports: TextIO) -> None:
    """Run jobs in order, as many side by side as fit; one job may always run."""
    parent, waiting = os.getppid(), list(jobs)
    running: list[Job] = []
    while waiting or running:
        if os.getppid() != parent:
            for job in running:
                end(job, "the judge is gone")
            sys.exit("the judge is gone")
        while waiting and (
            not running or sum(j.world for j in [*running, waiting[0]]) <= ranks_at_once
        ):
            running.append(waiting.pop(0))
            start(running[-1])
        for job in [job for job in running if poll(job)]:
            running.remove(job)
            print(json.dumps(report(job)), file=reports, flush=True)
        time.sleep(POLL_SECONDS)


def preload() -> None:
    """Import everything once, and keep it out of the ranks' garbage collections.

    DeepSpeed's shared-memory collectives are left out: they need a compiler, and they spin, which
    is slow with few cores. Asking which ops can be built runs a compiler, so it is asked here.
    """
    for module in PRELOADED:
        importlib.import_module(module)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    gc.freeze()


def main() -> None:
    """Serve the jobs. Compilers and DeepSpeed print, so stdout is kept apart for the reports."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    jobs = [Job(**job) for job in spec["jobs"]]
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    preload()
    if any(CASES[job.case].nvme for job in jobs):
        deepspeed_train.load_aio(compile_it=spec["compile_aio"])
    serve(jobs, spec["ranks_at_once"], reports)


if __name__ == "__main__":
    main()
