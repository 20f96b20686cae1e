"""Open the files of experts, and insert their tensors into the module of their model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.errors import (
    FETCH_MISSING,
    MIXED,
    TWO_RUNS,
    CorruptError,
    IncompleteError,
    StaleError,
)
from reshard.formats.deepspeed.directory import TagFiles
from reshard.formats.deepspeed.experts.layout import parse_expert_name
from reshard.formats.deepspeed.states import ModelStates
from reshard.state_dict import leaves
from reshard.system.threads import map_files


@dataclass(frozen=True, slots=True)
class Expert:
    """The file of one expert of a layer; ``layer`` is the prefix of the layer's names."""

    layer: str
    number: int
    file: TorchFile
    tensors: Mapping[str, Tensor]


def open_experts(files: TagFiles, first: ModelStates) -> list[Expert]:
    """Open every expert of every layer, in order; ``num_experts`` lists how many each layer has.

    Each expert has one file, of whichever model-parallel rank: `tensor_ranks` selects the files of
    one rank if there are more.

    Raises:
        IncompleteError: an expert's file is missing.
        StaleError: there are files of more experts than the model has, or of another step.
        CorruptError: a file does not hold its expert alone, or not the same tensors as the others.
    """
    paths: dict[int, dict[int, Path]] = {}
    for (layer, number), ranks in sorted(files.experts.items()):
        others = [path for rank, path in sorted(ranks.items()) if rank not in files.ranks]
        if others:
            raise StaleError(
                others[0],
                "belongs to an expert of a run with more tensor-parallel ranks than the"
                f" {len(files.ranks)} of which there are model states",
                TWO_RUNS,
            )
        paths.setdefault(layer, {})[number] = next(iter(ranks.values()))
    declared = first.root.get("num_experts")
    counts = list(declared) if isinstance(declared, (list, tuple)) else []
    if not counts:  # DeepSpeed before 0.6 writes one number, which does not tell how many layers
        counts = [1 + max(paths[layer]) for layer in sorted(paths)]
    expected = ((layer, number) for layer, count in enumerate(counts) for number in range(count))
    missing = next((expert for expert in expected if expert not in files.experts), None)
    if missing:
        layer, number = missing
        raise IncompleteError(
            first.file.path,
            f"layer_{layer}_expert_{number}_mp_rank_{files.number:02d}_model_states.pt is missing;"
            f" num_experts states {sum(counts)} experts in {len(counts)} layers",
            FETCH_MISSING,
        )
    extra = sorted(e for e in files.experts if e[0] >= len(counts) or e[1] >= counts[e[0]])
    if extra:
        layer, number = extra[0]
        raise StaleError(
            paths[layer][number],
            f"belongs to an expert that the model does not have: its layers have {counts} experts",
            TWO_RUNS,
        )
    numbered = [item for layer in sorted(paths) for item in paths[layer].items()]
    experts = map_files(numbered, lambda item: _open_expert(*item))
    _check_tensors(experts)
    return experts


def _open_expert(number: int, path: Path) -> Expert:
    file = torch_reader.read(path)
    root = file.root if isinstance(file.root, dict) else {}
    leaves.find_opaque(file.path, root)  # raises if a weight has a form that is not read
    tensors = {str(name): value for name, value in root.items() if isinstance(value, Tensor)}
    names = map(parse_expert_name, tensors)
    owners = {(name.layer, name.number) if name else None for name in names}
    if len(owners) != 1 or (owner := owners.pop()) is None or owner[1] != number:
        raise CorruptError(path, f"does not contain exactly expert {number} of one layer")
    return Expert(owner[0], number, file, tensors)


def _check_tensors(experts: Sequence[Expert]) -> None:
    layers: dict[str, tuple[Expert, set[str]]] = {}
    for expert in experts:
        names = {parsed.rest for parsed in map(parse_expert_name, expert.tensors) if parsed}
        first, expected = layers.setdefault(expert.layer, (expert, names))
        if names != expected:
            raise CorruptError(
                expert.file.path,
                f"does not contain the same tensors of its expert as {Path(first.file.path).name}:"
                f" {', '.join(sorted(names ^ expected)[:3])}",
                MIXED,
            )


def count_experts(experts: Sequence[Expert]) -> dict[str, int]:
    """Return how many experts each layer has."""
    return dict(Counter(expert.layer for expert in experts))


def insert_experts(first: ModelStates, experts: Sequence[Expert]) -> dict[str, Any]:
    """Return the module's tensors in its order: a layer's experts follow its gate."""
    own = first.root.get("module") or {}
    # The dict keeps the last name of each layer, after which the layer's experts are inserted.
    last = {
        name.partition(".deepspeed_moe.")[0] + ".deepspeed_moe.": name
        for name in own
        if ".deepspeed_moe." in name
    }
    after: dict[str, list[Expert]] = {}
    for expert in experts:
        after.setdefault(last.get(expert.layer, ""), []).append(expert)
    module: dict[str, Any] = {}
    for name, value in own.items():
        module[name] = value
        for expert in after.pop(name, []):
            module.update(expert.tensors)
    for others in after.values():  # layers of which the model states hold nothing else
        for expert in others:
            module.update(expert.tensors)
    return module
