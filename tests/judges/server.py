"""The test side: a judge lets one worker process make cases, and moves each to its place.

Neither this module nor a judge imports a framework; the worker process does (see ``ranks``).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.judges.device import IS_GPU
from tests.judges.ranks import RESULT, Job, Report
from tests.support import forked
from tests.support.crashed import crashed, warn_of
from tests.support.programs import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED = "tests.judges.deepspeed_worker"
EXPECTED = "expected.pt"  # the state that a judge records beside a checkpoint
LOG_TAIL = 3000
NOT_HERE = "not_made.json"
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
SETTINGS = ("ACCELERATE_", "FSDP_", "LIGHTNING_", "PL_")


class JudgeError(Exception):
    """A real framework failed; the message carries the tails of its logs."""


class Missing(str):
    """What a job needs that is not here."""

    __slots__ = ()


@dataclass(frozen=True)
class CaseResult:
    """Where one case lies; ``missing`` says what it needs that is not here, if it is not there."""

    case: Any
    path: Path
    seconds: float
    missing: str | None = None


@dataclass(frozen=True)
class Judge:
    """How one framework is asked.

    Attributes:
        worker: the module that imports it and forks its ranks.
        name: of the framework, in messages.
        cases: its table.
        limit_s: the seconds that one case may take.
        like: a module of a worker. One process calls its ``preload`` once, and is forked for the
            workers of all judges that name it; without, each starts a Python of its own.
        result: the file in which rank 0 saves what the live objects held.
    """

    worker: str
    name: str
    cases: Mapping[str, Any]
    limit_s: float = LIMIT_S
    like: str = ""
    result: str = RESULT

    def make(
        self, out: Path, names: Iterable[str], *, start_s: float = LIMIT_S, **told: Any
    ) -> dict[str, CaseResult]:
        """Make the named cases; each is renamed into place as soon as it is finished.

        A case that needs what is not here is in the result with the reason, which
        ``out/not_made.json`` keeps. Raises JudgeError after the last case if any failed; the others
        are then in place all the same.
        """
        work = out / ".making"
        shutil.rmtree(work, ignore_errors=True)
        jobs = {name: self.job(name, work / name, out / ".logs", **told) for name in names}
        results, failures = {}, []
        for report in self._asked(list(jobs.values()), start_s):
            job, target = jobs[report.case], out / report.case
            if any(report.exits):
                failures.append(self.failure(job, report))
                continue
            case = self.cases[job.case]
            results[job.case] = CaseResult(case, target, report.seconds, report.missing)
            if report.missing is None:
                _place(job.out, target)
        shutil.rmtree(work, ignore_errors=True)
        _note_missing(out / NOT_HERE, results)
        if failures:
            raise JudgeError("\n\n".join(failures))
        return results

    def job(self, name: str, out: Path, logs: Path, world: int | None = None, **told: Any) -> Job:
        """Return the order for the worker, after making its directories."""
        out.mkdir(parents=True)
        logs.mkdir(parents=True, exist_ok=True)
        world = self.cases[name].world if world is None else world
        return Job(name, world, out.resolve(), logs.resolve(), self.limit_s, told)

    def ask(self, jobs: Sequence[Job], start_s: float = LIMIT_S) -> Iterator[Report]:
        """Have one worker process do the jobs; yields its reports as they come.

        It may take ``start_s`` for its imports and every job its limit; the ranks of a job that is
        late end earlier, in the worker.
        """
        with tempfile.TemporaryDirectory(prefix="judge-") as scratch:
            asked, log = Path(scratch, "jobs"), Path(scratch, "worker.log")
            asked.write_bytes(pickle.dumps(jobs))
            with log.open("w") as stderr:
                python = fork_python(self.like) if self.like else [sys.executable]
                worker = subprocess.Popen(
                    [*python, "-m", self.worker, str(asked)],
                    cwd=ROOT,
                    env=_environment(scratch),
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    start_new_session=True,
                )
            limit_s = start_s + sum(job.limit_s for job in jobs)
            watchdog = threading.Timer(limit_s, _kill_session, [worker])
            watchdog.start()
            seen = 0
            try:
                assert worker.stdout is not None
                for line in worker.stdout:
                    seen += 1
                    yield Report(**json.loads(line))
                if worker.wait() != 0 or seen != len(jobs):
                    ended = f"the {self.name} worker ended with {worker.returncode}"
                    raise JudgeError(f"{ended} after {seen} of {len(jobs)} jobs:\n{_tail(log)}")
            finally:
                watchdog.cancel()
                _kill_session(worker)

    def run(self, place: Path, jobs: Mapping[str, tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        """Do jobs, each (ranks, what the worker is told), in directories of ``place``.

        Returns:
            Job -> what its rank 0 saved as its result, or the text of its failure; `Missing` if it
            needs what is not here. The other files of a job are in ``place / name``.
        """
        import torch

        made = {
            name: self.job(name, place / name, place / "logs", world, **told)
            for name, (world, told) in jobs.items()
        }
        found: dict[str, Any] = {}
        for report in self._asked(list(made.values()), LIMIT_S):
            job = made[report.case]
            if report.missing is not None:
                found[report.case] = Missing(report.missing)
                continue
            failed = any(report.exits)
            found[report.case] = (
                self.failure(job, report)
                if failed
                else torch.load(job.out / self.result, weights_only=False)
            )
        return found

    def _asked(self, jobs: Sequence[Job], start_s: float) -> Iterator[Report]:
        """Ask like `ask`; repeat a job whose ranks crashed once, with a warning."""
        by_case, again = {job.case: job for job in jobs}, []
        for report in self.ask(jobs, start_s):
            if not crashed(report.exits):
                yield report
                continue
            job = by_case[report.case]
            warn_of(f"done once more: {self.failure(job, report)}")
            shutil.rmtree(job.out)
            job.out.mkdir()
            again.append(job)
        if again:
            yield from self.ask(again, start_s)

    def failure(self, job: Job, report: Report) -> str:
        """Return the message for a job that was not done."""
        tails = [
            f"--- rank {rank} (exit {code})\n{_tail(job.log(rank))}"
            for rank, code in enumerate(report.exits)
            if code != 0
        ]
        return "\n".join([f"{self.name} case {job.case} failed", *tails])


@functools.cache
def start_fork_server(module: str) -> str:
    """Start a process that has imported a worker's part, once; return its socket's path.

    See `forked`.
    """
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    home = stack.enter_context(tempfile.TemporaryDirectory(prefix="judges-"))
    return stack.enter_context(forked.serving([module], _environment(home)))


def fork_python(module: str) -> list[str]:
    """Return what stands for ``python`` in forks of the process of `start_fork_server`."""
    return forked.build_command(start_fork_server(module), 0)


def _environment(home: str) -> dict[str, str]:
    """Return a worker's variables: one thread a rank, nothing of a launcher or of a user.

    GPUs are hidden, because telling accelerate to use the CPU would make it forget DeepSpeed; with
    ``JUDGE_DEVICE=cuda`` they are counted without CUDA, which does not work in a fork otherwise.
    """
    if IS_GPU:
        device = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "DS_ACCELERATOR": "cuda"}
    else:
        device = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHERS}
    kept = {k: v for k, v in kept.items() if not k.startswith(SETTINGS)}
    return {
        **kept,
        **device,
        "PYTHONHASHSEED": "0",  # DeepSpeed puts groups of experts into the order of a set
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HOME": home,
        "HF_HUB_OFFLINE": "1",
        # Never connected to, as the rendezvous is a file; DeepSpeed would look for MPI without.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _kill_session(worker: subprocess.Popen[str]) -> None:
    """End the worker and whatever ranks it has; it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    if worker.stdout is not None:
        worker.stdout.close()


