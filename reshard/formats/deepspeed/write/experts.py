"""Cut a mixture of experts into what each rank holds, under that rank's names.

A rank numbers its experts 0, 1, ...; its files are laid out like those of a separate run, of the
state that it holds (`ExpertRank.state`), and `ExpertRank.lift` then restores the names of the whole
model. Each expert also has its own file, under its number in the layer. Source: DeepSpeed 0.19.8
``runtime/engine.py`` (``_save_moe_checkpoint``, ``load_moe_state_dict``), ``moe/experts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.core.manifest import Entry, Skeleton
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed import flat_order
from reshard.formats.deepspeed.experts.layout import (
    are_experts_cut,
    find_expert_parallel_size,
    list_expert_data_ranks,
    locate_rank,
    parse_expert_name,
)
from reshard.formats.deepspeed.write.expert_groups import regroup_experts
from reshard.formats.deepspeed.write.grid import DeepSpeedTarget
from reshard.training.copied_files import TENSOR
from reshard.training.state import WritableState, change_entries


@dataclass(frozen=True, slots=True)
class ExpertRank:
    """What the ranks with the same experts hold.

    Args:
        state: like the state of a separate run.
        names: local name -> the whole model's name of the tensor.
    """

    state: WritableState
    names: Mapping[str, str]

    def lift(self, skeleton: Skeleton) -> Skeleton:
        """Return what is laid out for these ranks, under the names of the whole model."""
        entries = (
            entry if entry.kind == TENSOR else replace(entry, fqn=self.names[entry.fqn])
            for entry in skeleton.entries
        )
        return replace(skeleton, entries=tuple(entries))


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a new run, as one model-parallel rank has them.

    Args:
        state: the model's with all experts, in the param groups of that run.
        counts: the experts of each layer, by the prefix of its names and in the model's order.
        sizes: the expert-parallel ranks that share each layer.
        world: number of data-parallel ranks.
        config: DeepSpeed's configuration, which orders the ranks; empty if unknown.
        mp_rank: number of the model-parallel rank.
        tensor: number of tensor-parallel ranks that expert-parallel groups span; 1 if each
            tensor-parallel rank has groups of its own.
    """

    state: WritableState
    counts: Mapping[str, int]
    sizes: Mapping[str, int]
    world: int
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    mp_rank: int = 0
    tensor: int = 1
    _ranks: dict[tuple[int, ...], ExpertRank] = field(default_factory=dict)

    def list_optimizers(self) -> Iterator[tuple[str, ExpertRank]]:
        """Yield the file of each optimizer without ZeRO, one for each set of experts."""
        most = max(self.sizes.values())  # the engine names these files by the largest group
        for number, writer in enumerate(self._list_writers(most)):
            if writer is not None:
                name = f"expp_rank_{number}_mp_rank_{self.mp_rank:02d}_optim_states.pt"
                yield name, self.select_rank(writer)

    def _list_writers(self, size: int) -> list[int | None]:
        # None: another tensor-parallel rank writes the experts of this expert-parallel rank.
        first = [ranks[0] for ranks in self._list_sharing_ranks(size)]
        own = self.mp_rank % self.tensor
        return [rank // self.tensor if rank % self.tensor == own else None for rank in first]

    def _list_sharing_ranks(self, size: int) -> list[range]:
        return list_expert_data_ranks(self.world * self.tensor, size, self.config)

    def list_files(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield each expert's file, and its content: name -> the name whose values it has."""
        contents: dict[str, dict[str, str]] = {}
        numbers = {layer: number for number, layer in enumerate(self.counts)}
        writers = {size: self._list_writers(size) for size in set(self.sizes.values())}
        kept_names = {weight.fqn: weight.fqn for weight in self.state.weights}
        for fqn, kept in (kept_names | dict(self.state.manifest.tied)).items():
            if own := parse_expert_name(fqn):
                size = self.sizes[own.layer]
                if writers[size][own.number * size // self.counts[own.layer]] is None:
                    continue
                expert = f"layer_{numbers[own.layer]}_expert_{own.number}"
                name = f"{expert}_mp_rank_{self.mp_rank:02d}_model_states.pt"
                contents.setdefault(name, {})[fqn] = kept
        yield from contents.items()

    def list_parts(self) -> list[tuple[ExpertRank, list[int]]]:
        """Return each different part of the state, with the ranks that hold it."""
        parts: dict[int, tuple[ExpertRank, list[int]]] = {}
        for rank in range(self.world):
            part = self.select_rank(rank)  # one object for all ranks with the same experts
            parts.setdefault(id(part), (part, []))[1].append(rank)
        return list(parts.values())

    def select_rank(self, rank: int) -> ExpertRank:
        """Return what a data-parallel rank holds; ranks with the same experts share one value."""
        world, rank = self.world * self.tensor, rank * self.tensor + self.mp_rank % self.tensor
        positions = {
            size: locate_rank(world, size, self.config, rank)[0]
            for size in sorted(set(self.sizes.values()))
        }
        key = tuple(positions.values())
        if key not in self._ranks:
            self._ranks[key] = self._select(positions)
        return self._ranks[key]

    def _select(self, positions: Mapping[int, int]) -> ExpertRank:
        # ``positions``: number of expert-parallel ranks -> which of them the rank is.
        names: dict[str, str] = {}

        def get_local_name(fqn: str) -> str | None:
            own = parse_expert_name(fqn)
            if own is None:
                return fqn
            size = self.sizes[own.layer]
            rank, number = divmod(own.number, self.counts[own.layer] // size)
            return str(own.renumber(number)) if rank == positions[size] else None

        def rename(entry: Entry) -> Entry | None:
            name = get_local_name(entry.fqn)
            if name is None:
                return None
            names[name] = entry.fqn
            return replace(entry, fqn=name)

        state = change_entries(self.state, rename)
        tied = {get_local_name(alias) or alias: kept for alias, kept in state.manifest.tied.items()}
        return ExpertRank(replace(state, manifest=replace(state.manifest, tied=tied)), names)


def make_mixture(state: WritableState, target: DeepSpeedTarget, mp_rank: int = 0) -> Mixture:
    """Return the experts of a state, as one model-parallel rank has it.

    Files of weights alone do not depend on the ranks that share the experts, unless these belong to
    several tensor-parallel ranks.

    Args:
        mp_rank: number of the model-parallel rank.

    Raises:
        UsageError: the ranks cannot share the experts evenly.
        UnsupportedError: the grid has tensor-parallel ranks with which DeepSpeed does not save
            every file; param groups of experts are not DeepSpeed's.
    """
    counts, world, grid = _count_experts(state), target.data_parallel, target.parallel
    is_cut = are_experts_cut(state.manifest.origin.mesh)
    tensor = 1 if is_cut else grid.tensor
    config = target.live.config or flat_order.find_engine_config(state) or {}
    if target.weights_only and tensor == 1:
        return Mixture(state, counts, dict.fromkeys(counts, 1), world, config, mp_rank=mp_rank)
    before = _find_sizes(state, counts)
    sizes = dict.fromkeys(counts, target.experts) if target.experts else before
    for layer, size in sizes.items():
        _check_divisible(layer, counts[layer], size, world * tensor)
        _refuse_partial_save(config, layer, size, tensor)
    groups, notes = regroup_experts(state, counts, before, sizes)
    different = sorted(set(sizes.values()))
    if len(different) > 1:  # DeepSpeed iterates over a set of names (0.19.8 ``moe/utils.py``)
        note = (
            "the layers of experts have different numbers of ranks:"
            f" {', '.join(map(str, different))}. DeepSpeed orders their param groups by hash,"
            " which differs from process to process; the output keeps the source's order. Set"
            " PYTHONHASHSEED as in the run that saved it, or pass --ep N for all"
        )
        notes = (*notes, note)
    if grid.tensor > 1:
        how = "share each expert, so" if is_cut else "have each expert whole, so"
        setting = f"enable_expert_tensor_parallelism={is_cut}"
        note = f"tensor-parallel ranks {how} the layers of the new run need {setting}"
        notes = (*notes, note)
    state = replace(state, groups=groups)
    return Mixture(state, counts, sizes, world, config, notes, mp_rank, tensor)


def _refuse_partial_save(config: Mapping[str, Any], layer: str, size: int, tensor: int) -> None:
    # A rank looks for the files of its own tensor-parallel rank, and only the first of the ranks
    # that share an expert writes its file (DeepSpeed 0.19.8 ``runtime/engine.py``).
    if tensor == 1 or (size % tensor == 0 and not config.get("use_data_before_expert_parallelism")):
        return
    raise UnsupportedError(
        f"--tp {tensor} --ep {size}",
        f"DeepSpeed does not save all files of the experts of {layer.rstrip('.')!r} in this grid:"
        " if each rank has its experts whole, the number of expert-parallel ranks must be a"
        " multiple of the number of tensor-parallel ranks, without"
        " use_data_before_expert_parallelism",
        "give another --ep or --tp",
    )


def refuse_stage(mixture: Mixture, target: DeepSpeedTarget) -> None:
    """Refuse stages that DeepSpeed does not have for experts.

    Source: DeepSpeed 0.19.8 ``_validate_zero3_moe_compatibility``.

    Raises:
        UnsupportedError: naming the stage, and another that can be written.
    """
    if target.zero_stage == 3:
        raise UnsupportedError(
            "--zero-stage 3",
            'DeepSpeed does not support its own layers of experts at stage 3 ("Native DeepSpeed'
            ' MoE is not supported with ZeRO Stage 3")',
            "give --zero-stage 2",
        )
    sizes = sorted(set(mixture.sizes.values()))
    if target.zero_stage == 0 and len(sizes) > 1 and not target.weights_only:
        raise UnsupportedError(
            "--zero-stage 0",
            f"the layers of experts are shared by {' or '.join(map(str, sizes))} ranks: at stage 0"
            " no file states which layer is shared by how many, so the output could not be read"
            " again",
            "give --zero-stage 1, or --ep N for all",
        )


def refuse_universal(state: WritableState) -> None:
    """Refuse experts: each rank numbers its own from 0, and a directory has each name once.

    DeepSpeed's converter overwrites one rank's with another's (0.19.8 ``ds_to_universal.py``, which
    knows AutoEP's experts alone).

    Raises:
        UnsupportedError: there are experts.
    """
    found = next((w.fqn for w in state.weights if parse_expert_name(w.fqn)), None)
    if found is not None:
        raise UnsupportedError(
            state.manifest.origin.path,
            f"contains a mixture of experts ({found!r}), whose ranks use the same names: DeepSpeed"
            " has no universal layout for it",
            "write --to deepspeed with --world-size and --ep, or --to dcp or --to torch",
        )


def _count_experts(state: WritableState) -> dict[str, int]:
    counts: dict[str, int] = {}
    for own in (parse_expert_name(weight.fqn) for weight in state.weights):
        if own:
            counts[own.layer] = max(counts.get(own.layer, 0), own.number + 1)
    return counts


def _find_sizes(state: WritableState, counts: Mapping[str, int]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for number, group in enumerate(state.groups):
        members = [parse_expert_name(fqn) for fqn in group.fqns]
        size = find_expert_parallel_size(group.hyper)
        if any(members) and (size is None or not all(members)):
            raise UnsupportedError(
                state.manifest.origin.path,
                f"has experts in param group {number}, but DeepSpeed needs groups that contain"
                " only experts, with moe: True and the name ep_size_N",
                "write only the weights: --weights-only",
            )
        sizes.update({own.layer: size for own in members if own and size})
    # A layer without a group is frozen. Nothing states how many ranks share it; at most as many as
    # it has experts.
    default = state.manifest.origin.mesh.get("ep", 1)
    return {layer: sizes.get(layer, min(default, count)) for layer, count in counts.items()}


def _check_divisible(layer: str, count: int, size: int, world: int) -> None:
    if count % size:
        raise UsageError(
            f"--ep {size}", f"does not divide the {count} experts of {layer.rstrip('.')!r}"
        )
    if world % size:
        raise UsageError(
            f"--world-size {world}",
            f"is not a multiple of the {size} ranks that share the experts of"
            f" {layer.rstrip('.')!r}",
            "give --ep N, or another --world-size",
        )
