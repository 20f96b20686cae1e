"""Read the flat groups of ZeRO stages 1 and 2 and of BF16_Optimizer: an equal piece for each rank.

Geometry (DeepSpeed 0.19.8 ``stage_1_and_2.py``, ``bf16_optimizer.py``): the parameters of
``param_shapes[g]`` in that order, each followed by its alignment padding, then a tail that makes
the whole a multiple of the ranks; rank r holds elements ``[r * P, (r + 1) * P)``. Stored pieces
may have their tail padding (``group_paddings``) cut off. ``param_shapes`` is the order also under
``round_robin_gradients``, where ``param_slice_mappings`` of the same file is wrong.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard.containers.torch_objects import Tensor
from reshard.core.box import Index, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.counts import check_numel
from reshard.core.manifest import MASTER, Claim, Entry
from reshard.errors import MIXED, CorruptError, UnsupportedError
from reshard.formats.deepspeed.states import (
    OptimizerStates,
    Shapes,
    is_of_another_length,
    read_by_file,
    require_equal,
    select_flat_slots,
    select_scalar_slots,
)
from reshard.layouts.partition import Member, build_flat_chunks
from reshard.training import optimizers

_MAPPINGS = "param_slice_mappings"


def read_groups(
    shapes: Shapes,
    ranks: Sequence[OptimizerStates],
    owners: Sequence[Sequence[Sequence[OptimizerStates]]],
) -> Iterator[FlatGroup]:
    """Yield the flat tensor of every group; a group of experts has one for each part.

    Args:
        owners: for each group, the ranks that share each of its flat tensors. Usually all ranks
            share one; in a group of experts every expert-parallel rank has an equal part of the
            members.

    Raises:
        CorruptError: the pieces do not add up to the groups' shapes.
    """
    for rank in ranks:
        count = len(_get_masters(rank))
        if count != len(shapes):
            raise CorruptError(
                rank.file.path,
                f"contains {count} groups, but param_shapes lists {len(shapes)}",
                MIXED,
            )
    for group, (members, parts) in enumerate(zip(shapes, owners, strict=True)):
        for inside, own in divide_members(members, parts):
            yield FlatGroup(group, inside, own, is_part=len(parts) > 1)


def divide_members(
    members: Mapping[str, Index], parts: Sequence[Sequence[OptimizerStates]]
) -> Iterator[tuple[dict[str, Index], Sequence[OptimizerStates]]]:
    """Yield each expert-parallel rank's members of a group, and the ranks that share them."""
    names = list(members)
    for part, ranks in enumerate(parts):
        size = len(names) // len(parts)
        inside = names[part * size : (part + 1) * size]
        yield {name: members[name] for name in inside}, ranks


def find_partition_claims(
    groups: Iterable[FlatGroup], wrapped_names: Mapping[str, str]
) -> dict[str, tuple[Claim, ...]]:
    """Return file -> what its ``param_slice_mappings`` states about the partition that it holds.

    Parts of a group of experts are left out: each rank numbers its experts from 0 there.

    Args:
        wrapped_names: fqn -> the name that DeepSpeed lists, where the two differ.
    """
    claims: dict[str, tuple[Claim, ...]] = {}
    listed = {name: fqn for fqn, name in wrapped_names.items()}
    for group in groups:
        for position, rank in enumerate(() if group.is_part else group.ranks):
            for claim in group.list_claims(position, listed):
                claims[rank.file.path] = (*claims.get(rank.file.path, ()), claim)
    return claims


def _get_masters(rank: OptimizerStates) -> list[Tensor]:
    """Return a rank's piece of the master weights of each group."""
    return rank.require_list("single_partition_of_fp32_groups")


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
    """Return whether ranks have other values of a 0-d slot; False for a dtype of no number."""
    try:
        values = {repr(rank.file.read_number(state[name])) for rank, state in states}
    except UnsupportedError:
        return False
    return len(values) > 1


