"""Checkpoints of programs for reinforcement learning: train, save, load, and train on.

AReaL and SkyRL save and load with their own code. prime-rl, ROLL and xtuner are in no package
index: the calls of torch's functions are those of their sources, with the same keys and files.
"""

from __future__ import annotations

import runpy
import sys
import types
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.judges import programs
from tests.judges.library_stubs import Stub, stand_in

STEPS, SLOTS = 3, ("exp_avg", "exp_avg_sq")
UNUSED = (  # modules that SkyRL imports, and a checkpoint does not need
    *("transformers", "transformers.trainer", "peft.utils.save_and_load", "skyrl.utils.tok"),
    *("skyrl.backends.backend", "skyrl.backends.skyrl_train.workers.model_wrapper"),
    *("skyrl.train", "skyrl.train.config"),
)


class Program:
    """A training under FSDP 2; the directory that it saves, and what `split` reads in it."""

    package, read = "", ""

    def __init__(self, path):
        self.path = path
        torch.manual_seed(dist.get_rank())  # each rank's own weights, if nothing is loaded
        self.model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def train(self, first, steps=STEPS):
        losses = []
        for seed in range(first, first + steps):
            rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
            loss = self.model(rows).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def get(self, *keys):
        return dict(zip(keys, states.get_state_dict(self.model, self.optimizer), strict=True))

    def set(self, model, optim):
        of = self.model, self.optimizer
        states.set_state_dict(*of, model_state_dict=model, optim_state_dict=optim)

    def load_items(self, path):
        dcp.load(state := self.collect(), checkpoint_id=path)
        return state

    def list_values(self):
        slots = [self.optimizer.state[weight] for weight in self.model.parameters()]
        values = [list(self.model.parameters()), *([s[n] for s in slots] for n in SLOTS)]
        return [[value.full_tensor().tolist() for value in part] for part in values]


class Areal(Program):
    """AReaL 1.0.4: FSDPEngine's directory, of which its RecoverHandler takes the path."""

    package, place = "areal", "default/recover_checkpoint"

    def collect(self):
        path = programs.FOLDER / "areal/areal/engine/fsdp_utils/checkpoint.py"
        state = runpy.run_path(str(path))["DCPState"]  # without AReaL's engines
        return {"dcp": state(self.model, self.optimizer)}

    def save(self):
        dcp.save(self.collect(), checkpoint_id=self.path)

    def load(self):
        self.load_items(self.path)
        self.scheduler.last_epoch = STEPS  # by the step that RecoverHandler keeps


class SkyRL(Program):
    """SkyRL 0.3.0: FSDPStrategy."""

    package, place = "skyrl", "global_step_3/policy"

    def make(self):
        programs.enter(self.package)
        absent = ["jaxtyping", "loguru", "omegaconf"]
        with stand_in(absent), mock.patch.dict(sys.modules, {n: Stub(n) for n in UNUSED}):
            from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
        strategy = FSDPStrategy.__new__(FSDPStrategy)
        own = {"fsdp_strategy": "fsdp", "is_lora": False, "world_size": dist.get_world_size()}
        vars(strategy).update(own)
        self.model.config = types.SimpleNamespace(save_pretrained=lambda _path: None)
        return strategy, (self.model, str(self.path))

    def save(self):
        strategy, of = self.make()
        with mock.patch("torch.cuda.synchronize"):
            strategy.save_checkpoint(*of, 0, self.optimizer, self.scheduler)

    def load(self):
        strategy, of = self.make()
        strategy.load_checkpoint(*of, self.optimizer, self.scheduler)


class PrimeRL(Program):
    """prime-rl 559b447: AppState and CheckpointManager of ``trainer/ckpt.py``."""

    place = "step_3/trainer"

    def collect(self):
        parts = self.get("model", "optimizers") | {"scheduler": self.scheduler.state_dict()}
        return {"app": parts | {"progress": {"step": STEPS}}}

    def save(self):
        loader = self.path / "dataloader" / f"rank_{dist.get_rank()}.pt"
        loader.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"_num_yielded": STEPS}, loader)
        dcp.save(self.collect(), checkpoint_id=self.path)

    def load(self):
        state = self.load_items(self.path)["app"]
        self.set(state["model"], state["optimizers"])
        self.scheduler.load_state_dict(state["scheduler"])
        loader = self.path / "dataloader" / "rank_0.pt"  # of ranks without their own, too
        assert torch.load(loader) == {"_num_yielded": STEPS}


class XTuner(Program):
    """xtuner b934f46: ``save_dcp`` and ``load_dcp`` of TrainEngine, and its Trainer's files."""

    place = "checkpoints/ckpt-step-3"

    def collect(self):
        return self.get("model", "optimizer")

    def save(self):
        dcp.save(self.collect(), checkpoint_id=self.path / "weights")
        if dist.get_rank() == 0:
            torch.save({"step": STEPS}, self.path / "dataloader")
            torch.save(self.scheduler.state_dict(), self.path / "lr_scheduler")
            (self.path / "train_state.json").write_text('{"cur_step": 3}')

    def load(self):
        state = self.load_items(self.path / "weights")
        self.set(state["model"], state["optimizer"])
        self.scheduler.load_state_dict(torch.load(self.path / "lr_scheduler"))
        assert torch.load(self.path / "dataloader") == {"step": STEPS}
        assert (self.path / "train_state.json").exists()


class Roll(Program):
    """ROLL 8eb27cc: FSDP2TrainStrategy; without a step before, it loads no moments."""

    place, read = "checkpoint-2/actor_train", "dcp"

    def collect(self):
        return {**self.model.state_dict(), "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self):
        whole = {name: value.full_tensor() for name, value in self.model.state_dict().items()}
        if dist.get_rank() == 0:
            self.path.mkdir(parents=True)
            save_file(whole, self.path / "model.safetensors")
        dcp.save(self.collect(), checkpoint_id=self.path / "dcp")

    def load(self):
        self.train(0, steps=1)
        self.model.load_state_dict(self.load_items(self.path / "dcp"), strict=False)


KINDS = {kind.__name__: kind for kind in (Areal, SkyRL, PrimeRL, XTuner, Roll)}


def run(_ranks, paths, saves):
    """Save or load with each program; return its state then, and the losses that follow."""
    found = {}
    for name, path in paths.items():
        program = KINDS[name](path)
        if saves:
            program.train(0)
        (program.save if saves else program.load)()
        found[name] = program.list_values(), program.train(STEPS)
    return found
