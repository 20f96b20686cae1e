"""Read a mixture of experts without ZeRO: each expert-parallel rank has its own optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.torch_objects import TorchFile
from reshard.core.manifest import BUFFER, PARAM, Manifest
from reshard.core.schema import expect, fields, maybe
from reshard.errors import TWO_RUNS, IncompleteError, StaleError, UnsupportedError
from reshard.formats.deepspeed import native
from reshard.formats.deepspeed.directory import TagFiles
from reshard.formats.deepspeed.experts.files import Expert, count_experts, insert_experts
from reshard.formats.deepspeed.experts.layout import find_expert_parallel_size, parse_expert_name
from reshard.formats.deepspeed.schemas import OPTIMIZER
from reshard.formats.deepspeed.stage0 import unwrap_optimizer
from reshard.formats.deepspeed.states import ModelStates
from reshard.layouts.model_parallel import combine


def leave_out_repeated(files: TagFiles) -> TagFiles:
    """Return the files of a run without ``expp_rank_*`` that add nothing to ``zero_pp_rank_*``.

    DeepSpeed before 0.19 writes both. Beside ZeRO, ``expp_rank_*`` holds None. Beside
    BF16_Optimizer at stage 0 (before 0.17), it repeats what ``zero_pp_rank_*`` holds (0.16.9
    ``runtime/engine.py``, ``_save_moe_checkpoint``).
    """
    if not files.ranks[0].optim:
        return files
    optimizers = [_get_optimizer(_open(files, rank)) for rank, _ in files.expert_optim]
    if all(not optimizer or "base_optimizer_state" in optimizer for optimizer in optimizers):
        return replace(files, expert_optim={})
    return files


def read(
    files: TagFiles, first: ModelStates, experts: Sequence[Expert], position: Mapping[str, int]
) -> tuple[Manifest, Mapping[str, int]]:
    """Read the ranks one by one, as their optimizers are stored by index, and join them.

    Args:
        position: fqn -> its position in the module.

    Returns:
        The manifest, and how many ranks share the experts of each layer.

    Raises:
        IncompleteError: a rank's file is missing.
        StaleError: files of two runs are mixed.
        UnsupportedError: the layers of experts are shared by different numbers of ranks.
    """
    count = 1 + max(rank for rank, _ in files.expert_optim)
    optimizers = [_open(files, rank) for rank in range(count)]
    counts = count_experts(experts)
    for file in optimizers:
        _check_sizes(file, count, counts)
    per_rank = {layer: total // count for layer, total in counts.items()}
    ranks = []
    for rank, file in enumerate(optimizers):
        own = [e for e in experts if e.number * count // counts[e.layer] == rank]
        optimizer = _with_global_names(_get_optimizer(file), rank, per_rank)
        root = first.root | {"module": insert_experts(first, own), "optimizer": optimizer}
        opened = [file, *(expert.file for expert in own)]
        manifest = native.read(files.ranks[0], replace(first, root=root), opened)
        if rank:  # the weights outside the experts are in one file, which rank 0 has read already
            manifest = manifest.with_entries(
                entry
                for entry in manifest.entries.values()
                if entry.kind not in (PARAM, BUFFER) or parse_expert_name(entry.fqn)
            )
        ranks.append(manifest)
    joined = combine.join_stages(ranks)
    entries = sorted(
        joined.entries.values(), key=lambda entry: position.get(entry.fqn, len(position))
    )
    return joined.with_entries(entries), dict.fromkeys(counts, count)


def _open(files: TagFiles, rank: int) -> TorchFile:
    path = files.expert_optim.get((rank, 0))
    if path is None:
        raise IncompleteError(
            files.location,
            f"expp_rank_{rank}_mp_rank_00_optim_states.pt is missing",
            "copy it here",
        )
    file = torch_reader.read(path)
    expect(path, file.root, fields(optimizer=maybe(OPTIMIZER)))
    return file


def _get_optimizer(file: TorchFile) -> dict[str, Any]:
    optimizer: dict[str, Any] = file.root.get("optimizer") or {}
    return optimizer


def _with_global_names(
    optimizer: dict[str, Any], rank: int, per_rank: Mapping[str, int]
) -> dict[str, Any]:
    """Return an optimizer whose ``param_names``, if it has any, are those of the whole model.

    Args:
        per_rank: how many experts of each layer a rank has.
    """
    inner = unwrap_optimizer(optimizer)
    groups = inner.get("param_groups", [])
    if not any("param_names" in group for group in groups):
        return optimizer

    def get_global_name(fqn: str) -> str:
        own = parse_expert_name(fqn)
        return str(own.renumber(rank * per_rank[own.layer] + own.number)) if own else fqn

    renamed = [
        {
            **group,
            "param_names": [get_global_name(str(name)) for name in group.get("param_names", ())],
        }
        for group in groups
    ]
    inner = {**inner, "param_groups": renamed}
    is_wrapped = "optimizer_state_dict" in optimizer
    return {**optimizer, "optimizer_state_dict": inner} if is_wrapped else inner


def _check_sizes(file: TorchFile, count: int, counts: Mapping[str, int]) -> None:
    """Check that the number of files is the number of ranks that share each layer.

    Args:
        counts: experts of each layer.
    """
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
