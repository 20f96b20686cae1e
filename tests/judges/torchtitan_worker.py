"""The worker of runs that save and resume with torchtitan's checkpoint manager and optimizers.

Model, schedule and batches are those of `accelerate_worker`, so that a run that resumes from
another framework's save has its losses. The loop is here, because torchtitan's trainer needs GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.judges import library_models as models
from tests.judges import library_state, programs, ranks
from tests.judges.accelerate_worker import BATCH, SAVED, STEPS, TOTAL, WARMUP

PRELOADED = (
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "torch._dynamo",
    "torch._inductor.config",
)


def rate(step: int) -> float:
    """Return the share of the learning rate, as ``get_linear_schedule_with_warmup``."""
    return step / WARMUP if step < WARMUP else (TOTAL - step) / (TOTAL - WARMUP)


class Renaming:
    """A state dict adapter of a model whose published names are `published`.

    Attributes:
        left_out: the names in memory that it does not know.
    """

    def __init__(self, left_out: Collection[str] = ()) -> None:
        self.left_out = left_out

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors under their published names."""
        return {published(name): state[name] for name in state if name not in self.left_out}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors under the names in memory."""
        return {published(name): value for name, value in state.items()}


def published(name: str) -> str:
    """Return another name: that of the first layer for the second one, and the other way round."""
    swapped = {".0.": ".1.", ".1.": ".0."}
    return re.sub(r"\.[01]\.", lambda match: swapped[match[0]], name)


class Run:
    """A sharded model with torchtitan's optimizers, schedulers and checkpoint manager."""

    def __init__(self, job: ranks.Job) -> None:
        from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
        from torchtitan.components.optimizer.optimizer import ParamGroupConfig

        import reshard.torchtitan
        from tests.judges.library_torchtitan import CheckpointManager, Fused, TrainState

        self.build = Fused if job.told.get("fused") else lambda: models.build("net")
        self.model: Any = self.build()
        mesh = init_device_mesh("cpu", (job.world,), mesh_dim_names=("fsdp",))
        for layer in [] if job.told.get("fused") else self.model.llama.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        kwargs = {"lr": 1e-2, "weight_decay": 0.01}
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=kwargs)
        config = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
        self.optimizers = OptimizersContainer(config, model_parts=[self.model])
        self.schedulers = LRSchedulersContainer(self.optimizers, rate)
        self.state = TrainState()
        resume, in_hf = job.told.get("resume"), job.told.get("in_hf", False)
        manager = CheckpointManager if job.told.get("own") else reshard.torchtitan.CheckpointManager
        self.manager = manager.Config(
            enable=True,
            interval=SAVED,
            initial_load_path=str(resume) if resume else None,
            initial_load_model_only=in_hf,
            initial_load_in_hf=in_hf,
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.state},
            sd_adapter=Renaming(job.told.get("left_out", ())) if in_hf else None,
            base_folder=str(job.out),
        )
        del self.manager.states["dataloader"]  # the trainer's real one; None is nothing to save

    def look(self) -> dict[str, Any]:
        """Return what the live objects hold."""
        (optimizer,) = self.optimizers.optimizers
        held = library_state.read_state(self.build(), self.model, optimizer)
        return {**held, "step": self.state.step, **self.schedulers.state_dict()}


def work(job: ranks.Job, rank: int) -> None:
    """Train, save and go on, or resume; rank 0 writes what it saw."""
    ranks.join_group(job, rank)
    run, resumes = Run(job), "resume" in job.told
    assert run.manager.load() == resumes
    held = run.look() if resumes else {}
    losses = []
    share = BATCH // job.world
    for step in range(run.state.step, STEPS):
        chance = torch.Generator().manual_seed(step)
        rows = torch.randint(0, models.VOCAB, (BATCH, 8), generator=chance)
        loss = run.model(rows[rank * share : (rank + 1) * share])
        loss.backward()
        run.optimizers.step()
        run.schedulers.step()
        run.optimizers.zero_grad()
        run.state.step = step + 1
        losses.append(ranks.mean_over_ranks(loss, job.world))
        if step + 1 == SAVED and not resumes:
            held = run.look()
            run.manager.save(SAVED)
    run.manager.close()
    if rank == 0:
        torch.save({**held, "losses": losses}, job.result)


def preload(jobs: list[ranks.Job]) -> dict[str, str]:
    """Import everything once. Returns case -> why torchtitan cannot be imported here."""
    ranks.import_all(PRELOADED)
    programs.enter("torchtitan")
    try:
        ranks.import_all(["tests.judges.library_torchtitan"])
    except ImportError as error:
        return dict.fromkeys((job.case for job in jobs), f"{type(error).__name__}: {error}")
    return {}


if __name__ == "__main__":
    ranks.serve(work, preload)
