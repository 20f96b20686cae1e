"""Read a mixture of experts without ZeRO: each expert-parallel rank has its own optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.torch_objects import TorchFile
from reshard.core.manifest import BUFFER, PARAM, Manifest
from reshard.core.schema import expect, fields, maybe
from reshard.errors import TWO_RUNS, IncompleteError, StaleError, UnsupportedError
from reshard.formats.deepspeed import tag_directory
from reshard.formats.deepspeed.directory import TagFiles
from reshard.formats.deepspeed.experts.files import Expert, count_experts, insert_experts
from reshard.formats.deepspeed.experts.layout import find_expert_parallel_size, parse_expert_name
from reshard.formats.deepspeed.schemas import OPTIMIZER
from reshard.formats.deepspeed.stage0 import unwrap_optimizer
from reshard.formats.deepspeed.states import ModelStates
from reshard.formats.deepspeed.train_state import join_groups
from reshard.state_dict.optimizers.hyper_parameters import read_hyper


def leave_out_repeated(files: TagFiles) -> TagFiles:
    """Return the files of a run without ``expp_rank_*`` that add nothing to ``zero_pp_rank_*``.

    DeepSpeed before 0.19 writes both. Beside ZeRO, ``expp_rank_*`` holds None. Beside
    BF16_Optimizer at stage 0 (before 0.17), it repeats what ``zero_pp_rank_*`` holds (0.16.9
    ``runtime/engine.py``, ``_save_moe_checkpoint``).
    """
    if not files.ranks[0].optim:
        return files
    optimizers = [_get_optimizer(_open(path)) for path in files.expert_optim.values()]
    if all(not optimizer or "base_optimizer_state" in optimizer for optimizer in optimizers):
        return replace(files, expert_optim={})
    return files


def read(
    files: TagFiles, firsts: Sequence[ModelStates], experts: Sequence[Expert]
) -> tuple[list[tuple[int, Manifest]], Mapping[str, int]]:
    """Read the expert-parallel ranks one by one, as their optimizers are stored by index.

    Args:
        firsts: the model states of each model-parallel rank.

    Returns:
        For each expert-parallel rank its model-parallel rank, and the manifest of what it holds.
        Weights outside the experts are those of the first that has them. And how many ranks share
        the experts of each layer.

    Raises:
        IncompleteError: a rank's file is missing.
        StaleError: files of two runs are mixed.
        UnsupportedError: the layers of experts are shared by different numbers of ranks.
    """
    paths = _list_paths(files)
    optimizers = [(number, _open(path)) for number, path in paths]
    count = len(optimizers)
    counts = count_experts(experts)
    for _, file in optimizers:
        _check_sizes(file, count, counts)
    # Every rank has the groups of the whole model, each with its own experts.
    join_groups({file.path: _list_settings(file) for _, file in optimizers})
    per_rank = {layer: total // count for layer, total in counts.items()}
    ranks: list[tuple[int, Manifest]] = []
    for rank, (number, file) in enumerate(optimizers):
        own = [e for e in experts if e.number * count // counts[e.layer] == rank]
        optimizer = _with_global_names(_get_optimizer(file), rank, per_rank)
        first = firsts[number]
        root = first.root | {
            "module": insert_experts(first, own),
            "buffer_names": [_name_globally(n, rank, per_rank) for n in sorted(first.buffers)],
            "optimizer": optimizer,
        }
        opened = [file, *(expert.file for expert in own)]
        manifest = tag_directory.read(files.ranks[number], replace(first, root=root), opened)
        if any(number == other for other, _ in ranks):  # one file has the weights beside experts
            manifest = manifest.with_entries(
                entry
                for entry in manifest.entries.values()
                if entry.kind not in (PARAM, BUFFER) or parse_expert_name(entry.fqn)
            )
        ranks.append((number, manifest))
    return ranks, dict.fromkeys(counts, count)


def _list_paths(files: TagFiles) -> list[tuple[int, Path]]:
    paths: dict[int, tuple[int, Path]] = {}
    for (rank, number), path in sorted(files.expert_optim.items()):
        if rank in paths:
            raise StaleError(
                path,
                f"repeats the optimizer of {paths[rank][1].name}, but tensor-parallel ranks have"
                " each expert whole here",
                TWO_RUNS,
            )
        paths[rank] = number, path
    missing = next((rank for rank in range(max(paths)) if rank not in paths), None)
    if missing is not None:
        raise IncompleteError(
            files.location,
            f"expp_rank_{missing}_mp_rank_{files.number:02d}_optim_states.pt is missing",
            "copy it here",
        )
    return [paths[rank] for rank in sorted(paths)]


def _open(path: Path) -> TorchFile:
    file = torch_reader.read(path)
    expect(path, file.root, fields(optimizer=maybe(OPTIMIZER)))
    return file


def _get_optimizer(file: TorchFile) -> dict[str, Any]:
    optimizer: dict[str, Any] = file.root.get("optimizer") or {}
    return optimizer


def _list_settings(file: TorchFile) -> list[tuple[dict[str, Any], list[int]]]:
    groups = unwrap_optimizer(_get_optimizer(file)).get("param_groups", [])
    return [(read_hyper(group), []) for group in groups]


def _with_global_names(
    optimizer: dict[str, Any], rank: int, per_rank: Mapping[str, int]
) -> dict[str, Any]:
    """Return an optimizer whose ``param_names``, if it has any, are those of the whole model."""
    inner = unwrap_optimizer(optimizer)
    groups = inner.get("param_groups", [])
    if not any("param_names" in group for group in groups):
        return optimizer
    renamed = [
        {
            **group,
            "param_names": [
                _name_globally(str(name), rank, per_rank) for name in group.get("param_names", ())
            ],
        }
        for group in groups
    ]
    inner = {**inner, "param_groups": renamed}
    is_wrapped = "optimizer_state_dict" in optimizer
    return {**optimizer, "optimizer_state_dict": inner} if is_wrapped else inner


def _name_globally(fqn: str, rank: int, per_rank: Mapping[str, int]) -> str:
    own = parse_expert_name(fqn)
    return str(own.renumber(rank * per_rank[own.layer] + own.number)) if own else fqn


def _check_sizes(file: TorchFile, count: int, counts: Mapping[str, int]) -> None:
    groups = unwrap_optimizer(_get_optimizer(file)).get("param_groups", [])
    sizes = {size for size in map(find_expert_parallel_size, groups) if size is not None}
    if len(sizes) > 1:
        raise UnsupportedError(
            file.path,
            "belongs to a run without ZeRO, whose layers of experts are shared by"
            f" {' or '.join(map(str, sorted(sizes)))} ranks: no file states which layer is shared"
            " by how many",
        )
    if sizes and max(sizes) > count:
        raise IncompleteError(
            file.path,
            f"belongs to a run with {max(sizes)} expert-parallel ranks, but there are optimizer"
            f" states of {count}",
            "copy the missing expp_rank_* files here",
        )
    uneven = any(total % count for total in counts.values())
    if uneven or (sizes and max(sizes) < count):
        raise StaleError(
            file.path,
            f"belongs to a run with {max(sizes, default=count)} expert-parallel ranks; there are"
            f" optimizer states of {count} and files of {sorted(counts.values())} experts per"
            " layer",
            TWO_RUNS,
        )
