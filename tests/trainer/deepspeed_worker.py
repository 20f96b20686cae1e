"""The process that runs real DeepSpeed and our engines; see ``test_deepspeed``.

``python -m tests.trainer.deepspeed_worker JOBS.pt``: jobs by world size, in order. Each world is
one set of ranks, forked from this process. Results: ``<JOBS.pt>.done``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import traceback
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.trainer import worlds
from trainer.checkpoint import saving
from trainer.core.data import Corpus
from trainer.core.strategies import build_engine
from trainer.resolve import resolve

MOMENTS = ("exp_avg", "exp_avg_sq")


def main(path):
    """Run all jobs."""
    worlds.METHOD = "fork"  # of the process that has imported DeepSpeed
    jobs, results = torch.load(path, weights_only=False), {}
    for world, named in jobs:
        results |= worlds.run(world, work, named)[0]
    torch.save(results, f"{path}.done")


def work(ranks, named):
    """Return one rank's results of (name, function, arguments); a string is an error."""
    results = {}
    for name, function, arguments in named:
        try:
            results[name] = globals()[function](ranks, **arguments)
        except Exception:  # noqa: BLE001
            results[name] = traceback.format_exc()
            print(f"{name}, rank {ranks.rank}: {results[name]}", file=sys.stderr)  # noqa: T201
        torch.distributed.barrier()
    return results


def train(ranks, **chosen):
    """Run through our loop."""
    return worlds._train(ranks, chosen)


def look(ranks, **chosen):
    """Return what an engine holds right after it has resumed."""
    settings = resolve(chosen, ranks.world)
    engine = build_engine(settings, ranks)
    progress = saving.resume(Path(settings.resume) / settings.tag, settings, engine).progress
    state = {"parameters": {name: fp32(value) for name, value in engine.parameters()}}
    state |= {key: native_moment(engine, key) for key in MOMENTS}
    state["steps"] = {float(s.step) for s in engine.shard.states}
    state["progress"] = dataclasses.asdict(progress)
    state["scaler"] = dataclasses.asdict(engine.scaler)
    return state


def fp32(tensor):
    """Return a copy in fp32; frozen parameters are as narrow as the run."""
    return tensor.detach().float().clone().numpy()


def native_moment(engine, key):
    """Return a full moment by fqn."""
    partition, wholes = engine.shard.partition, {}
    for name, shape in partition.shapes.items():
        whole = torch.zeros(shape).reshape(-1)
        for run in partition.runs[name]:
            piece = whole[run.start : run.stop]
            if run.rank == engine._optimizer_rank:
                slot = getattr(engine.shard.states[run.flat], key)
                piece.copy_(slot[run.offset : run.offset + run.numel])
            if partition.world > 1:
                dist.broadcast(piece, src=run.rank)
        wholes[name] = fp32(whole.view(shape))
    return wholes


def bare(ranks, *, config, chosen, at, load=None, save=None):
    """Run a script without the trainer, on the trainer's samples.

    Args:
        ranks: all ranks.
        config: of DeepSpeed.
        chosen: settings of the trainer, for the model and the samples.
        at: the step that is saved or loaded.
        load: run directory and tag; else it starts, and trains and saves the first ``at`` steps.
        save: the run directory.

    Returns:
        ``state`` and ``counters`` after ``at`` steps, ``losses``, and which steps were ``skipped``.
    """
    from tests.trainer import bare_deepspeed

    settings = resolve(chosen, ranks.world)
    tokens = _draw_tokens(settings, ranks)
    losses, skipped = [], []
    with contextlib.redirect_stdout(io.StringIO()):
        engine = bare_deepspeed.start(chosen["model"], config, chosen["freeze"])
        if load:
            bare_deepspeed.resume(engine, *load)
        else:
            losses, skipped = bare_deepspeed.train(engine, tokens[:at])
            engine.save_checkpoint(save, tag=f"global_step{at}")
        found = bare_deepspeed.read_state(engine), bare_deepspeed.read_counters(engine)
        more_losses, more_skipped = bare_deepspeed.train(engine, tokens[at:])
    return SimpleNamespace(
        state=found[0],
        counters=found[1],
        losses=losses + more_losses,
        skipped=skipped + more_skipped,
    )


def _draw_tokens(settings, ranks):
    """Return this rank's micro batches by step, as the trainer gives them to it."""
    corpus = Corpus(settings.data, settings.seq_len, settings.seed)
    size = settings.micro_batch
    return [
        [
            corpus.get_samples(
                step * settings.global_batch + (index * ranks.world + ranks.rank) * size, size
            )
            for index in range(settings.accumulation)
        ]
        for step in range(settings.steps)
    ]


def zero_to_fp32(ranks, run, tag):
    """Run DeepSpeed's own merge."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):
        merged = get_fp32_state_dict_from_zero_checkpoint(run, tag)
    return {name: fp32(value) for name, value in merged.items()}


def to_universal(ranks, run, tag, out):
    """Run DeepSpeed's own conversion in this process."""
    from deepspeed.checkpoint.ds_to_universal import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(
            Namespace(
                input_folder=f"{run}/{tag}",
                output_folder=f"{out}/{tag}",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


if __name__ == "__main__":
    main(sys.argv[1])
