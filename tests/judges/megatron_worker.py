"""The worker process of ``megatron_judge``: a fresh set of ranks for every run."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.judges import ranks
from tests.judges.megatron_cases import LATER, STEPS, Case, Grid

if TYPE_CHECKING:
    from tests.judges.megatron_run import Run

PRELOADED = (
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "tests.judges.megatron_files",
    "tests.judges.megatron_state",
    "torch._dynamo",  # half a second in each rank
)


def work(job: ranks.Job, rank: int) -> None:
    """Train and save, or load and continue; then load the whole model on one rank with Megatron."""
    import torch
    import torch.distributed as dist

    from tests.judges import megatron_files as files
    from tests.judges import megatron_state

    case = job.told["table"][job.case]
    ranks.join_group(job, rank)
    run = _begin(case)
    if case.start is None:
        trained, forms = run.train(STEPS), case.forms
    else:
        trained, forms = [], ()
        files.load(run, Path(case.start), case.form)
        held = megatron_state.local(run) | {"rng": files.random_states()}
        torch.save(held, job.out / f"rank{rank}.pt")
    for form in dict.fromkeys((*forms, case.canonical)):
        plain = form == case.canonical and case.bucketed
        files.save(megatron_state.in_one_bucket(run) if plain else run, job.out / form, form)
    told = {"losses": run.evaluate(), "trained": trained, "case": dataclasses.asdict(case)}
    told["later"] = run.train(LATER)
    dist.barrier()
    _leave()
    if rank == 0:
        torch.save(told | _on_one_rank(job, case), job.out / "expected.pt")


def _begin(case: Case) -> Run:
    from tests.judges.megatron_models import lay_grid
    from tests.judges.megatron_run import Run

    lay_grid(case.grid)
    return Run(case)


def _leave() -> None:
    """Leave all process groups, as if Megatron had not been initialised."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    dist.destroy_process_group()


def _on_one_rank(job: ranks.Job, case: Case) -> dict[str, Any]:
    """Load on one rank, with Megatron itself, what it saved on any grid; return that state."""
    import torch.distributed as dist

    from tests.judges import megatron_files as files
    from tests.judges import megatron_state

    dist.init_process_group(
        "gloo", init_method=f"file://{job.out / '.alone'}", rank=0, world_size=1
    )
    alone = dataclasses.replace(
        case,
        grid=Grid(),
        padded=case.padded_vocabulary,
        form=case.canonical,
        bucket=None,
        expert_part=case.grid.ep > 1,
        rng=False,
    )
    run = _begin(alone)
    files.load(run, job.out / case.canonical, case.canonical)
    alone_too = {"losses_alone": run.evaluate()} if case.start is None else {}
    return megatron_state.whole(run) | alone_too


def preload(jobs: list[ranks.Job]) -> dict[str, str]:
    """Import everything once. Returns case -> why Megatron-core cannot be imported here."""
    from tests.support.megatron.cpu import replace_cuda, replace_gpu_modules

    try:
        # It prepares a kernel for each shape of a matrix, which takes longer than its use here.
        importlib.import_module("torch").backends.mkldnn.enabled = False
        replace_cuda()
        for module in PRELOADED:
            importlib.import_module(module)
        replace_gpu_modules()
    except ImportError as error:
        return {job.case: f"{type(error).__name__}: {error}" for job in jobs}
    return {}


if __name__ == "__main__":
    ranks.serve(work, preload)
