"""The worker of ``tests.judged.families``: ranks that load a checkpoint into Megatron's model."""

from __future__ import annotations

import multiprocessing
import warnings
from pathlib import Path

from tests.judges import ranks
from tests.judges.megatron_worker import preload


def work(job: ranks.Job, rank: int) -> None:
    """Build, load, compare the moments and compute logits; rank 0 saves what was found."""
    try:
        _work(job, rank)
    finally:
        for child in multiprocessing.active_children():
            child.kill()


def _work(job: ranks.Job, rank: int) -> None:
    import torch

    from tests.judges import family_megatron as megatron

    warnings.simplefilter("ignore")
    ranks.join_group(job, rank)
    place = Path(job.told["checkpoint"])
    args = megatron.read_ranks(place)
    megatron.lay_grid(args)
    model = megatron.build(args)
    optimizer = megatron.load(model, place)
    moments, wrong = megatron.find_wrong_moments(model, optimizer)
    logits = megatron.compute_logits(model, job.told["tokens"])
    found = megatron.bring_to_first_rank((moments, wrong, logits))
    if rank == 0:
        whole = [logits for _, _, logits in found if logits]
        result = {
            "moments": sum(count for count, _, _ in found),
            "wrong": [text for _, texts, _ in found for text in texts],
            "logits": whole,
        }
        torch.save(result, job.result)


if __name__ == "__main__":
    ranks.serve(work, preload)
