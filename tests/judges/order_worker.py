"""The worker of real runs whose optimizers list the parameters of one model in several orders.

Every step has the same batch on every rank, and every framework trains in fp32 with AdamW, so that
all runs have the same losses. A run trains ``SAVED`` steps and saves; then, or when it has resumed,
it trains ``LATER`` steps.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import Accelerator
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import reshard.accelerate
import reshard.dcp
import reshard.deepspeed
import reshard.lightning
import reshard.transformers
from tests.judges import deepspeed_state, hf_trainer, library_lightning, ranks, torch_models
from tests.judges.deepspeed_train import start_rank
from tests.judges.models import llama_config

SAVED, LATER, SIZE = 3, 3, 8
PRELOADED = ("torch._dynamo", "transformers.trainer", "lightning.pytorch.strategies")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Order = list[list[int]]
ROWS = torch.arange(float(SIZE)).repeat(2, 1) / SIZE  # any order of samples is the same
DECAY = (0.1, 0.0)  # of every other layer, if the groups differ in it


class Net(nn.Module):
    """Linear layers of one shape."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(4)))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the loss as HF Trainer expects it."""
        del labels
        return {"loss": (self.layers(input_ids) - 1).pow(2).mean()}


def group(model: nn.Module, order: Order, *, decays: bool) -> list[dict[str, Any]]:
    """Return param groups that list the parameters in an order, by their numbers."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": [parameters[n] for n in one]} for one in order]
    for each, (first, *_) in zip(groups, order, strict=True) if decays else ():
        each["weight_decay"] = DECAY[first // 2 % 2]
    return groups


def build_model() -> Net:
    """Return the model, which names the parameters that an optimizer numbers."""
    return Net(0)


def build(told: dict[str, Any]) -> tuple[Net, torch.optim.Optimizer]:
    """Return a model, with other values if it is to load some, and its optimizer."""
    model = Net(1 if "load" in told else 0)
    return model, torch.optim.AdamW(group(model, told["order"], decays=told["decays"]), lr=1e-2)


# Each function trains, and saves or loads; it returns the losses after that


def train_deepspeed(job: ranks.Job, rank: int) -> list[float]:
    """Train with DeepSpeed's engine, whose optimizer it or the script makes."""
    ranks.join_group(job, rank)
    start_rank()
    told = job.told
    model, optimizer = build(told)
    config = {
        "train_micro_batch_size_per_gpu": len(ROWS),
        "zero_optimization": {"stage": told["stage"]} | told.get("zero", {}),
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # by default 1.0
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if "load" in told:
        reshard.deepspeed.load_checkpoint(engine, told["load"], trust="full")

    def step() -> float:
        loss = engine(ROWS)["loss"]
        engine.backward(loss)
        engine.step()
        return loss.item()

    return go_on(told, step, lambda: engine.save_checkpoint(str(job.out / "saved")))


def train_tensor_parallel(job: ranks.Job, rank: int) -> list[float]:
    """Train a Llama with DeepSpeed's AutoTP, with the parameters in the model's order or reversed.

    One rank saves, with the whole model; two ranks with parts of it resume.
    """
    ranks.join_group(job, rank)
    start_rank()
    told = job.told
    torch.manual_seed("load" in told)
    model: Any = transformers.LlamaForCausalLM(llama_config(SIZE, tied=False, intermediate=16))
    if job.world > 1:
        model = deepspeed.tp_model_init(model, job.world, torch.float32)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "gradient_clipping": 1.0,
    }
    parameters = list(model.parameters())[:: -1 if told["is_reversed"] else 1]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=parameters)
    if "load" in told:
        reshard.deepspeed.load_checkpoint(engine, told["load"], trust="full")
    words = torch.arange(SIZE).unsqueeze(0)

    def step() -> float:
        loss = engine(input_ids=words, labels=words).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return go_on(told, step, lambda: engine.save_checkpoint(str(job.out / "saved")))


def load_stage_3(job: ranks.Job, rank: int) -> dict[str, Any]:
    """Load a directory with DeepSpeed's own loader at stage 3; return what the engine holds."""
    ranks.join_group(job, rank)
    start_rank()
    model = getattr(torch_models, job.told["build"])()
    for tensor in model.state_dict().values():
        tensor.zero_()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    path, _ = engine.load_checkpoint(job.told["load"], **job.told["arguments"])
    assert path is not None, "DeepSpeed found no checkpoint"
    slots: dict[str, Any] = {}
    if not job.told["arguments"]:
        slots = deepspeed_state.snapshot_once(engine, ("exp_avg", "exp_avg_sq")).slots
    return {
        "params": deepspeed_state.live_params(engine.module),
        "buffers": deepspeed_state.persistent_buffers(engine.module),
        "slots": slots,
    }


def train_accelerate(job: ranks.Job, _rank: int) -> list[float]:
    """Train with Accelerate in one process."""
    told, accelerator = job.told, Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*build(told))
    if "load" in told:
        with reshard.accelerate.open_checkpoint(accelerator, told["load"], trust="full") as path:
            accelerator.load_state(path)
    step = make_step(model, optimizer)
    return go_on(told, step, lambda: accelerator.save_state(str(job.out / "saved")))


