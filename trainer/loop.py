"""Training: draw, forward and backward, step, tell, save."""

from __future__ import annotations

import hashlib
import math
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from trainer import engines
from trainer.checkpoint import directory, saving
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.state import Progress
from trainer.data import Corpus, counter_seed
from trainer.engines.base import Engine, Update
from trainer.errors import TrainingError
from trainer.export import save_16bit
from trainer.log import StepLog
from trainer.ranks import Ranks
from trainer.schedule import ends_before, learning_rate
from trainer.settings import Settings


def run(settings: Settings, ranks: Ranks) -> None:
    """Train, from the start or a checkpoint, and save.

    Raises:
        TrainerError: see its subclasses; every rank raises, or the others lose this one.
    """
    source = directory.find(Path(settings.resume), settings.tag) if settings.resume else None
    target = _target(settings, ranks, source)
    saves = RunDirectory(target, continues=source, overwrite=settings.overwrite, keep=settings.keep)
    corpus = Corpus(settings.data, settings.seq_len, settings.seed)
    engine = engines.build(settings, ranks)
    progress, text = Progress(), ""
    if source:
        progress, text = saving.resume(source, settings, engine)
    with closing(saves), StepLog(settings, ranks, resumed_at=progress.step) as log:
        if progress.step >= settings.steps:
            log.say(f"nothing to do: {source} is at step {progress.step} of {settings.steps}")
            log.say("  -> give more --steps")
            return
        if source:
            _note_unlike(log, source, progress, other_text=text not in {"", corpus.digest})
        if ends_before(settings):
            log.say(
                f"note: the schedule ends at update {settings.schedule_steps} (--schedule-steps)"
            )
        with ranks.together("use the run directory"):
            if ranks.first:
                saves.claim()
        while progress.step < settings.steps:
            losses = _microbatches(settings, ranks, engine, corpus, progress)
            rate = learning_rate(settings, progress.updates)
            update = _step(settings, engine, losses, rate, progress)
            log.step(progress, losses, rate, update, engine)
            due = settings.save_every and progress.step % settings.save_every == 0
            if due or progress.step == settings.steps:
                saving.save(saves, settings, ranks, engine, progress, corpus.digest)
        log.say(f"saved {target / directory.tag_of(progress.step)}")
        if settings.save_16bit_model:
            log.say(f"saved {save_16bit(engine, settings, ranks, target / 'model')}")
        if settings.parameter_hash:
            log.finish(parameter_hash(engine))


def _note_unlike(log: StepLog, source: Path, progress: Progress, *, other_text: bool) -> None:
    """Say what of a checkpoint is not as in a run that goes on by itself."""
    if not progress.step:
        log.say(f"note: {source} does not say its step: steps and samples count from 0")
    if other_text:
        log.say(f"note: the text is not the one that {source} was trained on")


def _target(settings: Settings, ranks: Ranks, source: Path | None) -> Path:
    """Where to save: as asked; where the resumed run is; or the first free run-N."""
    if settings.save:
        return Path(settings.save)
    if source and source.name.startswith("global_step"):
        return source.parent
    return Path(ranks.share(str(directory.first_free())))


def _microbatches(
    settings: Settings, ranks: Ranks, engine: Engine, corpus: Corpus, progress: Progress
) -> list[float]:
    """Forward and backward over this step's samples; the losses of all ranks' micro batches.

    Micro batch m of the step belongs to the rank at place m % dp of the data axis, whose
    (m // dp)-th it is. Dropout draws from a generator seeded by the number of its first sample, so
    it does not know of ranks either.
    """
    grid = settings.grid
    losses: list[Tensor] = []
    for index in range(settings.accumulation):
        number = index * grid.dp + grid.data_of(ranks.rank)
        first = progress.samples + number * settings.micro_batch
        tokens = corpus.samples(first, settings.micro_batch).to(ranks.device)
        torch.manual_seed(counter_seed(settings.seed, 1, first))
        last = index == settings.accumulation - 1
        losses.append(engine.microbatch(tokens, last=last))
    own = torch.stack(losses)
    every = own.new_empty(ranks.world * len(losses))
    ranks.all_gather(every, own)
    return every.view(ranks.world, -1)[grid.readers].t().reshape(-1).tolist()


def _step(
    settings: Settings, engine: Engine, losses: list[float], rate: float, progress: Progress
) -> Update:
    """Update the weights, or skip what must not be learnt from.

    Raises:
        TrainingError: loss or gradients are not finite, and the run is to stop at that.
    """
    bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad and settings.on_nan == "stop":
        reader = settings.grid.readers[bad[0] % settings.grid.dp]
        where = f"micro batch {bad[0]} (rank {reader})"
        raise TrainingError(
            f"the loss of step {progress.step + 1} is {losses[bad[0]]} in {where}",
            "look at the data; resume from an earlier --tag with a lower --lr or --on-nan skip",
        )
    if bad:
        engine.discard()
        update = Update(math.nan, skipped=True)
    else:
        update = engine.step(rate)
    if update.skipped and not bad and not engine.scaler.dynamic and settings.on_nan == "stop":
        raise TrainingError(
            f"the gradients of step {progress.step + 1} are not finite",
            "resume from an earlier --tag with a lower --lr, or with --on-nan skip",
        )
    progress.step += 1
    progress.samples += settings.global_batch
    progress.skipped += update.skipped
    progress.updates += not update.skipped
    return update


def parameter_hash(engine: Engine) -> str:
    """SHA-256 over names, shapes and bytes of the full parameters, in model order."""
    digest = hashlib.sha256()
    for name, value in engine.parameters():
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
