"""The worker process of ``library_judge``: a fresh set of ranks for every case."""

from __future__ import annotations

import importlib

from tests.judges import programs, ranks
from tests.judges.library_cases import CASES, IMPORTS

PRELOADED = (
    "deepspeed",  # which Accelerate imports at its first look at a model
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "torch._inductor.config",
    "transformers.models.llama.modeling_llama",
)


def work(job: ranks.Job, rank: int) -> None:
    """Train and save with the library, and save the expected state."""
    import torch
    import torch.distributed as dist

    case, ckpt = CASES[job.case], job.out / "ckpt"
    ckpt.mkdir(exist_ok=True)
    if case.group:
        ranks.join_group(job, rank)
    maker = importlib.import_module(f"tests.judges.library_{case.library}")
    expected = maker.make(case, ckpt)
    if rank == 0:
        torch.save(expected, job.out / "expected.pt")
    if dist.is_initialized():
        dist.barrier()


def preload(jobs: list[ranks.Job]) -> dict[str, str]:
    """Import everything once. Returns case -> why its library cannot be imported here."""
    ranks.import_all(PRELOADED)
    failed = {}
    for library in sorted({CASES[job.case].library for job in jobs}):
        programs.enter(library)
        try:
            for module in IMPORTS[library]:
                importlib.import_module(module)
        except ImportError as error:
            failed[library] = f"{type(error).__name__}: {error}"
    libraries = {job.case: CASES[job.case].library for job in jobs}
    return {case: failed[library] for case, library in libraries.items() if library in failed}


if __name__ == "__main__":
    ranks.serve(work, preload)
