"""The worker of real Accelerate runs that save and resume: a fresh set of ranks for every job.

The global batch is the same at every number of ranks, so that losses can be compared. Runs go from
step 0 to ``SAVED``, save, and go on to ``STEPS``; what resumes does the second part alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from transformers import get_linear_schedule_with_warmup

import reshard.accelerate
from tests.judges import deepspeed_train, deepspeed_trainers, ranks
from tests.judges import library_models as models
from tests.judges.library_accelerate import Counter
from tests.judges.library_cpu import pass_for_gpus

SAVED, STEPS, TOTAL, WARMUP = 3, 5, 12, 2
BATCH = 4  # of all ranks together
PRELOADED = (
    "accelerate.utils.fsdp_utils",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "torch._dynamo",
    "torch._inductor.config",
    "deepspeed",  # which Accelerate imports at its first look at a model
)


def plugin(told: dict[str, Any]) -> FullyShardedDataParallelPlugin | None:
    """Return the plugin of the FSDP version asked for; None for DDP and one process."""
    if "version" not in told:
        return None
    pass_for_gpus()
    return FullyShardedDataParallelPlugin(
        fsdp_version=told["version"],
        state_dict_type=f"{told['type']}_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        use_orig_params=True if told["version"] == 1 else None,
    )


def deepspeed_plugin(told: dict[str, Any]) -> DeepSpeedPlugin | None:
    """Return the plugin of the ZeRO stage asked for; None without DeepSpeed."""
    if "stage" not in told:
        return None
    deepspeed_train.start_rank()
    deepspeed_trainers.configure_accelerate()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": told["stage"]},
        "gradient_clipping": 0.0,  # as the other runs; Accelerate sets 1.0
        "zero_allow_untested_optimizer": True,
    }
    return DeepSpeedPlugin(hf_ds_config=config)


def build(accelerator: Accelerator, told: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the prepared model, optimizer and scheduler, whose lengths are in process steps."""
    torch.manual_seed(7)
    model = models.build("net")
    if told.get("version") == 1:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if "stage" in told:  # Accelerate prepares an engine's scheduler only with its model
            return accelerator.prepare(model, optimizer, _make_scheduler(accelerator, optimizer))
        model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator.prepare(_make_scheduler(accelerator, optimizer))


def _make_scheduler(accelerator: Accelerator, optimizer: Any) -> Any:
    processes = accelerator.num_processes
    return get_linear_schedule_with_warmup(optimizer, WARMUP * processes, TOTAL * processes)


def work(job: ranks.Job, rank: int) -> None:
    """Train, save and go on, or resume; rank 0 writes what it saw."""
    if job.world > 1 or {"version", "stage"} & job.told.keys():
        ranks.join_group(job, rank)
    torch.set_num_threads(1)
    sharded, engine = plugin(job.told), deepspeed_plugin(job.told)
    accelerator = Accelerator(
        cpu=sharded is None and engine is None, fsdp_plugin=sharded, deepspeed_plugin=engine
    )
    model, optimizer, scheduler = build(accelerator, job.told)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if job.told.get("hook"):
        accelerator.register_save_state_pre_hook(_save_language_model)
    begin, resumed = 0, job.told.get("resume")
    live = job.told.get("live")
    warnings = ranks.record_warnings()
    if resumed and live is not None:
        with reshard.accelerate.open_checkpoint(accelerator, resumed, **live) as checkpoint:
            accelerator.load_state(checkpoint)
    elif resumed:
        accelerator.load_state(str(resumed))
    if resumed:
        begin = SAVED
    found: dict[str, Any] = {"moments": moments(optimizer), "seen": counter.seen}
    found |= {"losses": [], "rates": [], "last_epoch": scheduler.scheduler.last_epoch}
    for step in range(begin, STEPS):
        chance = torch.Generator().manual_seed(step)
        rows = torch.randint(0, models.VOCAB, (BATCH, 8), generator=chance)
        share = BATCH // job.world
        loss = model(rows[rank * share : (rank + 1) * share])
        accelerator.backward(loss)
        found["rates"].append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.seen += 1
        found["losses"].append(ranks.mean_over_ranks(loss, job.world))
        if step + 1 == SAVED and not resumed:
            accelerator.save_state(str(job.out / "saved"))
    found["warnings"] = warnings
    found["at_end"] = scheduler.scheduler.last_epoch
    if rank == 0:
        torch.save(found, job.result)


def _save_language_model(models: list[Any], _weights: list[Any], directory: str) -> None:
    """Save a part of the model into a folder, as the hooks of diffusers' examples do."""
    if dist.get_rank() == 0:
        models[0].module.llama.save_pretrained(f"{directory}/llama")


def moments(optimizer: Any) -> int:
    """Return how many parameters have an Adam state."""
    inner = getattr(optimizer.optimizer, "optimizer", optimizer.optimizer)  # in DeepSpeed's
    return sum("exp_avg" in state for state in inner.state.values())


if __name__ == "__main__":
    ranks.serve(work, PRELOADED)
