"""A mixture of experts: what each rank holds of it, under the names that it has there.

A rank calls its experts 0, 1, ...; its files are those of a run of its own, of the state that it
holds (`Held.state`), and what is laid out for it is then lifted to the names of the whole model.
Experts have a file each, under the numbers that they have in their layer. Source: DeepSpeed 0.19.8
``runtime/engine.py`` (``_save_moe_checkpoint``, ``load_moe_state_dict``), ``moe/experts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed import expert_layout, order
from reshard.formats.deepspeed.write import expert_groups
from reshard.formats.deepspeed.write.grid import Wanted
from reshard.manifest import Entry, Skeleton
from reshard.training.state import Training, change_entries

_PARTITIONED = 3  # the stage that cuts parameters


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds.

    Args:
        state: as if that were all there is.
        names: what the whole model calls each tensor.
    """

    state: Training
    names: Mapping[str, str]

    def lifted(self, skeleton: Skeleton) -> Skeleton:
        """What is laid out for this rank, under the names of the whole model."""
        entries = (replace(entry, fqn=self.names[entry.fqn]) for entry in skeleton.entries)
        return replace(skeleton, entries=tuple(entries))


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a run to come.

    Args:
        state: the whole model's, in the param groups of that run.
        counts: the experts of each layer, by the prefix of its names and in the model's order.
        sizes: the expert-parallel ranks that share those of each layer.
        world: all ranks.
    """

    state: Training
    counts: Mapping[str, int]
    sizes: Mapping[str, int]
    world: int
    notes: tuple[str, ...] = ()
    _made: dict[tuple[int, ...], Held] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """The expert-parallel ranks of the layers that have most."""
        return max(self.sizes.values())

    def owners(self) -> list[int]:
        """The first rank of each of those, which saves its optimizer where there is no ZeRO."""
        return [
            ranks[0]
            for ranks in expert_layout.expert_data_ranks(self.world, self.largest, self._config)
        ]

    def files(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Each expert's file, and what is in it: name -> the name whose values it has."""
        found: dict[str, dict[str, str]] = {}
        numbers = {layer: number for number, layer in enumerate(self.counts)}
        named = {weight.fqn: weight.fqn for weight in self.state.weights}
        for fqn, kept in (named | dict(self.state.manifest.tied)).items():
            if own := expert_layout.parse_expert_name(fqn):
                name = f"layer_{numbers[own.layer]}_expert_{own.number}_mp_rank_00_model_states.pt"
                found.setdefault(name, {})[fqn] = kept
        yield from found.items()

    def holders(self) -> list[tuple[Held, list[int]]]:
        """What ranks hold, and which of them hold it."""
        found: dict[int, tuple[Held, list[int]]] = {}
        for rank in range(self.world):
            held = self.of_rank(rank)
            found.setdefault(id(held), (held, []))[1].append(rank)
        return list(found.values())

    def of_rank(self, rank: int) -> Held:
        """What a rank holds; those that hold the same experts have one."""
        sizes = sorted(set(self.sizes.values()))
        places = {size: self._place(size, rank) for size in sizes}
        key = tuple(places.values())
        if key not in self._made:
            self._made[key] = self._held(places)
        return self._made[key]

    def _place(self, size: int, rank: int) -> int:
        return expert_layout.locate_rank(self.world, size, self._config, rank)[0]

    @property
    def _config(self) -> Mapping[str, Any]:
        return order.engine_config(self.state) or {}

    def _held(self, places: Mapping[int, int]) -> Held:
        names: dict[str, str] = {}

        def called(fqn: str) -> str | None:
            own = expert_layout.parse_expert_name(fqn)
            if own is None:
                return fqn
            size = self.sizes[own.layer]
            rank, number = divmod(own.number, self.counts[own.layer] // size)
            return str(own.renumber(number)) if rank == places[size] else None

        def change(entry: Entry) -> Entry | None:
            name = called(entry.fqn)
            if name is None:
                return None
            names[name] = entry.fqn
            return replace(entry, fqn=name)

        held = change_entries(self.state, change)
        aliases = {called(alias) or alias: kept for alias, kept in held.manifest.tied.items()}
        return Held(replace(held, manifest=replace(held.manifest, tied=aliases)), names)


def mixture(
    state: Training, wanted: Wanted, world: int, *, weights_only: bool = False
) -> Mixture | None:
    """The experts of a state; None where it has none.

    Files of weights alone are the same for any ranks that share them.

    Raises:
        UsageError: ranks that cannot share them evenly.
        UnsupportedError: experts over ranks that share more than experts; param groups that are
            not DeepSpeed's of experts.
    """
    counts = _counts(state)
    if not counts:
        return None
    if wanted.sizes.model > 1:
        raise UnsupportedError(
            f"{wanted.sizes}",
            "experts together with tensor- or pipeline-parallel ranks are not written",
            "leave out --tp and --pp",
        )
    if weights_only:
        return Mixture(state, counts, dict.fromkeys(counts, 1), world)
    before = _sizes(state, counts)
    sizes = dict.fromkeys(counts, wanted.experts) if wanted.experts else before
    for layer, size in sizes.items():
        _check_shared(layer, counts[layer], size, world)
    groups, notes = expert_groups.over(state, counts, before, sizes)
    regrouped = replace(state, groups=groups)
    return Mixture(regrouped, counts, sizes, world, (*notes, *_unsure_order(sizes)))


def _unsure_order(sizes: Mapping[str, int]) -> Iterator[str]:
    """DeepSpeed goes through a set of names (0.19.8 ``moe/utils.py``)."""
    different = sorted(set(sizes.values()))
    if len(different) > 1:
        yield (
            f"layers of experts are over {', '.join(map(str, different))} ranks each: DeepSpeed has"
            " their param groups in an order that differs from process to process, here it is the"
            " source's: set PYTHONHASHSEED as in the run that saved it, or give --ep N for all"
        )


def refuse_stage(mixed: Mixture, stage: int, *, weights_only: bool) -> None:
    """What DeepSpeed has not of experts (0.19.8 ``_validate_zero3_moe_compatibility``).

    Raises:
        UnsupportedError: naming the stage, and another that can be written.
    """
    if stage == _PARTITIONED:
        raise UnsupportedError(
            "--zero-stage 3",
            "DeepSpeed refuses its own layers of experts there"
            ' ("Native DeepSpeed MoE is not supported with ZeRO Stage 3")',
            "give --zero-stage 2",
        )
    sizes = sorted(set(mixed.sizes.values()))
    if stage == 0 and len(sizes) > 1 and not weights_only:
        raise UnsupportedError(
            "--zero-stage 0",
            f"has layers of experts over {sizes} ranks each: no file of that stage says which are"
            " which, so that it could not be read again",
            "give --zero-stage 1, or --ep N for all",
        )


def refuse_universal(state: Training) -> None:
    """Ranks call their experts alike, and a universal checkpoint has one place for a name.

    DeepSpeed's converter overwrites one rank's with another's (0.19.8 ``ds_to_universal.py``, which
    knows AutoEP's experts alone).

    Raises:
        UnsupportedError: there are experts.
    """
    found = next((w.fqn for w in state.weights if expert_layout.parse_expert_name(w.fqn)), None)
    if found is not None:
        raise UnsupportedError(
            state.manifest.origin.path,
            f"holds a mixture of experts ({found!r}), whose ranks call them alike: DeepSpeed has no"
            " universal form of that",
            "write --to deepspeed with --world-size and --ep, or --to dcp, --to torch",
        )


def _counts(state: Training) -> dict[str, int]:
    counts: dict[str, int] = {}
    for own in (expert_layout.parse_expert_name(weight.fqn) for weight in state.weights):
        if own:
            counts[own.layer] = max(counts.get(own.layer, 0), own.number + 1)
    return counts


def _sizes(state: Training, counts: Mapping[str, int]) -> dict[str, int]:
    """The ranks that share each layer, as the names of the param groups say.

    Raises:
        UnsupportedError: a group holds experts and is not named as DeepSpeed names them.
    """
    found: dict[str, int] = {}
    for number, group in enumerate(state.groups):
        named = [expert_layout.parse_expert_name(fqn) for fqn in group.fqns]
        ranks = expert_layout.expert_parallel_size(group.hyper)
        if any(named) and (ranks is None or not all(named)):
            raise UnsupportedError(
                state.manifest.origin.path,
                f"has experts in param group {number}, which is not one of experts alone, with moe:"
                " True and the name ep_size_N: DeepSpeed asks for such groups",
                "write the weights alone: --weights-only",
            )
        found.update({own.layer: ranks for own in named if own and ranks})
    untold = state.manifest.origin.mesh.get("ep", 1)
    return {layer: found.get(layer, min(untold, count)) for layer, count in counts.items()}


def _check_shared(layer: str, count: int, size: int, world: int) -> None:
    if count % size:
        raise UsageError(
            f"--ep {size}", f"does not divide the {count} experts of {layer.rstrip('.')!r}"
        )
    if world % size:
        raise UsageError(
            f"--world-size {world}",
            f"is no multiple of the {size} ranks that share the experts of {layer.rstrip('.')!r}",
            "give --ep N, or another --world-size",
        )
