"""A mixture of experts without ZeRO: each expert-parallel rank has an optimizer of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.torch_objects import TorchFile
from reshard.errors import IncompleteError, StaleError, UnsupportedError
from reshard.formats.deepspeed import expert_names, native
from reshard.formats.deepspeed.directory import Files
from reshard.formats.deepspeed.expert_files import Expert, counts_of, module_of
from reshard.formats.deepspeed.kinds import OPTIMIZER
from reshard.formats.deepspeed.states import ModelStates
from reshard.manifest import BUFFER, PARAM, Manifest
from reshard.model_parallel import combine
from reshard.schema import expect, fields, maybe


def read(
    files: Files, first: ModelStates, experts: Sequence[Expert], place: Mapping[str, int]
) -> tuple[Manifest, Mapping[str, int]]:
    """Each expert-parallel rank has an optimizer of its own, under indices: read one by one.

    Raises:
        IncompleteError: a rank's file is missing.
        StaleError: files of two runs are mixed.
        UnsupportedError: a run without ZeRO whose layers of experts are shared by different numbers
            of ranks.
    """
    count = 1 + max(rank for rank, _ in files.expert_optim)
    optimizers = []
    for rank in range(count):
        path = files.expert_optim.get((rank, 0))
        if path is None:
            raise IncompleteError(
                files.location, f"expp_rank_{rank}_mp_rank_00_optim_states.pt is missing", "copy it"
            )
        optimizers.append(torch_reader.read(path))
        expect(path, optimizers[-1].root, fields(optimizer=maybe(OPTIMIZER)))
    counts = counts_of(experts)
    for file in optimizers:
        _check_sizes(file, count, counts)
    ranks = []
    for rank, file in enumerate(optimizers):
        held = [e for e in experts if e.number * count // counts[e.layer] == rank]
        local = {layer: total // count for layer, total in counts.items()}
        optimizer = _named(_optimizer(file), rank, local)
        root = first.root | {"module": module_of(first, held), "optimizer": optimizer}
        opened = [file, *(expert.file for expert in held)]
        manifest = native.read(files.ranks[0], replace(first, root=root), opened)
        if rank:  # what no expert is lies in one file for all
            manifest = manifest.with_entries(
                entry
                for entry in manifest.entries.values()
                if entry.kind not in (PARAM, BUFFER) or expert_names.parse(entry.fqn)
            )
        ranks.append(manifest)
    joined = combine.stages(ranks)
    entries = sorted(joined.entries.values(), key=lambda entry: place.get(entry.fqn, len(place)))
    return joined.with_entries(entries), dict.fromkeys(counts, count)


def _optimizer(file: TorchFile) -> dict[str, Any]:
    held: dict[str, Any] = file.root.get("optimizer") or {}
    return held


def _named(optimizer: dict[str, Any], rank: int, local: Mapping[str, int]) -> dict[str, Any]:
    """The same, where it names its parameters (``param_names``), by the whole model's names."""
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups = inner.get("param_groups", [])
    if not any("param_names" in group for group in groups):
        return optimizer

    def called(fqn: str) -> str:
        own = expert_names.parse(fqn)
        return str(own.numbered(rank * local[own.layer] + own.number)) if own else fqn

    named = [
        {**group, "param_names": [called(str(name)) for name in group.get("param_names", ())]}
        for group in groups
    ]
    inner = {**inner, "param_groups": named}
    return (
        {**optimizer, "optimizer_state_dict": inner}
        if "optimizer_state_dict" in optimizer
        else inner
    )


def _check_sizes(file: TorchFile, count: int, counts: Mapping[str, int]) -> None:
    """All layers are shared by as many ranks, and files of so many are here."""
    optimizer = _optimizer(file)
    inner = optimizer.get("optimizer_state_dict", optimizer)
    told = map(expert_names.ranks_of, inner.get("param_groups", []))
    sizes = {size for size in told if size is not None}
    if len(sizes) > 1:
        raise UnsupportedError(
            file.path,
            f"is of a run without ZeRO, whose layers of experts are shared by {sorted(sizes)} ranks"
            " each: which are shared by how many is nowhere said",
        )
    if sizes and max(sizes) > count:
        raise IncompleteError(
            file.path,
            f"is of {max(sizes)} expert-parallel ranks, and optimizer states of {count} are here",
            "copy the missing expp_rank_* files here",
        )
    uneven = {layer: held for layer, held in counts.items() if held % count}
    if uneven or (sizes and max(sizes) < count):
        raise StaleError(
            file.path,
            f"is of {max(sizes, default=count)} expert-parallel ranks; optimizer states of {count}"
            f" and files of {sorted(counts.values())} experts a layer are here",
            "files of two runs are mixed: move those of the other run away",
        )