class OwnTrainer(transformers.Trainer):
    """A Trainer that makes the optimizer itself."""

    told: dict[str, Any]

    def create_optimizer(self, _model: Any = None) -> torch.optim.Optimizer:
        """Return the optimizer that it has, or else one with the groups of the job."""
        groups = group(self.model, self.told["order"], decays=self.told["decays"])
        self.optimizer = self.optimizer or torch.optim.AdamW(groups, lr=1e-2)
        return self.optimizer


def train_hf(job: ranks.Job, rank: int) -> list[float]:
    """Train with HF Trainer in one process, or with DeepSpeed."""
    told = job.told
    settings: dict[str, Any] = {"use_cpu": True}
    if "stage" in told:
        ranks.join_group(job, rank)
        start_rank()
        settings["deepspeed"] = {
            "train_micro_batch_size_per_gpu": len(ROWS),
            "zero_optimization": {"stage": told["stage"]},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        }
    steps = SAVED + LATER if "load" in told else SAVED
    arguments = hf_trainer.arguments(
        *(job.out / "saved", steps),
        per_device_train_batch_size=len(ROWS),
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_steps=SAVED,
        **settings,
    )
    model, optimizer = build(told)
    rows = hf_trainer.Rows(ROWS.repeat(steps * job.world, 1))
    given = None if "stage" in told else optimizer  # which the Trainer drops for DeepSpeed
    trainer = OwnTrainer(model, arguments, train_dataset=rows, optimizers=(given, None))
    trainer.told = told
    if "load" not in told:
        trainer.train()
        return []
    with reshard.transformers.open_checkpoint(trainer, told["load"], trust="full") as path:
        trainer.train(resume_from_checkpoint=path)
    losses = {each["step"]: each["loss"] for each in trainer.state.log_history if "loss" in each}
    return [losses[SAVED + n + 1] for n in range(LATER)]


class Module(LightningModule):
    """The model in a module of Lightning."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__()
        self.layers, self.told = Net(1).layers, told
        self.losses: list[float] = []

    def training_step(self, _batch: Tensor, _index: int) -> Tensor:
        """Return the loss."""
        loss = (self.layers(ROWS) - 1).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer with the groups of the job."""
        groups = group(self.layers, self.told["order"], decays=self.told["decays"])
        return torch.optim.AdamW(groups, lr=1e-2)


def train_lightning(job: ranks.Job, rank: int) -> list[float]:
    """Resume with Lightning in one process, or with DeepSpeed."""
    told = job.told
    ranks.join_group(job, rank)
    how = {"strategy": "deepspeed", "stage": told["stage"]} if "stage" in told else {}
    case: Any = SimpleNamespace(how={"strategy": "auto", **how}, world=job.world)
    trainer = Trainer(
        accelerator="cpu",
        devices=job.world,
        strategy=library_lightning._strategy(case),
        max_steps=SAVED + LATER,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.out,
    )
    module = Module(told)
    with reshard.lightning.open_checkpoint(trainer, told["load"], trust="full") as path:
        trainer.fit(module, DataLoader(torch.zeros(2 * job.world * LATER, 1)), ckpt_path=path)
    return module.losses[:LATER]


def train_dcp(job: ranks.Job, rank: int) -> list[float]:
    """Train under FSDP 2, and save or load with torch.distributed.checkpoint."""
    ranks.join_group(job, rank)
    told = job.told
    model = Net(1 if "load" in told else 0)
    mesh = init_device_mesh("cpu", (job.world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(group(model, told["order"], decays=told["decays"]), lr=1e-2)
    options = FLAT if "load" in told else None

    def collect() -> dict[str, Any]:
        state = get_optimizer_state_dict(model, optimizer, options=options)
        return {"model": get_model_state_dict(model), "optim": state}

    if "load" in told:
        state, source = collect(), told["load"]
        if told["is_numbered"]:
            source = reshard.open(source, model="tests.judges.order_worker:build_model").manifest
        dcp.load(state, storage_reader=reshard.dcp.StorageReader(source, trust="full"))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    step = make_step(model, optimizer)
    return go_on(told, step, lambda: dcp.save(collect(), checkpoint_id=str(job.out / "saved")))


def train_torch(job: ranks.Job, _rank: int) -> list[float]:
    """Train in one process, and save with torch.save."""
    model, optimizer = build(job.told)

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, job.out / "saved")

    return go_on(job.told, make_step(model, optimizer), save)


def make_step(model: nn.Module, optimizer: Any) -> Any:
    """Return a function that trains one step and returns its loss."""

    def step() -> float:
        loss = model(ROWS)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def go_on(told: dict[str, Any], step: Any, save: Any) -> list[float]:
    """Train to the save, or from what was loaded; return the losses after that."""
    if "load" not in told:
        for _ in range(SAVED):
            step()
        save()
    return [step() for _ in range(LATER)]


TRAIN = {
    "deepspeed": train_deepspeed,
    "tensor parallel": train_tensor_parallel,
    "stage 3": load_stage_3,
    "accelerate": train_accelerate,
    "hf": train_hf,
    "lightning": train_lightning,
    "dcp": train_dcp,
    "torch": train_torch,
}


def work(job: ranks.Job, rank: int) -> None:
    """Train, and save or load; rank 0 writes the losses."""
    torch.set_num_threads(1)
    losses = TRAIN[job.told["how"]](job, rank)
    if rank == 0:
        torch.save(losses, job.result)
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    ranks.serve(work, PRELOADED)
