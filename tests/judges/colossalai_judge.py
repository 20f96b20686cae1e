"""Checkpoints of ColossalAI's own savers on one CPU, each with the expected values by name.

    RESHARD_COLOSSALAI=ColossalAI python -m tests.judges.colossalai_judge OUT [case[=RUN] ...]

With RUN, a checkpoint in one directory, its loaders fill a fresh model and optimizer before that.
The checkout's ``checkpoint_io`` and ``utils/safetensors.py`` run as they are; the rest of the
package, which they import and which needs kernels, is stood in for. Nothing is distributed when the
savers write (they gather before), so each stage of a pipeline saves in turn.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.judges.library_stubs import stand_in

STEPS = 3
WIDTH, INNER, VOCABULARY = 6, 12, 10
MEGABYTES = 0.0005  # a shard: so small that there are several


class Net(nn.Module):
    """With shapes that tell parameters apart, and a buffer."""

    def __init__(self):
        super().__init__()
        chance = torch.Generator().manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY + 1)
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))
        for parameter in self.parameters():
            parameter.data.normal_(generator=chance)

    def forward(self, tokens):
        return self.head(self.down(torch.relu(self.up(self.embed(tokens)))) * self.scale[0])


def trained(*, groups, steps=STEPS):
    """Train a model for `steps`; return it with its Adam and its scheduler."""
    model = Net()
    every = dict(model.named_parameters())
    small = [name for name in every if name.endswith("bias")] if groups > 1 else []
    parts = [{"params": [p for n, p in every.items() if n not in small], "weight_decay": 0.1}]
    if small:
        parts.append({"params": [every[n] for n in small], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(parts, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(steps):
        chance = torch.Generator().manual_seed(step)
        model(torch.randint(0, VOCABULARY, (4, 5), generator=chance)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


def read_state(model, optimizer):
    """Return weights and optimizer state by name, from the live objects."""
    names = {id(p): n for n, p in model.named_parameters()}
    state = {names[id(p)]: held for p, held in optimizer.state.items()}
    return {
        "weights": {name: held.clone() for name, held in model.state_dict().items()},
        "state": state,
        "groups": [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups],
    }


def _plain(out, begun, *, use_safetensors):
    """Save or load with ``GeneralCheckpointIO``, which DDP's plugin uses."""
    model, optimizer, scheduler = trained(groups=2, steps=0 if begun else STEPS)
    io = importlib.import_module("colossalai.checkpoint_io.general_checkpoint_io")
    saver = object.__new__(io.GeneralCheckpointIO)
    saver.async_writers = []
    if begun:
        weights = begun / "modeling" / "pytorch_model.bin.index.json"
        saver.load_sharded_model(model, weights, strict=True)
        states = begun / "optimizer" / "pytorch_optim.bin.index.json"
        saver.load_sharded_optimizer(optimizer, str(states), None)
        saver.load_lr_scheduler(scheduler, str(begun / "lr_scheduler"))
    weights, states = out / "ckpt" / "modeling", out / "ckpt" / "optimizer"
    saver.save_sharded_model(
        model, str(weights), max_shard_size=MEGABYTES, use_safetensors=use_safetensors
    )
    saver.save_sharded_optimizer(optimizer, str(states), False, None, MEGABYTES)
    saver.save_lr_scheduler(scheduler, str(out / "ckpt" / "lr_scheduler"))
    running = '{"epoch": 1, "step": 3, "sample_start_index": 12}'
    (out / "ckpt" / "running_states.json").write_text(running)
    torch.save(read_state(model, optimizer), out / "expected.pt")


def _pipeline(out, begun):
    """Save two stages with ``HybridParallelCheckpointIO``; the first joins all, and saves last."""
    hybrid = importlib.import_module("colossalai.checkpoint_io.hybrid_parallel_checkpoint_io")
    interface = importlib.import_module("colossalai.interface")
    model, optimizer, _ = trained(groups=1, steps=0 if begun else STEPS)
    numbers = {id(p): n for n, p in enumerate(model.parameters())}
    info = {
        "param_groups": [{"params": [*numbers.values()]}],
        "param2id": numbers,
        "param2shape": {id(p): p.shape for p in model.parameters()},
    }
    stages = [_stage(model, 1, ("down", "head")), _stage(model, 0, ("embed", "up"))]
    for rank, stage in stages:  # all stages save the model before one saves its optimizer
        boosted = interface.ModelWrapper()
        vars(boosted).update(_force_wait_all_gather=lambda: None, unwrap=lambda s=stage: s)
        saver = _of_stage(hybrid, rank)
        if begun:
            vars(boosted).update(update_master_params=lambda: None)
            saver.load_sharded_model(boosted, begun / "modeling" / "pytorch_model.bin.index.json")
        saver.save_sharded_model(boosted, str(out / "ckpt"), size_per_shard=MEGABYTES)
    every = optimizer.param_groups[0]["params"]
    for rank, stage in stages:
        own = {id(p) for p in stage.parameters()}
        updated = interface.OptimizerWrapper()
        vars(updated).update(
            param_info=info,
            param_groups=optimizer.param_groups,
            get_master_to_working_map=lambda: None,
            optim=_part(optimizer, own),
        )
        saver = _of_stage(hybrid, rank)
        if begun:
            saver.load_sharded_optimizer(
                updated, str(begun / "optimizer" / "pytorch_optim.bin.index.json")
            )
            optimizer.state.update(updated.optim.state)
            optimizer.param_groups[0] |= {**updated.optim.param_groups[0], "params": every}
            updated.param_groups = optimizer.param_groups
        saver.save_sharded_optimizer(updated, str(out / "ckpt"), size_per_shard=MEGABYTES)
    torch.save(read_state(model, optimizer), out / "expected.pt")


