"""Checkpoints of Lightning's Trainer.

Lightning's sharding strategies accept only GPUs; a subclass passes its check of the exact type, and
what is written is Lightning's own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.judges import library_models as models
from tests.judges import library_state
from tests.judges.library_cpu import wrap_on_cpu

if TYPE_CHECKING:
    from pathlib import Path

    from tests.judges.library_cases import Case

STEPS = 3


class Module(LightningModule):
    """The model inside, with one optimizer and a schedule."""

    def __init__(self, factory: str = "net", width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = models.build(factory)
        self.by_unit = False

    def configure_model(self) -> None:
        """Apply FSDP 2, as Lightning leaves it to the user."""
        if self.by_unit:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for layer in self.model.llama.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.model(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return an optimizer of one group, in the order of the parameters."""
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def module() -> Module:
    """Return the module for ``--model``."""
    return Module()


class Save(Callback):
    """Save and record the state at the end of training, before Lightning takes anything down."""

    def __init__(self, path: Path | None, fresh: Module) -> None:
        self.path = path
        self.fresh = fresh
        self.expected: library_state.State = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the state before Lightning takes the strategy down."""
        if self.path is not None:
            trainer.save_checkpoint(self.path)
        (schedule,) = trainer.lr_scheduler_configs
        if hasattr(trainer.strategy, "deepspeed_engine"):
            self.expected = _tell_deepspeed(trainer, self.fresh)
            return
        self.expected = library_state.read_state(
            self.fresh,
            trainer.strategy.model,
            trainer.optimizers[0],
            schedule.scheduler,
            trainer.global_step,
        )


class CpuFsdp(FSDPStrategy):
    """Not exactly FSDPStrategy, which Lightning refuses without CUDA."""


def _strategy(case: Case) -> Any:
    name = case.how["strategy"]
    if name == "fsdp":
        wrap_on_cpu()
        return CpuFsdp(
            state_dict_type=case.how["type"],
            auto_wrap_policy={LlamaDecoderLayer},
            process_group_backend="gloo",
        )
    if name == "deepspeed":
        return _deepspeed(case)
    if name == "model_parallel":
        return ModelParallelStrategy(
            data_parallel_size=case.world,
            tensor_parallel_size=1,
            save_distributed_checkpoint=case.how["dcp"],
            process_group_backend="gloo",
        )
    return name


def _deepspeed(case: Case) -> Any:
    """Return a strategy of DeepSpeed on CPU, which Lightning refuses and DeepSpeed does not."""
    import deepspeed
    from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled

    class CpuDeepSpeed(DeepSpeedStrategy):
        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", self.local_rank)  # DeepSpeed wants an index

        def setup_environment(self) -> None:
            ParallelStrategy.setup_environment(self)
            self.set_world_ranks()

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    config = {
        "zero_optimization": {"stage": case.how["stage"]},
        "zero_allow_untested_optimizer": True,
    }
    return CpuDeepSpeed(config=config, process_group_backend="gloo")


def _tell_deepspeed(trainer: Trainer, fresh: Module) -> library_state.State:
    """Return the state of an fp32 run in stage 1 or 2, where parameters are whole.

    The scheduler is Lightning's and in the client state; DeepSpeed has none.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    engine: Any = trainer.strategy.deepspeed_engine
    known = library_state.facts(fresh)
    live = dict(engine.module.named_parameters())
    slots = {
        name: {slot: safe_get_full_optimizer_state(p, slot) for slot in ("exp_avg", "exp_avg_sq")}
        for name, p in live.items()
        if p.requires_grad
    }
    buffers = dict(engine.module.named_buffers())
    (group,) = engine.optimizer.param_groups
    hyper = {key: value for key, value in group.items() if key != "params"}
    return {
        "params": library_state.whole_params(engine.module),
        "buffers": {name: library_state.whole(buffers[name]) for name in known["saved_buffers"]},
        "tied": known["tied"],
        "frozen": known["frozen"],
        **library_state.by_slots(
            {
                n: {k: library_state.whole(v) for k, v in s.items()} | {"step": STEPS}
                for n, s in slots.items()
            }
        ),
        "groups": [{**hyper, "params": list(slots)}],
        "scheduler": None,
        "step": trainer.global_step,
    }


def _fabric(case: Case, ckpt: Path) -> library_state.State:
    """Save with ``Fabric.save`` the state that the user composed."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy as FabricFsdp

    class CpuFabricFsdp(FabricFsdp):
        """Not exactly FSDPStrategy, as above."""

    chosen: Any = "auto"
    if case.how["fabric"] != "auto":
        wrap_on_cpu()
        chosen = CpuFabricFsdp(
            state_dict_type=case.how["fabric"],
            auto_wrap_policy={LlamaDecoderLayer},
            process_group_backend="gloo",
        )
    fabric = Fabric(accelerator="cpu", devices=case.world, strategy=chosen)
    fabric.launch()
    model: Any = fabric.setup_module(models.build(case.factory))
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = models.tokens(models.BATCH)
    for _ in range(STEPS):
        fabric.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer, "iteration": STEPS, "hparams": {"lr": 1e-2}}
    fabric.save(ckpt / case.source, state)
    inner = model._forward_module
    return library_state.read_state(
        models.build(case.factory), inner, optimizer.optimizer, None, STEPS
    )


def make(case: Case, ckpt: Path) -> library_state.State:
    """Train three steps and save under the user's file name, or ModelCheckpoint's."""
    if "fabric" in case.how:
        return _fabric(case, ckpt)
    model = Module(case.factory)
    model.by_unit = case.how["strategy"] == "model_parallel"
    own = case.how.get("callbacks", False)
    save = Save(None if own else ckpt / case.source, Module(case.factory))
    callbacks: list[Callback] = [save]
    if own:
        callbacks += [
            ModelCheckpoint(dirpath=ckpt, every_n_train_steps=STEPS),
            EarlyStopping("loss", patience=5, check_on_train_epoch_end=True),
        ]
    trainer = Trainer(
        accelerator="cpu",
        devices=case.world,
        strategy=_strategy(case),
        max_steps=STEPS,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=own,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=ckpt,
    )
    trainer.fit(model, DataLoader(models.tokens(64), batch_size=models.BATCH // case.world))
    return save.expected
