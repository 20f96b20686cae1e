"""The worker of real Lightning runs that save and resume: a fresh set of ranks for every job.

The global batch of each step is the same at every number of ranks, and so are model, schedule and
batches those of `accelerate_worker`: a Lightning run that resumes from Accelerate's save has its
losses. Runs go from step 0 to ``SAVED``, save, and go on to ``STEPS``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

import reshard.lightning
from tests.judges import library_lightning, library_state, ranks
from tests.judges import library_models as models
from tests.judges.accelerate_worker import BATCH, SAVED, STEPS, TOTAL, WARMUP

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

PRELOADED = (
    "deepspeed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "torch._dynamo",
    "torch._inductor.config",
)


def rows(step: int, rank: int, world: int) -> torch.Tensor:
    """Return a rank's share of the batch of a step."""
    chance = torch.Generator().manual_seed(step)
    share = BATCH // world
    batch = torch.randint(0, models.VOCAB, (BATCH, 8), generator=chance)
    return batch[rank * share : (rank + 1) * share]


class Module(library_lightning.Module):
    """A module whose batches depend on the step alone."""

    def __init__(self) -> None:
        super().__init__("net")
        self.losses: list[float] = []
        self.seen: dict[str, Any] = {}

    def training_step(self, _batch: torch.Tensor, _index: int) -> torch.Tensor:
        """Return the loss of the step's batch."""
        world = self.trainer.world_size
        loss: torch.Tensor = self.model(rows(self.trainer.global_step, self.global_rank, world))
        self.losses.append(ranks.mean_over_ranks(loss, world))
        return loss

    def configure_optimizers(self) -> Any:
        """Return an AdamW and a schedule, which counts updates."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = get_linear_schedule_with_warmup(optimizer, WARMUP, TOTAL)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save a value of the script's own."""
        checkpoint["own"] = {"tokens": 8 * BATCH * self.trainer.global_step}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the value of the script's own."""
        self.seen = checkpoint.get("own", {})


class OddModule(Module):
    """A module with a part that no batch uses, and param groups that no rule tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = torch.nn.Linear(16, 16, bias=False)

    def configure_optimizers(self) -> Any:
        """Return an SGD, whose momentum begins with the first update, with an empty group."""
        parameters = list(self.parameters())
        groups: list[dict[str, Any]] = [
            {"params": parameters[1::2], "lr": 0.1},
            {"params": parameters[::2], "lr": 0.05},
            {"params": [], "lr": 0.01},
        ]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Tell(Callback):
    """Saves after ``SAVED`` steps, and keeps what the live objects hold then or after a resume."""

    def __init__(self, job: ranks.Job) -> None:
        self.job = job
        self.held: dict[str, Any] = {}
        self.count = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at what a resume has loaded."""
        if self.job.told.get("resume"):
            self._look(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_rest: Any) -> None:
        """Save once."""
        self.count += 1
        if trainer.global_step == SAVED and not self.job.told.get("resume"):
            self._look(trainer)
            trainer.save_checkpoint(self.job.out / "saved.ckpt")

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning saves with the callbacks."""
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.count = state_dict["count"]

    def _look(self, trainer: Trainer) -> None:
        (schedule,) = trainer.lr_scheduler_configs
        if self.job.told.get("odd"):
            self.held = look_at_groups(trainer)
            return
        self.held = look(trainer, schedule.scheduler)


def look(trainer: Trainer, scheduler: Any) -> dict[str, Any]:
    """Return weights, moments, steps, groups and counters of the live objects."""
    strategy: Any = trainer.strategy
    fresh = library_lightning.Module("net")
    if hasattr(strategy, "deepspeed_engine"):
        from tests.judges.resume_worker import of_engine

        held = of_engine(strategy.deepspeed_engine)
        held["buffers"] = {name: value.clone() for name, value in fresh.named_buffers()}
        live = dict(strategy.deepspeed_engine.module.named_buffers())
        held["buffers"] = {
            name: live[name].clone() for name in library_state.facts(fresh)["saved_buffers"]
        }
    else:
        held = library_state.read_state(fresh, strategy.model, trainer.optimizers[0])
    counters = {"last_epoch": scheduler.last_epoch, "lr": scheduler.optimizer.param_groups[0]["lr"]}
    return {**held, **counters, "step": trainer.global_step, "epoch": trainer.current_epoch}


def look_at_groups(trainer: Trainer) -> dict[str, Any]:
    """Return the rates of the live optimizer, and the parameters of which no rank has a state."""
    (optimizer,) = trainer.optimizers
    names = {each: name for name, each in trainer.lightning_module.named_parameters()}
    stepped = {name for each, name in names.items() if optimizer.state.get(each)}
    of_ranks = [stepped] * trainer.world_size
    if dist.is_initialized():
        dist.all_gather_object(of_ranks, stepped)
    return {
        "rates": [group["lr"] for group in optimizer.param_groups],
        "idle": sorted(set(names.values()).difference(*of_ranks)),
    }


def train_deepspeed(job: ranks.Job, rank: int) -> dict[str, Any]:
    """Train the bare model with DeepSpeed's engine, without Lightning."""
    import deepspeed

    ranks.join_group(job, rank)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = models.build("net")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = None
    if job.told["schedule"]:
        schedule = get_linear_schedule_with_warmup(optimizer, WARMUP, TOTAL)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // job.world,
        "zero_optimization": {"stage": job.told["stage"]},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config,
        lr_scheduler=schedule,
        dist_init_required=False,
    )
    held: dict[str, Any] = {}
    losses = []
    for step in range(STEPS):
        loss = engine(rows(step, rank, job.world))
        engine.backward(loss)
        engine.step()
        losses.append(ranks.mean_over_ranks(loss, job.world))
        if step + 1 == SAVED:
            from tests.judges.resume_worker import of_engine

            held = of_engine(engine)
            engine.save_checkpoint(str(job.out / "saved.ckpt"))
    return {**held, "losses": losses}


def work(job: ranks.Job, rank: int) -> None:
    """Train, save and go on, or resume; rank 0 writes what it saw."""
    torch.set_num_threads(1)
    found = (train_deepspeed if job.told.get("engine") else train_lightning)(job, rank)
    if rank == 0:
        torch.save(found, job.result)


def train_lightning(job: ranks.Job, rank: int) -> dict[str, Any]:
    """Train with Lightning's Trainer, from the beginning or from a checkpoint."""
    told = job.told
    if told["strategy"] != "auto":
        ranks.join_group(job, rank)
    module, tell = OddModule() if told.get("odd") else Module(), Tell(job)
    module.by_unit = told["strategy"] == "model_parallel"
    case: Any = SimpleNamespace(how=told, world=job.world)
    strategy = library_lightning._strategy(case)
    if strategy == "ddp":
        unused = bool(told.get("odd"))
        strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=unused)
    trainer = Trainer(
        accelerator="cpu",
        devices=job.world,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[tell],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.out,
    )
    loader = DataLoader(models.tokens(64), batch_size=BATCH // job.world)
    resume, live = told.get("resume"), told.get("live")
    if live is None:
        trainer.fit(module, loader, ckpt_path=str(resume) if resume else None)
    else:
        with reshard.lightning.open_checkpoint(trainer, resume, **live) as checkpoint:
            trainer.fit(module, loader, ckpt_path=checkpoint)
    return {**tell.held, "losses": module.losses, "count": tell.count, "own": module.seen}


if __name__ == "__main__":
    ranks.serve(work, PRELOADED)
