"""Megatron-LM's own checkpoint directory, its ``torch`` format: one file a model-parallel rank.

``latest_checkpointed_iteration.txt`` and ``iter_NNNNNNN/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``
(megatron/training/checkpointing.py, get_checkpoint_name, core 0.16). The checkpoint's directory is
what ``--load`` of Megatron-LM takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from trainer.checkpoint import files, foreign, megatron_args
from trainer.checkpoint.directory import MEGATRON_LATEST
from trainer.checkpoint.megatron_rules import Rule, Sizes, rules, sizes_of
from trainer.errors import CheckpointError
from trainer.model import configuration
from trainer.optimizer import ParamGroup, hyperparameters
from trainer.parallel.grid import Grid
from trainer.ranks import Ranks
from trainer.scaling import LossScaler
from trainer.settings import Settings
from trainer.tensors import DTYPES

MOMENTS = ("exp_avg", "exp_avg_sq")
_LINEAR = ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2", "output_layer")
"""Modules that keep an ``_extra_state`` for fp8; None here."""


class ShardedState(Protocol):
    """One rank's model and optimizer of DTensors."""

    settings: Settings
    ranks: Ranks
    model: nn.Module
    optimizer: AdamW
    groups: list[ParamGroup]
    scaler: LossScaler


def file_name(grid: Grid, tp: int, pp: int, ep: int) -> str:
    """Of one model-parallel rank, below ``iter_NNNNNNN``.

    >>> file_name(Grid(tp=2, pp=2), 1, 0, 0), file_name(Grid(tp=2, ep=2), 1, 0, 1)
    ('mp_rank_01_000/model_optim_rng.pt', 'mp_rank_01_001/model_optim_rng.pt')
    """
    name = f"mp_rank_{tp:02d}"
    name += f"_{pp:03d}" if grid.pp > 1 else ""
    name += f"_{ep:03d}" if grid.ep > 1 else ""
    return f"{name}/model_optim_rng.pt"


def stage_rules(sizes: Sizes, stage: int, stages: int) -> list[Rule]:
    """Of one stage; Megatron-LM gives each as many layers.

    Raises:
        CheckpointError: they do not divide.
    """
    if sizes.layers % stages:
        raise CheckpointError(
            f"Megatron-LM's layout gives each stage as many layers, and pp {stages} does not "
            f"divide {sizes.layers}",
            "use --state-dict-type sharded, or another --pp",
        )
    each = sizes.layers // stages
    layers = range(stage * each, (stage + 1) * each)
    return list(rules(sizes, layers, first=stage == 0, last=stage == stages - 1))


def write(directory: Path, held: ShardedState, progress: dict[str, Any]) -> None:
    """Write this rank's file. Collective: parameters are gathered one rule at a time.

    Args:
        progress: see ``Engine.save``.

    Raises:
        CheckpointError: the model cannot be cut as Megatron-LM cuts it.
    """
    settings, grid = held.settings, held.settings.grid
    config = configuration(settings)
    padded = megatron_args.padded_vocabulary(config.vocab_size, grid.tp)
    sizes = sizes_of(config, padded_vocab=padded, tp=grid.tp, ep=grid.ep)
    pp, tp, ep = grid.stage_of(held.ranks.rank), *grid.cut_of(held.ranks.rank)
    own = _Gathered(held, stage_rules(sizes, pp, grid.pp), tp, ep)
    writes = grid.data_of(held.ranks.rank) == 0
    content: dict[str, Any] = {
        "args": megatron_args.arguments(settings, config, progress, held.ranks.rank),
        "checkpoint_version": 3.0,
        "iteration": progress["step"],
        "model": own.model(DTYPES[settings.precision]),
        "optimizer": own.optimizer(),
        "opt_param_scheduler": megatron_args.scheduler(settings, progress["updates"]),
        "rng_state": megatron_args.generators(),
        "num_floating_point_operations_so_far": 0,
    }
    iteration = directory / f"iter_{progress['step']:07d}"
    if writes:
        path = iteration / file_name(grid, tp, pp, ep)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.save(content, path, pickle_module=foreign)
    if held.ranks.first:
        files.write_text(directory / MEGATRON_LATEST, str(progress["step"]))


