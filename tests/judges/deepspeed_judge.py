"""Make checkpoints with real DeepSpeed, and resume from them with real DeepSpeed.

``make_all(out)`` gives a directory per case::

    out/<case>/run/            what DeepSpeed saved (``latest`` and the tag directory)
    out/<case>/universal/      for some: DeepSpeed's own universal conversion of it
    out/<case>/reference.pt    what the live engine held, see ``deepspeed_train.describe``

or ``python -m tests.judges.deepspeed_judge OUT [case ...]``. This module imports neither torch nor
DeepSpeed; one worker process does, and forks the ranks (see ``deepspeed_worker``).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.judges.deepspeed_cases import CASES, Case

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
SKIPPED_EXIT = 77
CASE_LIMIT_S = 120.0
START_LIMIT_S = 120.0
COMPILE_LIMIT_S = 1200.0
RANKS_AT_ONCE = 4
LOG_TAIL = 3000


class JudgeError(Exception):
    """Real DeepSpeed failed; the message carries the tails of its logs."""


@dataclass(frozen=True)
class CaseResult:
    """Where one case lies; ``skipped`` says why an optional one could not be made here."""

    case: Case
    path: Path
    seconds: float
    skipped: str | None = None

    @property
    def run(self) -> Path:
        """What the user would pass to reshard."""
        return self.path / "run"

    def reference(self) -> dict[str, Any]:
        """The truth from the live engine."""
        return _load(self.path / "reference.pt")


def make_all(out: Path, names: Iterable[str] | None = None) -> dict[str, CaseResult]:
    """Make the named cases, or all; each is renamed into place as soon as it is finished.

    Raises JudgeError after the last one if any failed; the others are then in place all the same.
    Disk offload needs a compiled op: it is compiled, for minutes, only for cases asked for by name.
    """
    chosen = [CASES[name] for name in (CASES if names is None else names)]
    work = out / ".making"
    shutil.rmtree(work, ignore_errors=True)
    jobs = [_job(case, case.world, work / case.name, out / ".logs") for case in chosen]
    results, failures = {}, []
    for report in _serve(jobs, compile_aio=names is not None):
        case = CASES[report["case"]]
        if set(report["exits"]) <= {0, SKIPPED_EXIT}:
            results[case.name] = _place(case, Path(report["out"]), out / case.name, report)
        else:
            failures.append(_failure(report))
    shutil.rmtree(work, ignore_errors=True)
    if failures:
        raise JudgeError("\n\n".join(failures))
    return results


def deepspeed_load(
    run_dir: Path, case: str, world_size: int, steps: int
) -> tuple[list[float], dict[str, Any]]:
    """Resume ``run_dir`` with real DeepSpeed under the case's config and train ``steps`` more.

    Returns the losses (compare with ``reference["next"]["losses"]``) and a dict: ``loaded``, a
    reference as of right after loading, and ``params``, the fp32 parameters after the last step.
    """
    with tempfile.TemporaryDirectory(prefix="deepspeed_load-") as scratch:
        job = _job(CASES[case], world_size, Path(scratch, "out"), Path(scratch))
        job |= {"load": str(run_dir.resolve()), "steps": steps}
        for report in _serve([job]):
            if any(report["exits"]):
                raise JudgeError(_failure(report))
        found = _load(Path(scratch, "out", "reference.pt"))
    return found.pop("losses"), found


def _job(case: Case, world: int, out: Path, logs: Path) -> dict[str, Any]:
    """What the worker is told; its directories are made here."""
    out.mkdir(parents=True)
    logs.mkdir(parents=True, exist_ok=True)
    log = str(logs.resolve() / case.name)
    return {
        "case": case.name,
        "world": world,
        "out": str(out.resolve()),
        "log": log,
        "limit_s": CASE_LIMIT_S,
    }


def _serve(jobs: Sequence[dict[str, Any]], *, compile_aio: bool = True) -> Iterator[dict[str, Any]]:
    """Run the jobs in one worker process; yields its reports as they come."""
    with tempfile.TemporaryDirectory(prefix="deepspeed_judge-") as scratch:
        spec, log = Path(scratch, "jobs.json"), Path(scratch, "worker.log")
        spec.write_text(
            json.dumps({"ranks_at_once": RANKS_AT_ONCE, "compile_aio": compile_aio, "jobs": jobs})
        )
        with log.open("w") as stderr:
            worker = subprocess.Popen(
                [sys.executable, "-m", "tests.judges.deepspeed_worker", str(spec)],
                cwd=ROOT,
                env=_environment(),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        watchdog = threading.Timer(_limit_s(jobs), _kill_session, [worker])
        watchdog.start()
        try:
            yield from _reports(worker, len(jobs), log)
        finally:
            watchdog.cancel()
            _kill_session(worker)


def _reports(worker: subprocess.Popen[str], expected: int, log: Path) -> Iterator[dict[str, Any]]:
    if worker.stdout is None:
        raise AssertionError("the worker was started with a pipe")
    seen = 0
    for line in worker.stdout:
        seen += 1
        yield json.loads(line)
    if worker.wait() != 0 or seen != expected:
        ended = f"the DeepSpeed worker ended with {worker.returncode}"
        raise JudgeError(f"{ended} after {seen} of {expected} jobs:\n{_tail(log)}")


def _limit_s(jobs: Sequence[dict[str, Any]]) -> float:
    """A wall-clock bound on everything; each job has its own, tighter one inside the worker."""
    disk = any(CASES[job["case"]].nvme for job in jobs)
    return START_LIMIT_S + disk * COMPILE_LIMIT_S + sum(float(job["limit_s"]) for job in jobs)


def _kill_session(worker: subprocess.Popen[str]) -> None:
    """End the worker and whatever ranks it has; it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    if worker.stdout is not None:
        worker.stdout.close()


