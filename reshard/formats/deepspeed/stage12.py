"""Read the flat groups of ZeRO stages 1 and 2 and of BF16_Optimizer: an equal piece for each rank.

`flat_groups` has the geometry. Stored pieces may have their tail padding (``group_paddings``) cut
off. ``param_shapes`` is the flat order also under ``round_robin_gradients``, where
``param_slice_mappings`` of the same file is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from reshard.core.box import Index
from reshard.core.manifest import MASTER, Claim, Entry
from reshard.errors import FETCH_MISSING, MIXED, CorruptError, IncompleteError, UnsupportedError
from reshard.formats.deepspeed.experts.layout import FIRST_RANK, list_expert_data_ranks
from reshard.formats.deepspeed.flat_groups import ALIGNMENT, MAPPINGS, FlatGroup
from reshard.formats.deepspeed.states import (
    OptimizerStates,
    Shapes,
    is_of_another_length,
    read_by_file,
    require_equal,
    select_flat_slots,
    select_scalar_slots,
)
from reshard.training import optimizers
from reshard.units import counted

_MASTERS = "single_partition_of_fp32_groups"
_Slices = dict[str, tuple[Any, Any]]  # fqn -> start in the partition, number of elements


def read_groups(
    shapes: Shapes,
    ranks: Sequence[OptimizerStates],
    owners: Sequence[Sequence[Sequence[OptimizerStates]]],
    wrapped_names: Mapping[str, str],
) -> Iterator[SavedGroup]:
    """Yield the flat tensor of every group; a group of experts has one for each part.

    Args:
        owners: for each group, the ranks that share each of its flat tensors. Usually all ranks
            share one; in a group of experts every expert-parallel rank has an equal part of the
            members.
        wrapped_names: fqn -> the name that DeepSpeed lists, where the two differ.

    Raises:
        CorruptError: the pieces do not add up to the groups' shapes.
    """
    for rank in ranks:
        count = len(rank.require_list(_MASTERS))
        if count != len(shapes):
            raise CorruptError(
                rank.file.path,
                f"contains {count} groups, but param_shapes lists {len(shapes)}: {_MASTERS} has one"
                " for each",
                MIXED,
            )
    for group, (members, parts) in enumerate(zip(shapes, owners, strict=True)):
        for inside, own in divide_members(members, parts):
            # Each rank lists the experts that it has under the names of the first rank's.
            first = dict(zip(members, inside, strict=False))
            listed = {name.removesuffix(FIRST_RANK): fqn for name, fqn in first.items()}
            listed |= {wrapped_names.get(name, name): fqn for name, fqn in first.items()}
            yield SavedGroup(group, _find_layout(group, inside, own), own, listed)


def divide_ranks(
    ranks: Sequence[OptimizerStates], size: int, config: Mapping[str, Any]
) -> list[Sequence[OptimizerStates]]:
    """Return for each expert-parallel rank the ranks that hold its experts, in partition order.

    Args:
        size: number of expert-parallel ranks; 1 for parameters that all ranks share.

    Raises:
        IncompleteError: there are fewer ranks.
    """
    if size > len(ranks):
        raise IncompleteError(
            ranks[0].file.path,
            f"belongs to a run with {size} expert-parallel ranks, but there are optimizer states"
            f" of {counted(len(ranks), 'rank')}",
            FETCH_MISSING,
        )
    parts = list_expert_data_ranks(len(ranks), size, config)
    return [[ranks[rank] for rank in part] for part in parts]


def divide_members(
    members: Mapping[str, Index], parts: Sequence[Sequence[OptimizerStates]]
) -> Iterator[tuple[dict[str, Index], Sequence[OptimizerStates]]]:
    """Yield each expert-parallel rank's members of a group, and the ranks that share them."""
    names = list(members)
    for part, ranks in enumerate(parts):
        size = len(names) // len(parts)
        inside = names[part * size : (part + 1) * size]
        yield {name: members[name] for name in inside}, ranks