class _Gathered:
    """One model-parallel rank's tensors, as Megatron-LM has them.

    Raises:
        CheckpointError: the model has a parameter that no rule names, or lacks one.
    """

    def __init__(self, held: ShardedState, own: list[Rule], tp: int, ep: int) -> None:
        self._held, self._rules, self._place = held, own, (tp, ep)
        self._live = dict(held.model.named_parameters())
        named = {name for rule in own for name in rule.names}
        if odd := sorted(named ^ {*self._live}):
            raise CheckpointError(
                f"Megatron-LM's layout has no rule for {odd[0]}", "use --state-dict-type sharded"
            )
        live = self._live
        self.masters = self._cut(lambda name: live[name].detach())
        state = held.optimizer.state
        self.moments = {
            kind: self._cut(lambda name, k=kind: state[live[name]][k]) for kind in MOMENTS
        }

    def _cut(self, of: Any) -> OrderedDict[str, Tensor]:
        """Megatron key -> this rank's part of what ``of`` has for each name."""
        parts: OrderedDict[str, Tensor] = OrderedDict()
        for rule in self._rules:
            wholes = [_whole(of(name)) for name in rule.names]
            for key, part in zip(rule.keys, rule.cut(wholes, *self._place), strict=True):
                parts[key] = part.clone()  # a view would be saved with all that it is a view of
        return parts

    def model(self, dtype: torch.dtype) -> OrderedDict[str, Tensor | None]:
        """Weights by key."""
        found: OrderedDict[str, Tensor | None] = OrderedDict()
        for key, part in self.masters.items():
            found[key] = part.to(dtype)
            module, _, leaf = key.rpartition(".")
            complete = leaf == "bias" or f"{module}.bias" not in self.masters
            if module.endswith(_LINEAR) and complete:
                found[f"{module}._extra_state"] = None
        return found

    def optimizer(self) -> Any:
        """The state of its one optimizer, or a list of two: the experts' of each rank are apart."""
        if self._held.settings.ep == 1:
            return self._one(experts=None)
        return [self._one(experts=False), self._one(experts=True)]

    def _one(self, *, experts: bool | None) -> dict[str, Any]:
        """Of all parameters, or of those that are or are not experts'."""
        groups, masters = [], []
        state: dict[int, dict[str, Tensor]] = {}
        for group, live in zip(self._held.groups, self._held.optimizer.param_groups, strict=True):
            keys = self._keys(group, experts)
            if not keys:
                continue
            numbers = range(len(state), len(state) + len(keys))
            for number, key in zip(numbers, keys, strict=True):
                step = self._held.optimizer.state[live["params"][0]]["step"]
                moments = {kind: self.moments[kind][key] for kind in MOMENTS}
                state[number] = {"step": step.clone(), **moments}
            groups.append(self._group(group, live["lr"], [*numbers], expert=bool(experts)))
            masters.append([self.masters[key] for key in keys])
        inner = {"state": state, "param_groups": groups}
        precision = self._held.settings.precision
        if precision == "fp32":
            return inner
        scaler = {"grad_scaler": _scaler(self._held.scaler)} if precision == "fp16" else {}
        return {"optimizer": inner, **scaler, "fp32_from_fp16_params": masters}

    def _keys(self, group: ParamGroup, experts: bool | None) -> list[str]:
        return [
            key
            for rule in self._rules
            if rule.names[0] in group.names and experts in (None, rule.expert)
            for key in rule.keys
        ]

    def _group(
        self, group: ParamGroup, lr: float, numbers: Sequence[int], *, expert: bool
    ) -> dict[str, Any]:
        settings = self._held.settings
        return {
            "is_expert_parallel": expert,
            "default_config": True,
            "wd_mult": 1.0 if group.weight_decay else 0.0,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "max_lr": settings.lr,
            "min_lr": settings.warmup_min_lr if settings.schedule != "constant" else settings.lr,
            **hyperparameters(settings, group.weight_decay, lr),
            "params": [*numbers],
        }


def _whole(tensor: Tensor) -> Tensor:
    return cast("DTensor", tensor).full_tensor().cpu()


def _scaler(scaler: LossScaler) -> dict[str, Any]:
    """``grad_scaler`` (megatron/core/optimizer/grad_scaler.py)."""
    if not scaler.dynamic:
        return {}
    return {
        "scale": torch.tensor([scaler.scale]),
        "growth_tracker": max(0, scaler.iteration - scaler.last_overflow - 1),
        "hysteresis_tracker": scaler.patience,
    }