def _part(optimizer, own):
    """Return the Adam of one stage."""
    (group,) = optimizer.param_groups
    mine = [parameter for parameter in group["params"] if id(parameter) in own]
    made = torch.optim.AdamW([{**group, "params": mine}])
    made.state.update({p: s for p, s in optimizer.state.items() if id(p) in own})
    return made


def _stage(model, rank, names):
    """Return a pipeline rank, and a module with some of the model's modules."""
    stage = nn.Module()
    for name in names:
        stage.add_module(name, getattr(model, name))
    if rank == 1:
        stage.register_buffer("scale", model.scale)
    return rank, stage


def _of_stage(hybrid, rank):
    """Return the saver of one pipeline rank, the only one of its stage."""
    saver = object.__new__(hybrid.HybridParallelCheckpointIO)
    vars(saver).update(
        {
            "use_zero": False,
            "verbose": False,
            "dp_rank": 0,
            "tp_rank": 0,
            "tp_size": 1,
            "sp_rank": 0,
        },
        async_writers=[],
        pp_rank=rank,
        pp_size=2,
        pp_group=dist.group.WORLD,
        tp_group=dist.group.WORLD,
        global_dp_group=dist.group.WORLD,
    )
    return saver


CASES = {
    "plain": lambda out, begun: _plain(out, begun, use_safetensors=False),
    "safetensors": lambda out, begun: _plain(out, begun, use_safetensors=True),
    "pipeline": _pipeline,
}
_REAL = ("colossalai", "colossalai.checkpoint_io", "colossalai.utils")
_STOOD_IN = ("accelerator", "cluster", "interface", "interface.model", "logging", "tensor")


def _packages(source):
    """Import the package without the imports of its ``__init__`` files; stub what needs kernels."""
    for name in _REAL:
        package = types.ModuleType(name)
        package.__path__ = [str(source / name.replace(".", "/"))]
        sys.modules[name] = package
    utils = sys.modules["colossalai.utils"]
    utils.get_current_device = lambda: torch.device("cpu")
    utils.get_non_persistent_buffers_set = lambda _model: set()
    whole = {"is_distributed_tensor": lambda _held: False}
    whole |= {"is_customized_distributed_tensor": lambda _held: False}
    for name in (*_STOOD_IN, "tensor.d_tensor", "tensor.padded_tensor"):
        stub = types.ModuleType(f"colossalai.{name}")
        stub.__path__ = []
        for each in ("ModelWrapper", "OptimizerWrapper", "PeftUnwrapMixin", "DistCoordinator"):
            vars(stub)[each] = type(each, (), {})
        vars(stub).update(whole, is_padded_tensor=lambda _held: False)
        for each in ("to_global", "to_global_for_customized_distributed_tensor"):
            vars(stub)[each] = None
        vars(stub)["get_accelerator"] = lambda: types.SimpleNamespace(synchronize=lambda: None)
        for each in ("init_as_padded_tensor", "to_padded_tensor", "to_unpadded_tensor"):
            vars(stub)[each] = None
        vars(stub)["get_dist_logger"] = lambda: None
        sys.modules[f"colossalai.{name}"] = stub


def main():
    """Make the cases that are named, or all."""
    torch.set_num_threads(1)
    _packages(Path(os.environ["RESHARD_COLOSSALAI"]))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    out, *names = sys.argv[1:]
    with stand_in(("peft", "tensornvme", "transformers")):
        for name, _, begun in (each.partition("=") for each in names or CASES):
            place = Path(out) / name
            (place / "ckpt").mkdir(parents=True)
            CASES[name](place, Path(begun) if begun else None)


if __name__ == "__main__":
    main()
