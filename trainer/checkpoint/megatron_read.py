"""Read Megatron-LM's files of any tensor, pipeline and expert size into DTensors of any grid."""

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
from trainer.checkpoint.megatron import MOMENTS, list_stage_rules, name_file
from trainer.checkpoint.megatron_rules import Rule, derive_sizes
from trainer.config.huggingface import load_model_config
from trainer.core.fsdp import ShardedEngine
from trainer.errors import CheckpointError, LayoutError
from trainer.parallel.grid import Grid

_REMEDY = "resume with the model of the run that saved it"


def read(directory: Path, engine: ShardedEngine) -> dict[str, Any]:
    """Fill this rank's shards, one whole parameter at a time.

    Returns:
        The progress that the files record.

    Raises:
        CheckpointError: files are missing, or of another model or format.
    """
    saved = Saved(directory, load_model_config(engine.settings))
    live = dict(engine.model.named_parameters())
    left = set(live)
    for name, values in saved.iterate_tensors(set(live)):
        parameter = live[name]
        if parameter.shape != values["param"].shape:
            raise CheckpointError(
                f"{directory}: {name} is {tuple(values['param'].shape)}, and this run has "
                f"{tuple(parameter.shape)}",
                _REMEDY,
            )
        state = engine.optimizer.state[parameter]
        for kind, own in (("param", parameter.detach()), *((k, state[k]) for k in MOMENTS)):
            local = own.to_local() if hasattr(own, "to_local") else own
            local.copy_(fsdp_match.cut_like(values[kind], own))
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
        directory: the checkpoint.
        config: the configuration of transformers for the same model.
    """

    def __init__(self, directory: Path, config: Any) -> None:
        self.iteration = _read_latest(directory)
        self._directory = directory / f"iter_{self.iteration:07d}"
        self._files: dict[tuple[int, int, int], _File] = {}
        first = next(iter(sorted(self._directory.glob("mp_rank_00*/model_optim_rng.pt"))), None)
        if first is None:
            raise LayoutError(
                f"{self._directory} has no mp_rank_00/model_optim_rng.pt",
                "copy it from where the run was saved",
            )
        args: Any = _load(first).get("args")
        self.args = args
        self._check_supported(first)
        self._grid = Grid(
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            ep=getattr(args, "expert_model_parallel_size", 1),
        )
        self._sizes = derive_sizes(
            config, padded_vocab=args.padded_vocab_size or 0, tp=self._grid.tp, ep=self._grid.ep
        )
        self.steps: set[float] = set()

    def iterate_tensors(self, names: set[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (name in transformers, its fp32 ``param``, moments and ``step``) for ``names``."""
        for stage in range(self._grid.pp):
            for rule in list_stage_rules(self._sizes, stage, self._grid.pp):
                if names.intersection(rule.names):
                    yield from self._join(rule, stage)

    def _join(self, rule: Rule, stage: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
        def join_parts(kind: str) -> list[Tensor]:
            return rule.join(lambda tp, ep, key: self._open(tp, stage, ep).get_tensor(kind, key))

        kinds = {kind: join_parts(kind) for kind in ("param", *MOMENTS)}
        step = self._open(0, stage, 0).get_tensor("step", rule.keys[0])
        self.steps.add(float(step))
        for number, name in enumerate(rule.names):
            yield name, {**{kind: tensors[number] for kind, tensors in kinds.items()}, "step": step}

    def _open(self, tp: int, stage: int, ep: int) -> _File:
        place = (tp, stage, ep)
        if place not in self._files:
            path = self._directory / name_file(self._grid, *place)
            own = list_stage_rules(self._sizes, stage, self._grid.pp)
            self._files[place] = _File(path, own, separate_experts=self._grid.ep > 1)
        return self._files[place]

    def _check_supported(self, path: Path) -> None:
        """Raise CheckpointError for what the rules here do not cover."""
        args = self.args
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size")
        if missing := [name for name in sizes if not hasattr(args, name)]:
            raise CheckpointError(f"{path} has no args.{missing[0]}", _REMEDY)
        unsupported = {
            "a distributed optimizer": getattr(args, "use_distributed_optimizer", False),
            "interleaved stages": getattr(args, "virtual_pipeline_model_parallel_size", None),
            "a pipeline layout": getattr(args, "pipeline_model_parallel_layout", None),
        }
        for feature, used in unsupported.items():
            if used:
                raise LayoutError(f"{self._directory} was saved with {feature}")


class _File:
    """The tensors of one rank's file, by kind and key."""

    def __init__(self, path: Path, own: list[Rule], *, separate_experts: bool) -> None:
        self._path = path
        content = _load(path)
        try:
            self._weights = content["model"]
            self._index: dict[str, tuple[dict[str, Tensor], Tensor | None]] = {}
            optimizers = content["optimizer"] if separate_experts else [content["optimizer"]]
            for optimizer, experts in zip(optimizers, (False, True), strict=False):
                rules = [r for r in own if not separate_experts or r.expert == experts]
                self._index_states(optimizer, [key for rule in rules for key in rule.keys])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not in Megatron-LM's torch format: {error!r}", _REMEDY
            ) from error

    def _index_states(self, optimizer: dict[str, Any], keys: list[str]) -> None:
        """Map keys to states: there is a group of matrices and one of vectors, or one of all."""
        inner = optimizer.get("optimizer", optimizer)
        masters = optimizer.get("fp32_from_fp16_params")
        groups = inner["param_groups"]
        matrices = [key for key in keys if self._weights[key].ndim > 1]
        vectors = [key for key in keys if self._weights[key].ndim <= 1]
        grouped = [keys] if len(groups) == 1 else [matrices, vectors]
        for number, (group, own) in enumerate(zip(groups, grouped, strict=True)):
            for position, (index, key) in enumerate(zip(group["params"], own, strict=True)):
                master = masters[number][position] if masters else None
                self._index[key] = inner["state"][index], master

    def get_tensor(self, kind: str, key: str) -> Tensor:
        """Return one kind of tensor of a key; ``param`` is the master if there is one."""
        if key not in self._index:
            raise CheckpointError(f"{self._path} has no optimizer state for {key}", _REMEDY)
        state, master = self._index[key]
        if kind == "param":
            return (master if master is not None else self._weights[key]).float()
        return state[kind]


def _read_latest(directory: Path) -> int:
    path = directory / MEGATRON_LATEST
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", _REMEDY) from error
    if not text.isdigit():
        raise CheckpointError(
            f"{path} has {text[:40]!r}: expected the number of an iteration", _REMEDY
        )
    return int(text)


def _load(path: Path) -> dict[str, Any]:
    """Return the content of a file, which may only have data.

    Raises:
        CheckpointError: the file is missing or damaged, or names other classes.
    """
    numpy: list[Any] = [
        np.ndarray,
        np.dtype,
        type(np.dtype(np.uint32)),
        (_make_array, "numpy.core.multiarray._reconstruct"),
        (_make_array, "numpy._core.multiarray._reconstruct"),
    ]
    with foreign.allow_classes(), torch.serialization.safe_globals([Namespace, Signals, *numpy]):
        content: dict[str, Any] = files.load(path)
    files.check_keys(content, path)
    return content


def _make_array(*arguments: Any) -> np.ndarray[Any, Any]:
    """Return an empty array, which the unpickler fills."""
    kind, shape, dtype = arguments
    array: np.ndarray[Any, Any] = np.ndarray.__new__(kind, shape, dtype)
    return array