class FlatGroup:
    """One group's flat tensor: where each parameter begins, and what each rank stored."""

    def __init__(
        self,
        index: int,
        members: dict[str, Index],
        ranks: Sequence[OptimizerStates],
        *,
        is_part: bool,
    ) -> None:
        self.is_part = is_part  # whether these are one expert-parallel rank's members of a group
        self.index = index
        self.members = members
        self.ranks = ranks
        self.flat, self.end = self._place_members()
        self._starts = [member.start for member in self.flat]
        self._stops = [member.stop for member in self.flat]
        self.tails = self._read_tails()
        self.piece_numel = self._find_piece_numel()
        self._check_tail()
        self._check_stated_tails()

    def _read_tails(self) -> list[int]:
        """Return each rank's padding at the end, in elements.

        DeepSpeed before 0.7.0 does not store it; there a group is a multiple of twice the ranks.
        """
        if any("group_paddings" in rank.root for rank in self.ranks):
            return [self._read_tail(rank) for rank in self.ranks]
        others = [0] * (len(self.ranks) - 1)
        return [*others, -self.end % (2 * len(self.ranks))]

    def _read_tail(self, rank: OptimizerStates) -> int:
        paddings = rank.root.get("group_paddings") or []
        if self.index >= len(paddings):
            return 0
        return check_numel(rank.file.path, "a group's padding", paddings[self.index])

    def _find_piece_numel(self) -> int:
        """Return P, the length of a rank's piece before its tail was cut.

        DeepSpeed up to 0.15.4 books a group's whole padding on the last rank. Where that is more
        than P, the bound of the slice ``[:P - padding]`` is negative and counts from the end:
        the rank keeps elements that are padding as well.
        """
        stored = self._count_stored()
        padded = [numel + tail for numel, tail in zip(stored, self.tails, strict=True)]
        if len(set(stored)) == 1:
            return stored[0]
        for numel in sorted({*stored, *padded}):
            if stored == [len(range(numel)[: numel - tail]) for tail in self.tails]:
                return numel
        raise CorruptError(
            self.ranks[0].file.path,
            f"group {self.index}: the ranks store {stored} elements, with padding {padded}; pieces"
            " of equal size are expected",
            MIXED,
        )

    def _count_stored(self) -> list[int]:
        """Return how many elements of the master weights each rank stores."""
        return [_get_masters(rank)[self.index].numel for rank in self.ranks]

    def _place_members(self) -> tuple[list[Member], int]:
        """Return where each parameter begins, and the end of the last."""
        what = f"alignment padding of group {self.index}"
        paddings = require_equal(what, read_by_file(self.ranks, self._read_alignment))
        members, at = [], 0
        for (fqn, shape), padding in zip(self.members.items(), paddings, strict=True):
            members.append(Member(fqn, shape, at))
            at = members[-1].stop + padding
        return members, at

    def _read_alignment(self, rank: OptimizerStates) -> list[int]:
        paddings = rank.root.get("param_alignment_paddings")
        if not paddings:  # DeepSpeed before 0.17 has no such padding
            return [0] * len(self.members)
        own = paddings[self.index] if self.index < len(paddings) else []
        if len(own) != len(self.members):
            raise CorruptError(
                rank.file.path,
                f"group {self.index} has {len(own)} paddings for {len(self.members)} parameters",
                MIXED,
            )
        return [check_numel(rank.file.path, "a parameter's padding", padding) for padding in own]

    def _check_tail(self) -> None:
        """Check that the parameters end where the padding begins."""
        # `_find_piece_numel` returns equal pieces as they are; a single rank's lacks its tail.
        total = self.piece_numel * len(self.ranks)
        declared, stored = sum(self.tails), sum(self._count_stored())
        if self.end + declared != total and self.end != stored:
            raise CorruptError(
                self.ranks[0].file.path,
                f"group {self.index}: its {len(self.members)} parameters take {self.end} elements"
                f" and {declared} are padding, but {len(self.ranks)} ranks store {total}",
                MIXED,
            )

    def _check_stated_tails(self) -> None:
        """Check that each rank states the padding that follows from the parameters.

        DeepSpeed up to 0.15.4 books the whole padding on the last rank.
        """
        stated = [rank.root.get("group_paddings") or [] for rank in self.ranks]
        if any(self.index >= len(paddings) for paddings in stated):
            return
        count = len(self.ranks)
        numel = -(-self.end // (2 * count)) * 2  # a group is a multiple of twice the ranks
        tails = [min(max((n + 1) * numel - self.end, 0), numel) for n in range(count)]
        on_last = [0] * (count - 1) + [sum(tails)]
        if self.tails in (tails, on_last):
            return
        # The layout that more ranks have is the right one.
        known = max(tails, on_last, key=lambda each: sum(map(int.__eq__, each, self.tails)))
        rank = next(n for n in range(count) if self.tails[n] != known[n])
        raise CorruptError(
            self.ranks[rank].file.path,
            f"group_paddings of group {self.index} is {self.tails[rank]}, but its parameters take"
            f" {self.end} elements, which leaves {known[rank]} on this rank of {count}",
            MIXED,
        )

    def list_claims(self, position: int, listed: Mapping[str, str]) -> Iterator[Claim]:
        """Yield what the file of a rank states about the order and position of its parameters.

        Args:
            listed: the name that DeepSpeed lists -> fqn, where they differ.
        """
        stated = self._read_stated_slices(position)
        if stated is None:
            return
        stated = {listed.get(name, name): part for name, part in stated.items()}
        if stated and stated.keys().isdisjoint(self.members):
            return  # names of another spelling (with a wrapper's prefix, say) state no order
        own = self._compute_slices(position)
        # If another rank's partition fits, the claim names that rank: files were swapped.
        for other in (position, *range(len(self.ranks))):
            if stated == self._compute_slices(other):
                yield Claim("partition", str(other), _MAPPINGS, str(position))
                return
        if list(stated.values()) == list(own.values()):
            name, fqn = next((a, b) for a, b in zip(stated, own, strict=True) if a != b)
            yield Claim(f"parameter at element {own[fqn][0]}", name, _MAPPINGS, fqn)
        else:
            fqn = next(f for f in (*own, *stated) if own.get(f) != stated.get(f))
            about = f"slice of {fqn!r} (start, numel)"
            yield Claim(about, str(stated.get(fqn)), _MAPPINGS, str(own.get(fqn)))

    def _compute_slices(self, position: int) -> dict[str, tuple[int, int]]:
        """Return fqn -> (start, numel) of what a rank's partition holds of each parameter."""
        first, last = self._compute_bounds(position)
        return {
            m.fqn: (max(m.start - first, 0), min(m.stop, last) - max(m.start, first))
            for m in self._find_members(position)
        }

    def _compute_bounds(self, position: int) -> tuple[int, int]:
        """Return the first element of a rank's partition, and the one after its last."""
        return position * self.piece_numel, (position + 1) * self.piece_numel

    def _find_members(self, position: int) -> list[Member]:
        """Return the members that overlap a rank's partition, and the empty ones inside it."""
        first, last = self._compute_bounds(position)
        return self.flat[bisect_right(self._stops, first) : bisect_left(self._starts, last)]

    def _read_stated_slices(self, position: int) -> dict[str, tuple[int, int]] | None:
        """Return the slices that the file of a rank states; None if it states none."""
        mappings = self.ranks[position].root.get(_MAPPINGS)
        if not isinstance(mappings, list) or self.index >= len(mappings):
            return None
        if not isinstance(mappings[self.index], dict):
            return None
        slices: dict[str, tuple[int, int]] = {}
        for fqn, fragment in mappings[self.index].items():
            state = getattr(fragment, "state", None)  # deepspeed.utils.tensor_fragment
            if not isinstance(state, dict) or not {"start", "numel"} <= state.keys():
                return None
            slices[str(fqn)] = (state["start"], state["numel"])
        return slices

    def read_entries(self) -> Iterator[Entry]:
        """Yield the master weights, then each slot, in flat order."""
        yield from self._split(MASTER, [_get_masters(rank)[self.index] for rank in self.ranks])
        states = [rank.get_group_state(self.index) for rank in self.ranks]
        slots = [select_flat_slots(state) for state in states]
        inside = [
            [m for m in self._find_members(position) if m.stop > m.start]
            for position in range(len(self.ranks))
        ]
        names = require_equal(
            f"the list of optimizer slots of group {self.index}",
            {
                rank.file.path: sorted(own)
                for rank, own, members in zip(self.ranks, slots, inside, strict=True)
                if own or members  # a rank that has only padding may have no state
            }
            or {"": []},
        )
        for name in names:
            pieces = [own.get(name) for own in slots]
            if self._is_by_member(pieces):
                whole_members = [sum(m.stop - m.start for m in members) for members in inside]
                if is_of_another_length(name, pieces, whole_members):
                    continue
                yield from self._read_whole_members(name, pieces, inside)
            else:
                yield from self._split(name, [piece for piece in pieces if piece is not None])
        with_state = [each for each in zip(self.ranks, states, strict=True) if each[1]]
        yield from read_scalars(self.members, with_state)

    def _is_by_member(self, pieces: Sequence[Tensor | None]) -> bool:
        """Return whether ranks hold whole members, as DeepSpeed's Muon keeps its momentum.

        DeepSpeed 0.19.8 ``stage_1_and_2.py`` (``_muon_momentum_buffer``): the buffer is as long as
        all parameters that meet the partition. With an offloaded optimizer it is as long as the
        partition.
        """
        return any(
            piece is None or piece.numel not in (self.piece_numel, master, master + tail)
            for piece, master, tail in zip(pieces, self._count_stored(), self.tails, strict=True)
        )

    def _read_whole_members(
        self, name: str, pieces: Sequence[Tensor | None], inside: Sequence[list[Member]]
    ) -> Iterator[Entry]:
        """Yield a slot of which each rank holds the whole of every member that it shares."""
        chunks: dict[str, list[Chunk]] = {member.fqn: [] for member in self.flat}
        dtypes = {piece.dtype for piece in pieces if piece is not None}
        dtype = next(iter(dtypes))
        for rank, piece, members in zip(self.ranks, pieces, inside, strict=True):
            numel = sum(member.stop - member.start for member in members)
            stored = piece.numel if piece else 0
            if stored != numel or len(dtypes) > 1:
                raise CorruptError(
                    rank.file.path,
                    f"group {self.index}: {name} has {stored} elements; a partition has"
                    f" {self.piece_numel}, and the parameters in it have {numel}",
                    MIXED,
                )
            at = piece.chunk.byte_offset if piece else 0
            for member in members:
                chunk = contiguous(rank.file.path, at, dtype, whole(member.shape))
                chunks[member.fqn].append(chunk)
                at += (member.stop - member.start) * dtype.itemsize
        for member in self.flat:
            yield Entry(member.fqn, name, dtype, member.shape, tuple(chunks[member.fqn]))

    def _split(self, kind: str, pieces: list[Tensor]) -> Iterator[Entry]:
        """Yield the entries of all members, from the ranks' pieces of the flat tensor."""
        stored = [piece.chunk for piece in pieces]
        # If all members are empty, so are the pieces, and a range cannot have a step of 0.
        starts = range(0, self.piece_numel * len(stored), self.piece_numel or 1)
        chunks = build_flat_chunks(self.flat, zip(starts, stored, strict=False))
        for member in self.flat:
            own = tuple(chunks[member.fqn])
            yield Entry(member.fqn, kind, pieces[0].dtype, member.shape, own)
