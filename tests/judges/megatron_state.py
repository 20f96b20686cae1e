"""Read the state of Megatron-core's live models and optimizers, by parameter name."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from tests.judges.megatron_adam import whole_master
from tests.judges.megatron_cases import SEQUENCE
from tests.judges.megatron_data import EVALUATED, batch
from tests.judges.megatron_run import Run

MOMENTS = ("exp_avg", "exp_avg_sq")
SLOTS = ("fp32_param", *MOMENTS)


def whole(run: Run) -> dict[str, Any]:
    """Return the model of one rank, with the keys of the other judges' ``expected.pt``."""
    (model,) = run.models()
    names = {param: name for name, param in model.named_parameters()}
    held = {names[param]: slots for param, slots in _slots(run).items()}
    steps = {names[param]: step for param, step in _steps(run).items()}
    return {
        "params": {name: p.detach().clone() for p, name in names.items()},
        "buffers": {},
        "tied": {},
        "frozen": [name for name, param in model.named_parameters() if not param.requires_grad],
        "optimizer": {name: _full(slots) for name, slots in held.items()},
        "steps": steps,
        "groups": _groups(run, names),
        "scheduler": run.scheduler.state_dict(),
        "step": run.step,
        "tokens": batch(run.case.vocabulary, EVALUATED),
        "logits": _logits(run),
        "vocabulary": run.case.vocabulary,
    }


def local(run: Run) -> dict[str, Any]:
    """Return this rank's parameters and states by (chunk, name), flat if distributed."""
    names = {
        param: (i, name)
        for i, model in enumerate(run.models())
        for name, param in model.named_parameters()
    }
    return {
        "params": {name: p.detach().clone() for p, name in names.items()},
        "optimizer": {names[param]: slots for param, slots in _slots(run).items()},
        "extra": {
            (i, name): value
            for i, model in enumerate(run.models())
            for name, value in model.state_dict().items()
            if name.endswith("_extra_state")
        },
    }


def in_one_bucket(run: Run) -> Run:
    """Return the same state in a distributed optimizer with one bucket in each buffer.

    Megatron-core 0.16.1 saves ``fully_reshardable`` wrongly where padding ends a bucket before the
    last: it cuts tensors without padding at offsets that count it (the "issue #504" of
    core/optimizer/distrib_optimizer.py). Every rank must call this.
    """
    plain = Run(dataclasses.replace(run.case, bucket=None, one_bucket=True))
    for chunk, source in zip(plain.models(), run.models(), strict=True):
        chunk.load_state_dict(source.state_dict())
    plain.optimizer.load_state_dict(run.optimizer.state_dict())
    plain.scheduler.load_state_dict(run.scheduler.state_dict())
    plain.step = run.step
    same = {
        param: twin
        for chunk, other in zip(plain.models(), run.models(), strict=True)
        for param, twin in zip(chunk.parameters(), other.parameters(), strict=True)
    }
    slots = _slots(run)
    for optimizer in _optimizers(plain):
        group = optimizer.data_parallel_group
        for buffer in optimizer.buffers:
            for param in buffer.param_index_map:
                _give(optimizer, param, _gathered(slots.get(same[param]), group))
    return plain


