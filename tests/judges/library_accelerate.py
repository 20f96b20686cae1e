"""Checkpoints of accelerate's ``save_state``.

Accelerate runs FSDP only on accelerators, and on a CPU silently gives DDP instead: the ranks pass
for GPUs whose device happens to be the CPU. All that is written is accelerate's own code.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch.utils.data import DataLoader

from tests.judges import library_models as models
from tests.judges import library_state
from tests.judges.device import DEVICE, DEVICE_TYPE, IS_GPU
from tests.judges.library_cpu import pass_for_gpus

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from tests.judges.library_cases import Case

STEPS = 3


class Counter:
    """A user's own object, registered for checkpointing."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the content of custom_checkpoint_0.pkl."""
        return {"seen": self.seen, "history": [1.5, "x"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: accelerate requires the method of an object that it checkpoints."""
        self.seen = state["seen"]


def make_plugin(case: Case) -> FullyShardedDataParallelPlugin:
    """Return Accelerate's settings of FSDP for a case."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=case.how["version"],
        state_dict_type=f"{case.how['type']}_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        use_orig_params=case.how["orig"] if case.how["version"] == 1 else None,
    )


def make(case: Case, ckpt: Path) -> library_state.State:
    """Train a little, ``save_state``, and return the live state."""
    plugin = None
    if case.how["kind"] == "fsdp":
        pass_for_gpus()
        plugin = make_plugin(case)
    project = None
    if case.how.get("automatic"):
        project = ProjectConfiguration(project_dir=str(ckpt), automatic_checkpoint_naming=True)
    on_cpu = plugin is None and not IS_GPU
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, project_config=project)
    if accelerator.num_processes != case.world:
        raise AssertionError(f"accelerate sees {accelerator.num_processes} processes")
    return _run(case, accelerator, ckpt)


def _optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """Return an optimizer: two groups if the file names their parameters, one if it counts them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = case.how["kind"] != "fsdp" or not case.how["orig"]
    groups = [{"params": trained}] if flat else library_state.decay_groups(model.named_parameters())
    return torch.optim.AdamW(groups, lr=1e-2)


def _run(case: Case, accelerator: Accelerator, ckpt: Path) -> library_state.State:
    model = models.build(case.factory)
    if case.how["kind"] == "fsdp" and case.how["version"] == 1:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(_optimizer(model, case))
    else:
        model, optimizer = accelerator.prepare(model, _optimizer(model, case))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm)
    loader = DataLoader(models.tokens(64), batch_size=models.BATCH // case.world, shuffle=True)
    scheduler, loader = accelerator.prepare(scheduler, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if case.how.get("two"):
        _second_model(accelerator, first_wrapped=case.how.get("version") == 1)
    for step, batch in zip(range(STEPS), loader, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        counter.seen += 1
        if step == 1 and case.how.get("automatic"):
            accelerator.save_state()
    if case.how.get("scaler"):
        accelerator.scaler = torch.amp.GradScaler(DEVICE_TYPE, init_scale=1024.0)
        accelerator.scaler.scale(torch.ones((), device=DEVICE))
    if case.how.get("automatic"):
        accelerator.save_state()
    else:
        accelerator.save_state(str(ckpt), safe_serialization=case.how.get("safe", True))
    if case.how.get("dcp") is False:
        _as_rank_files(accelerator, model, optimizer, ckpt)
    live = scheduler.scheduler
    found = library_state.read_state(
        models.build(case.factory), model, optimizer.optimizer, live, accelerator.step
    )
    scaler = accelerator.scaler
    return {**found, "scaler": scaler.state_dict() if scaler is not None else None}


def _warm(step: int) -> float:
    return min(1.0, (step + 1) / 10)


def _second_model(accelerator: Accelerator, *, first_wrapped: bool) -> None:
    """Prepare a second model: FSDP 2 refuses two in one call, and FSDP 1 needs the model first."""
    other = models.net()
    if first_wrapped:
        other = accelerator.prepare(other)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    if first_wrapped:
        accelerator.prepare(optimizer)
    else:
        accelerator.prepare(other, optimizer)
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 7))


def _as_rank_files(accelerator: Accelerator, model: Any, optimizer: Any, ckpt: Path) -> None:
    """Save a file per rank in place of DCP, as only these functions of accelerate can."""
    plugin = accelerator.state.fsdp_plugin
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(ckpt / "pytorch_model_fsdp_0")
        shutil.rmtree(ckpt / "optimizer_0")
    accelerator.wait_for_everyone()
    save_fsdp_model(plugin, accelerator, model, str(ckpt), use_dcp=False)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(ckpt), use_dcp=False)
