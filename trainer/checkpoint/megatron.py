"""Write Megatron-LM's checkpoint directory in its ``torch`` format: a file per model-parallel rank.

``latest_checkpointed_iteration.txt`` and ``iter_NNNNNNN/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``
(megatron/training/checkpointing.py, get_checkpoint_name, core 0.16). The checkpoint's directory is
what ``--load`` of Megatron-LM takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpoint import foreign, megatron_args
from trainer.checkpoint.contents import Content, Nothing, TextFile, TorchFile
from trainer.checkpoint.directory import MEGATRON_LATEST
from trainer.checkpoint.megatron_rules import Rule, Sizes, derive_sizes, list_rules
from trainer.config.huggingface import load_model_config
from trainer.core.engine import DTYPES
from trainer.core.fsdp import ShardedEngine
from trainer.core.optimizer import ParamGroup, make_hyperparameters
from trainer.errors import CheckpointError
from trainer.parallel.grid import Grid
from trainer.scaling import LossScaler

MOMENTS = ("exp_avg", "exp_avg_sq")
_LINEAR = ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2", "output_layer")
"""Modules that have an ``_extra_state`` for fp8; None here."""


def name_file(grid: Grid, tp: int, pp: int, ep: int) -> str:
    """Return the name of a model-parallel rank's file, relative to ``iter_NNNNNNN``.

    >>> name_file(Grid(tp=2, pp=2), 1, 0, 0), name_file(Grid(tp=2, ep=2), 1, 0, 1)
    ('mp_rank_01_000/model_optim_rng.pt', 'mp_rank_01_001/model_optim_rng.pt')
    """
    name = f"mp_rank_{tp:02d}"
    name += f"_{pp:03d}" if grid.pp > 1 else ""
    name += f"_{ep:03d}" if grid.ep > 1 else ""
    return f"{name}/model_optim_rng.pt"


def list_stage_rules(sizes: Sizes, stage: int, stages: int) -> list[Rule]:
    """Return the rules of one stage; Megatron-LM gives all stages equally many layers.

    Raises:
        CheckpointError: the stages do not divide the layers.
    """
    if sizes.layers % stages:
        raise CheckpointError(
            f"Megatron-LM's layout gives all stages equally many layers, and --pp {stages} does "
            f"not divide {sizes.layers}",
            "use --state-dict-type sharded, or another --pp",
        )
    each = sizes.layers // stages
    layers = range(stage * each, (stage + 1) * each)
    return list(list_rules(sizes, layers, first=stage == 0, last=stage == stages - 1))


def collect(engine: ShardedEngine, progress: dict[str, Any]) -> Iterator[Content]:
    """Yield this rank's file. Collective: parameters are gathered one rule at a time.

    Args:
        engine: the model and its optimizer.
        progress: the fields of `Progress`.

    Raises:
        CheckpointError: the model cannot be cut as Megatron-LM cuts it.
    """
    settings, grid = engine.settings, engine.settings.grid
    config = load_model_config(settings)
    padded = megatron_args.pad_vocabulary(config.vocab_size, grid.tp)
    sizes = derive_sizes(config, padded_vocab=padded, tp=grid.tp, ep=grid.ep)
    rank = engine.ranks.rank
    pp, tp, ep = grid.stage_index(rank), *grid.tensor_and_expert_index(rank)
    content_of_rank = _RankContent(engine, list_stage_rules(sizes, pp, grid.pp), tp, ep)
    writes = grid.data_index(rank) == 0
    content: dict[str, Any] = {
        "args": megatron_args.make_arguments(settings, config, progress, rank),
        "checkpoint_version": 3.0,
        "iteration": progress["step"],
        "model": content_of_rank.make_model(DTYPES[settings.precision]),
        "optimizer": content_of_rank.make_optimizer(),
        "opt_param_scheduler": megatron_args.make_scheduler(settings, progress["updates"]),
        "rng_state": megatron_args.get_random_states(),
        "num_floating_point_operations_so_far": 0,
    }
    name = f"iter_{progress['step']:07d}/{name_file(grid, tp, pp, ep)}"
    yield TorchFile(name, content, foreign) if writes else Nothing()
    yield TextFile(MEGATRON_LATEST, str(progress["step"])) if engine.ranks.is_first else Nothing()


class _RankContent:
    """The tensors of one model-parallel rank, named and cut as in Megatron-LM.

    Raises:
        CheckpointError: the model has a parameter without a rule, or lacks one that a rule names.
    """

    def __init__(self, engine: ShardedEngine, rules: list[Rule], tp: int, ep: int) -> None:
        self._engine, self._rules, self._indices = engine, rules, (tp, ep)
        self._live = dict(engine.model.named_parameters())
        named = {name for rule in rules for name in rule.names}
        if unmatched := sorted(named ^ {*self._live}):
            raise CheckpointError(
                f"Megatron-LM's layout has no rule for {unmatched[0]}",
                "use --state-dict-type sharded",
            )
        live = self._live
        self.masters = self._cut(lambda name: live[name].detach())
        state = engine.optimizer.state
        self.moments = {
            kind: self._cut({name: state[p][kind] for name, p in live.items()}.__getitem__)
            for kind in MOMENTS
        }

    def _cut(self, get: Callable[[str], Tensor]) -> OrderedDict[str, Tensor]:
        """Return Megatron key -> this rank's part of what ``get`` returns for each name."""
        parts: OrderedDict[str, Tensor] = OrderedDict()
        for rule in self._rules:
            wholes = [_gather(get(name)) for name in rule.names]
            for key, part in zip(rule.keys, rule.cut(wholes, *self._indices), strict=True):
                parts[key] = part.clone()  # torch saves the whole storage of a view
        return parts

    def make_model(self, dtype: torch.dtype) -> OrderedDict[str, Tensor | None]:
        """Return the weights by key."""
        weights: OrderedDict[str, Tensor | None] = OrderedDict()
        for key, part in self.masters.items():
            weights[key] = part.to(dtype)
            module, _, leaf = key.rpartition(".")
            is_last = leaf == "bias" or f"{module}.bias" not in self.masters
            if module.endswith(_LINEAR) and is_last:
                weights[f"{module}._extra_state"] = None
        return weights

    def make_optimizer(self) -> Any:
        """Return the optimizer's state, or a list of two: dense parameters, and experts."""
        if self._engine.settings.ep == 1:
            return self._make_state(experts=None)
        return [self._make_state(experts=False), self._make_state(experts=True)]

    def _make_state(self, *, experts: bool | None) -> dict[str, Any]:
        """Return the state of all parameters (None), of the experts, or of all others."""
        groups, masters = [], []
        state: dict[int, dict[str, Tensor]] = {}
        for group, live in zip(
            self._engine.groups, self._engine.optimizer.param_groups, strict=True
        ):
            keys = self._list_keys(group, experts)
            if not keys:
                continue
            numbers = range(len(state), len(state) + len(keys))
            for number, key in zip(numbers, keys, strict=True):
                step = self._engine.optimizer.state[live["params"][0]]["step"]
                moments = {kind: self.moments[kind][key] for kind in MOMENTS}
                state[number] = {"step": step.clone(), **moments}
            groups.append(self._make_group(group, live["lr"], [*numbers], expert=bool(experts)))
            masters.append([self.masters[key] for key in keys])
        inner = {"state": state, "param_groups": groups}
        precision = self._engine.settings.precision
        if precision == "fp32":
            return inner
        scaler = {"grad_scaler": _make_scaler(self._engine.scaler)} if precision == "fp16" else {}
        return {"optimizer": inner, **scaler, "fp32_from_fp16_params": masters}

    def _list_keys(self, group: ParamGroup, experts: bool | None) -> list[str]:
        return [
            key
            for rule in self._rules
            if rule.names[0] in group.names and experts in (None, rule.expert)
            for key in rule.keys
        ]

    def _make_group(
        self, group: ParamGroup, lr: float, numbers: Sequence[int], *, expert: bool
    ) -> dict[str, Any]:
        settings = self._engine.settings
        return {
            "is_expert_parallel": expert,
            "default_config": True,
            "wd_mult": 1.0 if group.weight_decay else 0.0,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "max_lr": settings.lr,
            "min_lr": settings.warmup_min_lr if settings.schedule != "constant" else settings.lr,
            **make_hyperparameters(settings, group.weight_decay, lr),
            "params": [*numbers],
        }


def _gather(tensor: Tensor) -> Tensor:
    return cast("DTensor", tensor).full_tensor().cpu()


def _make_scaler(scaler: LossScaler) -> dict[str, Any]:
    """Return ``grad_scaler`` (megatron/core/optimizer/grad_scaler.py)."""
    if not scaler.dynamic:
        return {}
    return {
        "scale": torch.tensor([scaler.scale]),
        "growth_tracker": max(0, scaler.iteration - scaler.last_overflow - 1),
        "hysteresis_tracker": scaler.patience,
    }
