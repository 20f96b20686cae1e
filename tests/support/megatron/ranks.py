"""Start processes that load checkpoints into Megatron-core, and collect their results.

One worker process imports Megatron-core with stand-ins for CUDA, which must not replace functions
of this process, and forks the ranks of one checkpoint after the other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

START_LIMIT_S, LIMIT_S = 180.0, 240.0  # to import Megatron-core; for one checkpoint
FOUND, FAILED, LOG = "found.pt", "failed.txt", "worker.log"
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_TAIL = 3000  # characters of a log in a message


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A checkpoint to load.

    Args:
        checkpoint: the directory of the run.
        tokens: the file (``torch.save``) of the tokens for which logits are computed.
        line: the command line that the conversion reported.
        without_option: the arguments of the model that no option of Megatron-LM sets.
    """

    checkpoint: str
    tokens: str
    world: int
    directory: str
    line: str
    without_option: dict[str, Any]


def run_jobs(jobs: Sequence[LoadJob], place: Path) -> list[dict[str, Any] | str]:
    """Load each checkpoint into Megatron-core, and compute logits.

    Args:
        place: a directory for the worker's own files.

    Returns:
        For each job what `worker.load_checkpoint` found, or the text of the failure.
    """
    import torch

    place.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        Path(job.directory).mkdir(parents=True, exist_ok=True)
    ended = _run_worker(jobs, place) if jobs else ""
    found: list[dict[str, Any] | str] = []
    for job in jobs:
        result, failed = (Path(job.directory, name) for name in (FOUND, FAILED))
        if result.exists():
            found.append(torch.load(result, weights_only=True))
        else:
            found.append(failed.read_text() if failed.exists() else ended)
    return found


def _run_worker(jobs: Sequence[LoadJob], place: Path) -> str:
    """Run the worker process to its end; return the failure of jobs without a result, as text."""
    listed, log = place / "jobs.json", place / LOG
    listed.write_text(json.dumps([asdict(job) for job in jobs]))
    with log.open("w") as output:
        # A session of its own, so that `os.killpg` ends the ranks that the worker forked as well.
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.support.megatron.worker", str(listed)],
            env=_make_environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            worker.wait(START_LIMIT_S + LIMIT_S * len(jobs))
        except subprocess.TimeoutExpired:
            pass  # the jobs without a result have failed
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    tail = log.read_text(errors="replace")[-_TAIL:]
    return f"{tail}\nthe worker of Megatron-core ended with exit code {worker.returncode}"


def _make_environment() -> dict[str, str]:
    """Return the environment without the variables of a launcher, and without GPUs."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHED} | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
