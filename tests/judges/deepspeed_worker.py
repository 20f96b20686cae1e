"""The worker process of ``deepspeed_judge``: a fresh set of ranks for every case."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from tests.judges import deepspeed_experts, deepspeed_train, deepspeed_trainers, ranks
from tests.judges.deepspeed_cases import CASES, Case

KINDS = {
    "train": deepspeed_train.make,
    "moe": deepspeed_experts.make_moe,
    "moe_refused": deepspeed_experts.make_refused,
    "trainer": deepspeed_trainers.make_trainer,
    "accelerate": deepspeed_trainers.make_accelerate,
}
PRELOADED = (
    "deepspeed.runtime.zero.muon.muon_optimizer",  # pulls in torch._inductor, seconds of import
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.layer",
    "deepspeed.pipe",
    "deepspeed.checkpoint.ds_to_universal",
    "accelerate",
    "transformers.trainer",
    "transformers.integrations.deepspeed",
)
"""What DeepSpeed would import late, once in every rank; here it is imported before the forks."""


def case_of(job: ranks.Job) -> Case:
    """Return a row of the table, under its own name or another, or the case of the job."""
    return job.told.get("case") or CASES[job.told.get("like", job.case)]


def work(job: ranks.Job, rank: int) -> None:
    """Make the case, or go on from what the job names: a run, or a model's weights."""
    case, told = case_of(job), job.told
    ranks.join_group(job, rank)
    deepspeed_train.start_rank()
    if "load" in told:
        how = {"universal": told.get("universal", False), **told.get("how", {})}
        load = deepspeed_experts.load if case.experts else deepspeed_train.load
        load(case, told["load"], told["steps"], job.out, **how)
    elif "begin" in told:
        deepspeed_train.begin(case, told["begin"], told["steps"], job.out)
    else:
        KINDS[case.kind](case, job.out)


def preload(jobs: list[ranks.Job]) -> dict[str, str]:
    """Import everything once. Return case -> why the disk op that it needs is not here."""
    ranks.import_all(PRELOADED)
    deepspeed_train.leave_out_shared_memory()
    _build_conversions()
    disk = [job for job in jobs if case_of(job).nvme]
    if not disk:
        return {}
    reason = deepspeed_train.load_aio(compile_it=disk[0].told["compile_aio"])
    return {job.case: reason for job in disk} if reason else {}


def _build_conversions() -> None:
    """Have transformers 5 build its conversions of checkpoints, which it keeps in the process.

    It compiles 900 patterns, and would do so in every rank that makes a PEFT model or saves one.
    """
    if find_spec("transformers.conversion_mapping"):
        mapping = importlib.import_module("transformers.conversion_mapping")
        mapping.get_checkpoint_conversion_mapping("llama")


if __name__ == "__main__":
    ranks.serve(work, preload)
