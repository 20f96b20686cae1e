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
from unittest import mock

import torch
import torch.distributed as dist

from tests.trainer import worlds
from trainer.checkpoint import saving
from trainer.core.data import Corpus
from trainer.engines import build_engine
from trainer.errors import TrainerError
from trainer.resolve import resolve

MOMENTS = ("exp_avg", "exp_avg_sq")


def main(path):
    """Run all jobs."""
    worlds.METHOD = "fork"  # of the process that has imported DeepSpeed
    jobs, results = torch.load(path, weights_only=False), {}
    if "nvme" in {name for _, named in jobs for name, *_ in named}:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        AsyncIOBuilder().load(verbose=False)  # once, before all ranks would compile it
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
    if settings.engine == "deepspeed":
        from tests.trainer import bare_deepspeed

        state |= {key: deepspeed_moment(engine, key) for key in MOMENTS}
        state["counters"] = bare_deepspeed.read_counters(engine.live)
        steps = [float(s["step"]) for s in engine.live.basic_optimizer.state.values()]
    else:
        state |= {key: native_moment(engine, key) for key in MOMENTS}
        steps = [float(s.step) for s in engine.shard.states]
    state["model_state"] = dataclasses.asdict(engine.measure_state())
    state["steps"] = set(steps)
    state["progress"] = dataclasses.asdict(progress)
    state["scaler"] = dataclasses.asdict(engine.scaler)
    return state


def fp32(tensor):
    """Return a copy in fp32; frozen parameters are as narrow as the run."""
    return tensor.detach().float().clone().numpy()


def deepspeed_moment(engine, key):
    """Return a full moment by fqn."""
    from deepspeed.utils import safe_get_full_optimizer_state

    wholes = {}
    optimizer = engine.live.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # after the first step, else
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.live.module.named_parameters():
        if parameter.requires_grad:
            whole = safe_get_full_optimizer_state(parameter, key)
            if whole is None:
                master = engine._find_stage_0_master(parameter)
                whole = engine.live.basic_optimizer.state[master][key]
            wholes[name] = fp32(whole)
    return wholes


def native_moment(engine, key):
    """Return a full moment by fqn."""
    partition, wholes = engine.shard.partition, {}
    for name, shape in partition.shapes.items():
        whole = torch.zeros(shape).reshape(-1)
        for run in partition.runs[name]:
            piece = whole[run.start : run.stop]
            if run.rank == engine._optimizer_rank:
                slot = getattr(engine.shard.states[run.flat], key)
                piece.copy_(slot.get_range(run.offset, run.offset + run.numel))
            if partition.world > 1:
                dist.broadcast(piece, src=run.rank)
        wholes[name] = fp32(whole.view(shape))
    return wholes


def bare(ranks, *, run, tag, model, config, frozen, first, steps, chosen):  # noqa: PLR0913
    """Run a script without the trainer, on the samples that follow ``first``."""
    from tests.trainer import bare_deepspeed

    settings = resolve(chosen, ranks.world)
    corpus = Corpus(settings.data, settings.seq_len, settings.seed)
    numbers = [
        [
            first + step * settings.global_batch + index * ranks.world + ranks.rank
            for index in range(settings.accumulation)
        ]
        for step in range(steps)
    ]
    tokens = [[corpus.get_samples(number, 1) for number in step] for step in numbers]
    with contextlib.redirect_stdout(io.StringIO()):
        return bare_deepspeed.train(run, tag, model, config, frozen, tokens)


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


def refused(ranks, **chosen):
    """Return the error of a run that the trainer refuses."""
    return _error(lambda: worlds._train(ranks, chosen))


def refused_resume(ranks, **chosen):
    """Return the error of a checkpoint that the trainer cannot load."""
    return _error(lambda: look(ranks, **chosen))


def without_deepspeed(ranks, **chosen):
    """Return the error of a run without DeepSpeed."""
    with mock.patch.dict(sys.modules, {"deepspeed": None}):
        return refused(ranks, **chosen)


def without_libaio(ranks, **chosen):
    """Return the error of a run without DeepSpeed's disk operation."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with mock.patch.object(AsyncIOBuilder, "is_compatible", return_value=False):
        return refused(ranks, **chosen)


def full_disk(ranks, at, **chosen):
    """Return the error when rank 1 cannot write the checkpoint of step ``at``."""
    from trainer.checkpoint import files

    real = files.save

    def save(value, path, **keywords):
        if ranks.rank == 1 and f"global_step{at}." in str(path):
            raise OSError(28, "No space left on device")
        real(value, path, **keywords)

    with mock.patch.object(files, "save", save):
        return refused(ranks, **chosen)


def scalers(ranks, window, overflows):
    """Return the scales of DeepSpeed's scaler and of ours, step by step."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from trainer.scaling import LossScaler

    theirs = DynamicLossScaler(2.0**16, window, 1.0, 2, False)
    ours = LossScaler(scale=2.0**16, dynamic=True, window=window)
    scales = []
    for overflow in overflows:
        theirs.update_scale(overflow)
        ours.update(overflow=overflow)
        scales.append((theirs.cur_scale, ours.scale))
    return scales


def _error(do):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            do()
    except TrainerError as error:
        return type(error).__name__, str(error)
    return None, ""


if __name__ == "__main__":
    main(sys.argv[1])