def find_claims(groups: Sequence[SavedGroup], *, round_robin: bool) -> dict[str, tuple[Claim, ...]]:
    """Return file -> what it states about the partitions that it holds.

    Args:
        round_robin: whether ``param_slice_mappings`` is wrong, because it was made before the order
            of ``round_robin_gradients`` (DeepSpeed 0.19.8 ``stage_1_and_2.py``).
    """
    claims: dict[str, tuple[Claim, ...]] = defaultdict(tuple)
    slices = [[group.read_slices(rank) for rank in group.ranks] for group in groups]
    stated = {name for ranks in slices for own in ranks for name in own or ()}
    # Names of another spelling (with a wrapper's prefix, say) state no order.
    has_order = not round_robin and any(not stated.isdisjoint(g.flat.shapes) for g in groups)
    for group, ranks in zip(groups, slices, strict=True):
        for position, (rank, own) in enumerate(zip(group.ranks, ranks, strict=True)):
            claims[rank.file.path] += tuple(group.list_claims(position, own if has_order else None))
    return claims


def _find_layout(
    group: int, shapes: Mapping[str, Index], ranks: Sequence[OptimizerStates]
) -> FlatGroup:
    """Return the layout that agrees with most of what the ranks store and state."""
    stored = [rank.require_list(_MASTERS)[group].numel for rank in ranks]
    tails = [_get_stated(rank, "group_paddings", group) for rank in ranks]
    paddings = require_equal(
        f"param_alignment_paddings of group {group}",
        read_by_file(ranks, lambda rank: _read_alignment(rank, group, len(shapes))),
    )
    # Files without tails (DeepSpeed before 0.7.0) may be padded to a multiple of the ranks alone.
    alignments = (ALIGNMENT,) if any(tail is not None for tail in tails) else (ALIGNMENT, 1)
    forms = product(alignments, (False, True), (False, True))
    flat = max(
        (FlatGroup(shapes, len(ranks), paddings, *form) for form in forms),
        key=lambda flat: (
            sum(numel == flat.count_stored(at) for at, numel in enumerate(stored)),
            sum(tail == flat.count_tail(at) for at, tail in enumerate(tails)),
        ),
    )
    for position, (rank, numel) in enumerate(zip(ranks, stored, strict=True)):
        if numel != flat.count_stored(position):
            raise CorruptError(
                rank.file.path,
                f"has {numel} elements of the master weights of group {group}, but its"
                f" {len(shapes)} param_shapes (with param_alignment_paddings) take {flat.end}, of"
                f" which this rank of {len(ranks)} stores {flat.count_stored(position)}",
                MIXED,
            )
    return flat


def _read_alignment(rank: OptimizerStates, group: int, members: int) -> list[int]:
    """Return the padding after each member; DeepSpeed before 0.17 has none."""
    paddings = rank.root.get("param_alignment_paddings")
    if not paddings:
        return [0] * members
    own: list[int] = paddings[group] if group < len(paddings) else []
    if len(own) != members:
        raise CorruptError(
            rank.file.path,
            f"group {group} has {len(own)} paddings for {members} parameters",
            MIXED,
        )
    return own


def _get_stated(rank: OptimizerStates, key: str, group: int) -> Any:
    stated = rank.root.get(key)
    if not isinstance(stated, (list, tuple)):
        return stated  # one number of partitions for all groups
    return stated[group] if group < len(stated) else "missing"


def read_scalars(
    fqns: Iterable[str], states: Sequence[tuple[OptimizerStates, Mapping[str, Any]]]
) -> Iterator[Entry]:
    """Yield the 0-d values of a flat tensor's state as slots of each of its members.

    Every rank keeps each value: the entries have the ranks' values as replicas, which must agree.
    Values that the next update computes again may differ: those of the first rank are taken. Values
    of an optimizer that the table does not know may differ too, as the norms of NovoGrad do: they
    are left out.

    Args:
        states: each rank and its state of the flat tensor.
    """
    scalars = {rank.file.path: select_scalar_slots(state) for rank, state in states}
    names = require_equal(
        "the list of 0-d optimizer values",
        {path: sorted(slots) for path, slots in scalars.items()} or {"": []},
    )
    for name in names:
        tensors = [slots[name] for slots in scalars.values()]
        if name not in optimizers.SCALARS and _differs(name, states):
            continue  # each rank computed it from its own part of the flat tensor
        kept = tensors[:1] if name in optimizers.RECOMPUTED else tensors
        chunks = tuple(tensor.chunk for tensor in kept)
        for fqn in fqns:
            yield Entry(fqn, name, tensors[0].dtype, (), chunks)