def _place(made: Path, target: Path) -> None:
    """Rename a finished case into place, without what only its making needed."""
    for used in made.glob(".*"):
        shutil.rmtree(used) if used.is_dir() else used.unlink()
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)


def _note_missing(path: Path, results: dict[str, CaseResult]) -> None:
    """Write why cases are missing, and keep what an earlier call wrote of others."""
    known = json.loads(path.read_text()) if path.exists() else {}
    for name, result in results.items():
        known.pop(name, None)
        if result.missing:
            known[name] = result.missing
    if known or path.exists():
        path.write_text(json.dumps(known, indent=1))


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:] if log.exists() else f"(no {log})"


def main(make_all: Callable[..., dict[str, CaseResult]]) -> None:
    """Make cases from the command line and say what was made, and what not."""
    if len(sys.argv) < 2:
        spec = sys.modules["__main__"].__spec__
        sys.exit(f"usage: python -m {spec and spec.name} OUT [case ...]")
    started = time.monotonic()
    results = make_all(Path(sys.argv[1]), sys.argv[2:] or None)
    for name, result in results.items():
        where = f"NOT MADE: {result.missing}" if result.missing else result.path
        print(f"{name:40} {result.seconds:6.1f} s  {where}")  # noqa: T201
    print(f"{len(results)} cases in {time.monotonic() - started:.0f} s")  # noqa: T201