def _gathered(held: dict[str, Any] | None, group: Any) -> dict[str, Tensor]:
    """Return slots of a whole parameter, flat, from the parts of a data parallel group."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, held, group=group)
    found = sorted((part for part in parts if part), key=lambda part: part["range"])
    return {name: torch.cat([part[name] for part in found]) for name in SLOTS}


@torch.no_grad()
def _give(optimizer: DistributedOptimizer, param: Tensor, slots: dict[str, Tensor]) -> None:
    """Set this rank's part of a parameter's slots."""
    if param in optimizer.model_param_group_index_map:
        part = optimizer._get_model_param_range_map(param)["param"]
        cut = {name: value[part.start : part.end] for name, value in slots.items()}
        cut["param"] = cut.pop("fp32_param")
        optimizer._set_main_param_and_optimizer_states(param, cut)


def _optimizers(run: Run) -> list[Any]:
    found = run.optimizer
    return found.chained_optimizers if isinstance(found, ChainedOptimizer) else [found]


def _slots(run: Run) -> dict[Tensor, dict[str, Any]]:
    """Return model parameter -> slots, with ``range`` where a rank has a flat part."""
    found: dict[Tensor, dict[str, Any]] = {}
    for optimizer in _optimizers(run):
        if isinstance(optimizer, DistributedOptimizer):
            for param in optimizer.model_param_gbuf_map:
                if param in optimizer.model_param_group_index_map:
                    held = dict(optimizer._get_main_param_and_optimizer_states(param))
                    part = optimizer._get_model_param_range_map(param)["param"]
                    own = param.detach().view(-1)[part.start : part.end]
                    held["fp32_param"] = whole_master(own, held.pop("param"))
                    found[param] = _cloned(held) | {
                        "range": (part.start, part.end),
                        "shape": tuple(param.shape),
                    }
            continue
        for model in run.models():
            for param in model.parameters():
                main = getattr(param, "main_param", None)
                main = param if main is None else main
                state = optimizer.optimizer.state.get(main)
                if state:
                    extra = {} if main is param else {"fp32_param": main}
                    found[param] = _cloned({**extra, **{k: state[k] for k in MOMENTS}})
    return found


def _cloned(slots: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in slots.items()}


def _full(slots: dict[str, Any]) -> dict[str, Tensor]:
    """Restore the shapes of slots that a distributed optimizer on one rank keeps flat."""
    shape, _ = slots.pop("shape", None), slots.pop("range", None)
    return {name: v if shape is None else v.view(shape) for name, v in slots.items()}


def _groups(run: Run, names: dict[Tensor, str]) -> list[dict[str, Any]]:
    """Return param groups of all optimizers in order, their parameters by name."""
    found = []
    for optimizer in _optimizers(run):
        mains = _mains(run, optimizer)
        for group in optimizer.param_groups:
            params = [names[mains[main]] for main in group["params"]]
            found.append({**group, "params": params})
    return found


def _steps(run: Run) -> dict[Tensor, float]:
    """Return the steps of Adam by model parameter, kept per parameter (PyTorch) or group (apex)."""
    found = {}
    for optimizer in _optimizers(run):
        mains = _mains(run, optimizer)
        for group in optimizer.param_groups:
            for main in group["params"]:
                held = optimizer.optimizer.state[main]
                found[mains[main]] = float(held["step"] if "step" in held else group["step"])
    return found


def _mains(run: Run, optimizer: Any) -> dict[Tensor, Tensor]:
    """Return what the optimizer steps -> the model's parameter."""
    if isinstance(optimizer, DistributedOptimizer):
        return {
            optimizer.optimizer.param_groups[group]["params"][order]: param
            for param, (group, order) in optimizer.model_param_group_index_map.items()
        }
    found = {}
    for model in run.models():
        for param in model.parameters():
            main = getattr(param, "main_param", None)
            found[param if main is None else main] = param
    return found


@torch.no_grad()
def _logits(run: Run) -> Tensor:
    """Return (samples, SEQUENCE, padded vocabulary) in float32."""
    (model,) = run.models()
    tokens = batch(run.case.vocabulary, EVALUATED)[:, :-1].contiguous()
    positions = torch.arange(SEQUENCE).expand_as(tokens)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    model.eval()
    if not run.config.mtp_num_layers:
        return model(tokens, positions, mask).float()
    found: list[Tensor] = []  # by the output layer: for multi-token prediction first
    hook = model.output_layer.register_forward_hook(lambda *each: found.append(each[-1][0]))
    model(tokens, positions, mask, labels=tokens)
    hook.remove()
    return found[-1].transpose(0, 1).float()
