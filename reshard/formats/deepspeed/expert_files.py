"""The files of experts, and the module that they are a part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.errors import CorruptError, IncompleteError, StaleError, UnsupportedError
from reshard.formats.deepspeed import expert_names
from reshard.formats.deepspeed.directory import Files
from reshard.formats.deepspeed.states import MIXED, ModelStates
from reshard.state_dict import leaves


@dataclass(frozen=True, slots=True)
class Expert:
    """One file: an expert of a layer; ``layer`` is the prefix of the layer's names."""

    layer: str
    number: int
    file: TorchFile
    tensors: Mapping[str, Tensor]


def open_all(files: Files, first: ModelStates) -> list[Expert]:
    """Every expert of every layer, in order; ``num_experts`` lists how many each layer has.

    Raises:
        IncompleteError: an expert's file is missing.
        StaleError: there are files of more experts than the model has, or of another step.
        CorruptError: a file holds not its expert alone, or another part of it than the others.
        UnsupportedError: experts are cut by tensor parallelism too.
    """
    held: dict[int, dict[int, Path]] = {}
    for (layer, number), ranks in sorted(files.experts.items()):
        if set(ranks) != {0}:
            raise UnsupportedError(
                ranks[max(ranks)],
                "is of an expert of a tensor-parallel run, which is not read yet",
            )
        held.setdefault(layer, {})[number] = ranks[0]
    said = first.root.get("num_experts")
    counts = list(said) if isinstance(said, (list, tuple)) else []
    if not counts:
        counts = [1 + max(held[layer]) for layer in sorted(held)]
    wanted = ((layer, number) for layer, count in enumerate(counts) for number in range(count))
    missing = next((expert for expert in wanted if expert not in files.experts), None)
    if missing:
        layer, number = missing
        raise IncompleteError(
            files.location,
            f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt is missing; the model has"
            f" {sum(counts)} experts in {len(counts)} layers",
            "copy it here (a node-local disk may still hold it)",
        )
    extra = sorted(e for e in files.experts if e[0] >= len(counts) or e[1] >= counts[e[0]])
    if extra:
        layer, number = extra[0]
        raise StaleError(
            held[layer][number],
            f"is of an expert that the model has not: it has {counts} in its layers",
            "files of two runs are mixed: move those of the other run away",
        )
    experts = [
        _expert(path, number) for layer in sorted(held) for number, path in held[layer].items()
    ]
    _check_alike(experts)
    return experts


def _check_alike(experts: Sequence[Expert]) -> None:
    """The experts of a layer are copies of one module."""
    layers: dict[str, tuple[Expert, set[str]]] = {}
    for expert in experts:
        names = {parsed.rest for parsed in map(expert_names.parse, expert.tensors) if parsed}
        first, wanted = layers.setdefault(expert.layer, (expert, names))
        if names != wanted:
            raise CorruptError(
                expert.file.path,
                f"does not hold the same of its expert as {Path(first.file.path).name}:"
                f" {', '.join(sorted(names ^ wanted)[:3])}",
                MIXED,
            )


def _expert(path: Path, number: int) -> Expert:
    file = torch_reader.read(path)
    found = file.root if isinstance(file.root, dict) else {}
    leaves.find_opaque(file.path, found)
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    names = map(expert_names.parse, tensors)
    owners = {(name.layer, name.number) if name else None for name in names}
    if len(owners) != 1 or (owner := owners.pop()) is None or owner[1] != number:
        raise CorruptError(path, f"does not hold expert {number} of one layer, and nothing else")
    return Expert(owner[0], number, file, tensors)


def counts_of(experts: Sequence[Expert]) -> dict[str, int]:
    """How many there are of each layer."""
    counts: dict[str, int] = {}
    for expert in experts:
        counts[expert.layer] = counts.get(expert.layer, 0) + 1
    return counts


def module_of(first: ModelStates, experts: Sequence[Expert]) -> dict[str, Any]:
    """The module's tensors in its order: a layer's experts follow its gate."""
    own = first.root.get("module") or {}
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
    for rest in after.values():
        for expert in rest:
            module.update(expert.tensors)
    return module
