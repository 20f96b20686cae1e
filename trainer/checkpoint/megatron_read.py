"""Megatron-LM's files of any tensor, pipeline and expert size, read into DTensors of any grid."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.checkpoint import files, foreign, fsdp_match
from trainer.checkpoint.directory import MEGATRON_LATEST
from trainer.checkpoint.megatron import MOMENTS, ShardedState, file_name, stage_rules
from trainer.checkpoint.megatron_rules import Rule, sizes_of
from trainer.errors import CheckpointError
from trainer.model import configuration
from trainer.parallel.grid import Grid

_REMEDY = "resume with the run's own model, or convert it: reshard split CHECKPOINT OUT --to fsdp"


def read(directory: Path, held: ShardedState) -> dict[str, Any]:
    """Fill this rank's shards, one whole parameter at a time.

    Returns:
        What the files tell of the progress, see ``Engine.load``.

    Raises:
        CheckpointError: files are missing, or of another model or form.
    """
    saved = Saved(directory, configuration(held.settings))
    live = dict(held.model.named_parameters())
    left = set(live)
    for name, values in saved.tensors(set(live)):
        parameter = live[name]
        if parameter.shape != values["param"].shape:
            raise CheckpointError(
                f"{directory}: {name} is {tuple(values['param'].shape)}, this run has "
                f"{tuple(parameter.shape)}",
                _REMEDY,
            )
        state = held.optimizer.state[parameter]
        for kind, mine in (("param", parameter.detach()), *((k, state[k]) for k in MOMENTS)):
            local = mine.to_local() if hasattr(mine, "to_local") else mine
            local.copy_(fsdp_match.piece(values[kind], mine))
        state["step"].copy_(values["step"])
        left.discard(name)
    if left:
        raise CheckpointError(f"{directory} has no {min(left)}", _REMEDY)
    args, step = saved.args, saved.iteration
    samples = getattr(args, "consumed_train_samples", 0) or step * args.global_batch_size
    skipped = step - int(max(saved.steps, default=step))
    return {"step": step, "skipped": skipped, "samples": samples, "updates": step - skipped}


class Saved:
    """The files of one iteration.

    Args:
        config: of transformers, of the same model.
    """

    def __init__(self, directory: Path, config: Any) -> None:
        self._directory = directory / f"iter_{_latest(directory):07d}"
        self._files: dict[tuple[int, int, int], _File] = {}
        first = next(iter(sorted(self._directory.glob("mp_rank_00*/model_optim_rng.pt"))), None)
        if first is None:
            raise CheckpointError(
                f"{self._directory} has no mp_rank_00/model_optim_rng.pt",
                "copy it from where the run was saved",
            )
        self.args: Any = _load(first)["args"]
        self._refuse()
        args = self.args
        self._grid = Grid(
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            ep=getattr(args, "expert_model_parallel_size", 1),
        )
        self._sizes = sizes_of(
            config, padded_vocab=args.padded_vocab_size or 0, tp=self._grid.tp, ep=self._grid.ep
        )
        self.iteration = _latest(directory)
        self.steps: set[float] = set()

    def tensors(self, wanted: set[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(name in transformers, ``param`` as fp32, moments and ``step``), of those ``wanted``.

        Raises:
            CheckpointError: the optimizer has no state of a weight.
        """
        for stage in range(self._grid.pp):
            for rule in stage_rules(self._sizes, stage, self._grid.pp):
                if wanted.intersection(rule.names):
                    yield from self._joined(rule, stage)

    def _joined(self, rule: Rule, stage: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
        def parts(kind: str) -> list[Tensor]:
            return rule.join(lambda tp, ep, key: self._file(tp, stage, ep).tensor(kind, key))

        kinds = {kind: parts(kind) for kind in ("param", *MOMENTS)}
        step = self._file(0, stage, 0).tensor("step", rule.keys[0])
        self.steps.add(float(step))
        for number, name in enumerate(rule.names):
            yield name, {**{kind: found[number] for kind, found in kinds.items()}, "step": step}

    def _file(self, tp: int, stage: int, ep: int) -> _File:
        place = (tp, stage, ep)
        if place not in self._files:
            path = self._directory / file_name(self._grid, *place)
            own = stage_rules(self._sizes, stage, self._grid.pp)
            self._files[place] = _File(path, own, ep_apart=self._grid.ep > 1)
        return self._files[place]

    def _refuse(self) -> None:
        """What the rules here are not for."""
        args = self.args
        problems = {
            "a distributed optimizer's": getattr(args, "use_distributed_optimizer", False),
            "interleaved stages'": getattr(args, "virtual_pipeline_model_parallel_size", None),
            "a stage layout's": getattr(args, "pipeline_model_parallel_layout", None),
        }
        for whose, there in problems.items():
            if there:
                raise CheckpointError(f"{self._directory} is {whose} files", _REMEDY)


class _File:
    """One rank's tensors by kind and key."""

    def __init__(self, path: Path, own: list[Rule], *, ep_apart: bool) -> None:
        self._path = path
        content = _load(path)
        try:
            self._weights = content["model"]
            self._index: dict[str, tuple[dict[str, Tensor], Tensor | None]] = {}
            optimizers = content["optimizer"] if ep_apart else [content["optimizer"]]
            for optimizer, experts in zip(optimizers, (False, True), strict=False):
                mine = [r for r in own if not ep_apart or r.expert == experts]
                self._number(optimizer, [key for rule in mine for key in rule.keys])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise CheckpointError(
                f"{path} has not the form of Megatron-LM's torch format: {error!r}", _REMEDY
            ) from error

    def _number(self, optimizer: dict[str, Any], keys: list[str]) -> None:
        """Say whose each state is: the groups are of matrices, then of vectors, or one of all."""
        inner = optimizer.get("optimizer", optimizer)
        masters = optimizer.get("fp32_from_fp16_params")
        groups = inner["param_groups"]
        matrices = [key for key in keys if self._weights[key].ndim > 1]
        vectors = [key for key in keys if self._weights[key].ndim <= 1]
        named = [keys] if len(groups) == 1 else [matrices, vectors]
        for number, (group, mine) in enumerate(zip(groups, named, strict=True)):
            for place, (index, key) in enumerate(zip(group["params"], mine, strict=True)):
                master = masters[number][place] if masters else None
                self._index[key] = inner["state"][index], master

    def tensor(self, kind: str, key: str) -> Tensor:
        """A kind of one key; ``param`` is the master where there is one."""
        if key not in self._index:
            raise CheckpointError(f"{self._path} has no optimizer state of {key}", _REMEDY)
        state, master = self._index[key]
        if kind == "param":
            return (master if master is not None else self._weights[key]).float()
        return state[kind]


def _latest(directory: Path) -> int:
    text = (directory / MEGATRON_LATEST).read_text().strip()
    if not text.isdigit():
        raise CheckpointError(
            f"{directory / MEGATRON_LATEST} says {text[:40]!r}, expected an iteration", _REMEDY
        )
    return int(text)


def _load(path: Path) -> dict[str, Any]:
    """A file's content, made of nothing but data.

    Raises:
        CheckpointError: it is missing, damaged, or asks for other classes.
    """
    numpy: list[Any] = [
        np.ndarray,
        np.dtype,
        type(np.dtype(np.uint32)),
        (_array, "numpy.core.multiarray._reconstruct"),
        (_array, "numpy._core.multiarray._reconstruct"),
    ]
    with foreign.allowed(), torch.serialization.safe_globals([Namespace, Signals, *numpy]):
        content: dict[str, Any] = files.load(path)
    return content


def _array(*arguments: Any) -> np.ndarray[Any, Any]:
    """An empty array, which a pickle then fills."""
    kind, shape, dtype = arguments
    array: np.ndarray[Any, Any] = np.ndarray.__new__(kind, shape, dtype)
    return array