def _environment() -> dict[str, str]:
    """CPU, one thread a rank; no rank leaks in from a surrounding launcher.

    GPUs are hidden, because telling accelerate to use the CPU would make it forget DeepSpeed.
    """
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_CPU")
    kept = {k: v for k, v in os.environ.items() if k not in launcher}
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Never connected to, as the rendezvous is a file; DeepSpeed would look for MPI without.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _place(case: Case, made: Path, target: Path, report: dict[str, Any]) -> CaseResult:
    """Rename a finished case into place, or say loudly why an optional one is not there."""
    seconds = float(report["seconds"])
    shutil.rmtree(target, ignore_errors=True)
    if SKIPPED_EXIT in report["exits"]:
        reason = (made / "skipped.txt").read_text()
        print(f"DeepSpeed case {case.name} SKIPPED: {reason}", file=sys.stderr)  # noqa: T201
        return CaseResult(case, target, seconds, reason)
    shutil.rmtree(made / "swap", ignore_errors=True)
    (made / ".rendezvous").unlink(missing_ok=True)
    made.rename(target)
    return CaseResult(case, target, seconds)


def _failure(report: dict[str, Any]) -> str:
    tails = [
        f"--- rank {rank} (exit {code})\n{_tail(Path(report['log'] + f'.rank{rank}.log'))}"
        for rank, code in enumerate(report["exits"])
        if code != 0
    ]
    return "\n".join([f"DeepSpeed case {report['case']} failed", *tails])


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:] if log.exists() else f"(no {log})"


def _load(path: Path) -> dict[str, Any]:
    import torch

    loaded: dict[str, Any] = torch.load(path, weights_only=False)
    return loaded


def main() -> None:
    """Make cases from the command line and say what was made."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tests.judges.deepspeed_judge OUT [case ...]")
    started = time.monotonic()
    results = make_all(Path(sys.argv[1]), sys.argv[2:] or None)
    for name, result in results.items():
        print(f"{name:32} {result.seconds:6.1f} s  {result.skipped or result.path}")  # noqa: T201
    print(f"{len(results)} cases in {time.monotonic() - started:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
