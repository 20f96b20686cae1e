"""The worker process of a proof, whose forks load checkpoints into Megatron-core as ranks.

``python -m tests.support.megatron.worker JOBS``; see `ranks`.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
import warnings
from pathlib import Path

from tests.judges import ranks
from tests.support.megatron.ranks import FAILED, FOUND, LIMIT_S, LoadJob


def serve(jobs: list[LoadJob]) -> None:
    """Run the jobs one after the other; the ranks of each are forks of this process."""
    from tests.support.megatron import cpu, delta

    gc.disable()  # it would look through all that is imported again and again
    cpu.replace_cuda()
    delta.replace_kernels()
    # Imported before the forks, so that not every rank needs the seconds of the import.
    for module in ("tests.support.megatron.core", "torch._dynamo"):
        importlib.import_module(module)
    cpu.replace_gpu_modules()
    ranks.serve_store()
    gc.freeze()
    gc.enable()
    gc.set_threshold(ranks.GC_THRESHOLD)
    for job in jobs:
        failure = _run(job)
        if failure:
            Path(job.directory, FAILED).write_text(failure)


def _run(job: LoadJob) -> str:
    """Run the ranks of one job; return the text of their failure, if there is one."""
    from torch.multiprocessing.spawn import (
        ProcessExitedException,
        ProcessRaisedException,
        start_processes,
    )

    started = start_processes(
        load_checkpoint, args=(job,), nprocs=job.world, join=False, start_method="fork"
    )
    limit = time.monotonic() + LIMIT_S
    try:
        while not started.join(timeout=1):
            if time.monotonic() > limit:
                return f"not finished after {LIMIT_S:.0f} s"
    except (ProcessRaisedException, ProcessExitedException) as error:
        return str(error)
    finally:
        for process in started.processes:
            process.kill()
    return ""


def load_checkpoint(rank: int, job: LoadJob) -> None:
    """Build the model, load the checkpoint, compare the moments and compute logits.

    Rank 0 saves the result: the number of moments, what is wrong with them, and the logits.
    """
    import torch

    from tests.support.megatron import core

    warnings.simplefilter("ignore")
    directory, place = Path(job.directory), Path(job.checkpoint)
    ranks.join_group(ranks.Job(place.name, job.world, directory, directory, LIMIT_S), rank)
    args = core.parse_line(job.line)
    vars(args).update(job.without_option)
    core.create_groups(args)
    model = core.build(args)
    optimizer = core.load(model, place)
    moments, wrong = core.find_wrong_moments(model, optimizer)
    logits = core.compute_logits(model, torch.load(job.tokens))
    found = core.gather_from_all((moments, wrong, logits))
    if rank == 0:
        result = {
            "moments": sum(count for count, _, _ in found),
            "wrong": [text for _, texts, _ in found for text in texts],
            "logits": [logits for _, _, logits in found if logits],
        }
        torch.save(result, directory / FOUND)


if __name__ == "__main__":
    serve([LoadJob(**job) for job in json.loads(Path(sys.argv[1]).read_text())])
