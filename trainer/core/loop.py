"""Training: draw samples, run forward and backward, update the weights, and repeat.

One step of N ranks has M = global batch / micro batch micro batches, in A = ceil(M / N) rounds::

             round 0            round 1            ...
    rank 0   micro batch 0      micro batch N      ...  \
    rank 1   micro batch 1      micro batch N+1    ...   >  sum of gradients -> norm -> AdamW
    ...                                                 /
             forward, backward  forward, backward

The caller logs and saves: `train` yields to it after every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.core.data import Corpus, derive_seed
from trainer.core.engine import Engine, Update
from trainer.core.errors import TrainingError
from trainer.core.ranks import Ranks
from trainer.core.schedule import compute_learning_rate
from trainer.core.settings import CoreSettings


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    skipped: int = 0
    """Steps whose gradients overflowed with a dynamic loss scale (fp16)."""
    updates: int = 0
    """Steps that changed the weights: the position in the learning rate schedule."""
    samples: int = 0
    """Samples drawn so far: the position in the data."""


@dataclass(frozen=True)
class Step:
    """The result of one optimizer step."""

    losses: list[float]
    """Mean loss of each micro batch of all ranks, in the order of the samples."""
    lr: float
    update: Update


def train(
    settings: CoreSettings, ranks: Ranks, engine: Engine, corpus: Corpus, progress: Progress
) -> Iterator[Step]:
    """Run the steps that are left, and yield after each; ``progress`` counts them.

    Raises:
        TrainingError: the loss or the gradients are not finite. With a dynamic loss scale (fp16),
            gradients that are not finite skip the step instead.
    """
    while progress.step < settings.steps:
        losses = _run_microbatches(settings, ranks, engine, corpus, progress)
        lr = compute_learning_rate(settings, progress.updates)
        update = _update(settings, ranks, engine, losses, lr, progress)
        yield Step(losses, lr, update)


def _run_microbatches(
    settings: CoreSettings, ranks: Ranks, engine: Engine, corpus: Corpus, progress: Progress
) -> list[float]:
    """Run forward and backward on this step's samples; return the losses of all ranks.

    Rank r runs micro batch k x N + r of the step in round k. Dropout draws from a generator that is
    seeded by the number of the first sample, so that its masks do not depend on the number of ranks
    either.

    If N does not divide M, which canonical reduction (see `reduce`) allows, only the first ranks
    are active in the last round. The others repeat another micro batch, because they must take part
    in the collectives; its gradients and its loss are not used.
    """
    losses: list[Tensor] = []
    for round_number in range(settings.accumulation):
        microbatch = (round_number * ranks.world + ranks.rank) % settings.microbatches
        first = progress.samples + microbatch * settings.micro_batch
        tokens = corpus.get_samples(first, settings.micro_batch).to(ranks.device)
        # Three numbers: the seed of an epoch, by which `Corpus` shuffles, has two.
        torch.manual_seed(derive_seed(settings.seed, 1, first))
        active = min(ranks.world, settings.microbatches - round_number * ranks.world)
        last = round_number == settings.accumulation - 1
        losses.append(engine.run_microbatch(tokens, active_ranks=active, last=last))
    own = torch.stack(losses)
    of_all_ranks = own.new_empty(ranks.world * len(losses))
    ranks.all_gather(of_all_ranks, own)
    in_order = of_all_ranks.view(ranks.world, -1).t().reshape(-1)  # (rank, round) to (round, rank)
    return in_order[: settings.microbatches].tolist()


def _update(
    settings: CoreSettings,
    ranks: Ranks,
    engine: Engine,
    losses: list[float],
    lr: float,
    progress: Progress,
) -> Update:
    """Update the weights, if all losses and gradients are finite; count it in ``progress``."""
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss of step {progress.step + 1} is {loss} in micro batch {number} "
                f"(rank {number % ranks.world})",
                "check the data; or resume from an earlier --tag with a lower --lr",
            )
    update = engine.step(lr)
    if update.skipped and not engine.scaler.dynamic:
        raise TrainingError(
            f"the gradients of step {progress.step + 1} are not finite",
            "resume from an earlier --tag with a lower --lr",
        )
    progress.step += 1
    progress.samples += settings.global_batch
    progress.skipped += update.skipped
    progress.updates += not update.skipped
    return update