def _differs(name: str, states: Iterable[tuple[OptimizerStates, Mapping[str, Any]]]) -> bool:
    try:
        values = {repr(rank.file.read_number(state[name])) for rank, state in states}
    except UnsupportedError:
        return False
    return len(values) > 1


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """One group's flat tensor, and the files of the ranks that share it.

    Args:
        listed: DeepSpeed's name of each member -> fqn.
    """

    index: int
    flat: FlatGroup
    ranks: Sequence[OptimizerStates]
    listed: Mapping[str, str]

    def read_slices(self, rank: OptimizerStates) -> _Slices | None:
        """Return the position of each parameter that a rank's file states, if it does."""
        stated = _get_stated(rank, MAPPINGS, self.index)
        if stated is None:
            return None
        fragments = stated.items() if isinstance(stated, dict) else ()
        return {self.listed.get(str(k), str(k)): _read_fragment(v) for k, v in fragments}

    def list_claims(self, position: int, slices: _Slices | None) -> Iterator[Claim]:
        """Yield what a rank's file states about its partition, ``slices`` among it."""
        derived = self.flat.derive(position)
        for key in ("partition_count", "group_paddings"):
            stated = _get_stated(self.ranks[position], key, self.index)
            if stated not in (None, derived[key]):
                about = f"{key} of group {self.index}"
                yield Claim(about, str(stated), "the optimizer", str(derived[key]))
        if slices is None:
            return
        own = derived[MAPPINGS]
        # If another rank's partition fits, the claim names that rank: files were swapped.
        others = (position, *range(len(self.ranks)))
        held = next((n for n in others if slices == self.flat.derive(n)[MAPPINGS]), None)
        if held is not None:
            yield Claim("partition", str(held), MAPPINGS, str(position))
        elif list(slices.values()) == list(own.values()):
            name, fqn = next((a, b) for a, b in zip(slices, own, strict=True) if a != b)
            yield Claim(f"parameter at element {own[fqn][0]}", name, MAPPINGS, fqn)
        else:
            fqn = next(f for f in (*own, *slices) if own.get(f) != slices.get(f))
            about = f"slice of {fqn!r} (start, numel)"
            yield Claim(about, str(slices.get(fqn)), MAPPINGS, str(own.get(fqn)))

    def read_entries(self) -> Iterator[Entry]:
        """Yield the master weights, then each slot, in flat order.

        Raises:
            CorruptError: a slot has a length that no partition has, or ranks have other slots.
        """
        flat = self.flat
        masters = [rank.require_list(_MASTERS)[self.index] for rank in self.ranks]
        yield from flat.split(MASTER, masters, flat.runs)
        states = [rank.get_group_state(self.index) for rank in self.ranks]
        slots = [select_flat_slots(state) for state in states]
        names = require_equal(
            f"the list of optimizer slots of group {self.index}",
            {
                rank.file.path: sorted(own)
                for rank, own, runs in zip(self.ranks, slots, flat.whole_runs, strict=True)
                if own or runs  # a rank that has only padding may have no state
            }
            or {"": []},
        )
        whole = [flat.count_whole(position) for position in range(len(self.ranks))]
        for name in names:
            pieces = [own.get(name) for own in slots]
            lengths = [piece.numel if piece else 0 for piece in pieces]
            fits = [n in (flat.numel, flat.count_stored(at)) for at, n in enumerate(lengths)]
            if all(fits):
                yield from flat.split(name, pieces, flat.runs)
            # With an offloaded optimizer, Muon's momentum is as long as the partition.
            elif not is_of_another_length(name, pieces, whole):
                for at in sorted(range(len(whole)), key=fits.__getitem__):  # an odd one first
                    rank, length, numel = self.ranks[at], lengths[at], whole[at]
                    if length != numel:
                        raise CorruptError(
                            rank.file.path,
                            f"group {self.index}: {name} has {length} elements; a partition has"
                            f" {flat.numel}, and the parameters in it have {numel}",
                            MIXED,
                        )
                yield from flat.split(name, pieces, flat.whole_runs)
        with_state = [pair for pair in zip(self.ranks, states, strict=True) if pair[1]]
        yield from read_scalars(flat.shapes, with_state)


def _read_fragment(fragment: Any) -> tuple[Any, Any]:
    state = getattr(fragment, "state", None)
    return (state.get("start"), state.get("numel")) if isinstance(state, dict) else (None, None)
