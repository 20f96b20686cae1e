"""One run on this rank: build or resume, train, log and save."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from trainer.checkpoint import directory, saving
from trainer.checkpoint.background import open_saves
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.saving import Resumed
from trainer.core.data import Corpus
from trainer.core.loop import Progress, train
from trainer.core.ranks import Ranks
from trainer.core.strategies import build_engine
from trainer.log import StepLog, hash_parameters
from trainer.settings import Settings


def run(settings: Settings, ranks: Ranks) -> None:
    """Train, from the start or from a checkpoint, and save.

    Every rank raises the TrainerError of one rank, or loses that rank.
    """
    source = saving.find_source(settings, ranks)
    target = _choose_target(settings, ranks, source)
    saves = RunDirectory(target, continues=source, overwrite=settings.overwrite, keep=settings.keep)
    corpus = Corpus(settings.data, settings.seq_len, settings.seed)
    engine = build_engine(settings, ranks)
    resumed = saving.resume(source, settings, engine) if source else Resumed(Progress())
    progress = resumed.progress
    with closing(saves), StepLog(settings, ranks) as log:
        if progress.step >= settings.steps:
            log.print(f"nothing to do: {source} is at step {progress.step} of {settings.steps}")
            log.print(f"  -> use a larger --steps than {progress.step}")
            return
        _print_notes(log, settings, source, resumed, corpus)
        with ranks.raise_on_all("use the run directory"):
            if ranks.is_first:
                saves.claim()
        with open_saves(saves, settings, ranks, log.print) as save:
            for step in train(settings, ranks, engine, corpus, progress):
                log.step(progress, step, engine)
                due = settings.save_every and progress.step % settings.save_every == 0
                if due or progress.step == settings.steps:
                    save(saving.collect(settings, engine, progress, corpus.digest))
        log.print(f"saved {target / directory.make_tag(progress.step)}")
        if settings.parameter_hash:
            log.finish(hash_parameters(engine))


def _print_notes(
    log: StepLog, settings: Settings, source: Path | None, resumed: Resumed, corpus: Corpus
) -> None:
    """Print how a resumed run differs from an unbroken one, and whether the schedule ends early."""
    for dropped in resumed.dropped:
        log.print(f"note: not taken over from {source}: {dropped}")
    if source and not resumed.progress.step:
        log.print(f"note: {source} does not record its step: steps and samples count from 0")
    if source and resumed.text not in {"", corpus.digest}:
        log.print(f"note: the training text is not the one of {source}")
    decays = settings.schedule in {"WarmupDecayLR", "WarmupCosineLR"}
    if decays and settings.schedule_steps < settings.steps:  # the last steps get the lowest rate
        log.print(f"note: the schedule ends at update {settings.schedule_steps} (--schedule-steps)")


def _choose_target(settings: Settings, ranks: Ranks, source: Path | None) -> Path:
    """Return --save; else the directory of the resumed run; else the first free run-N."""
    if settings.save:
        return Path(settings.save)
    if source and source.name.startswith("global_step"):
        return source.parent
    return Path(ranks.broadcast_object(str(directory.choose_run_directory())))
