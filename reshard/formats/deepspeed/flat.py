"""ZeRO stages 1 and 2 and BF16_Optimizer: one flat tensor a group, in equal pieces a rank.

Geometry (DeepSpeed 0.19.8 ``stage_1_and_2.py``, ``bf16_optimizer.py``): the parameters of
``param_shapes[g]`` in that order, each followed by its alignment padding, then a tail that makes
the whole a multiple of the ranks; rank r holds elements ``[r * P, (r + 1) * P)``. Stored pieces
may have their tail padding (``group_paddings``) cut off. ``param_shapes`` is the order also under
``round_robin_gradients``, where ``param_slice_mappings`` of the same file is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard.box import Index, whole
from reshard.containers.torch_objects import Tensor
from reshard.counts import elements
from reshard.errors import CorruptError
from reshard.formats.deepspeed.states import MIXED, OptimizerStates, Shapes, agree, each
from reshard.layout.partition import Member, flat_chunks
from reshard.manifest import MASTER, Chunk, Claim, Entry, contiguous

_MAPPINGS = "param_slice_mappings"
Slots = dict[str, Tensor]  # slot name -> this rank's flat piece


def read_groups(
    shapes: Shapes,
    ranks: Sequence[OptimizerStates],
    owners: Sequence[Sequence[Sequence[OptimizerStates]]],
) -> Iterator[Group]:
    """Describe the flat tensor of every group, and of every expert-parallel part of one.

    Args:
        owners: of each group, the ranks that share each of its flat tensors: all ranks share one,
            but for experts, of which every expert-parallel rank has an equal part of the members.

    Raises:
        CorruptError: pieces that do not add up to the groups' shapes.
    """
    for rank in ranks:
        count = len(_pieces(rank))
        if count != len(shapes):
            raise CorruptError(
                rank.file.path, f"holds {count} groups, param_shapes lists {len(shapes)}", MIXED
            )
    for group, (members, shared) in enumerate(zip(shapes, owners, strict=True)):
        names = list(members)
        size = len(names) // len(shared)
        for part, own in enumerate(shared):
            held = {name: members[name] for name in names[part * size : (part + 1) * size]}
            yield Group(group, held, own, is_part=len(shared) > 1)


def find_partition_claims(
    groups: Iterable[Group], wrapped_names: Mapping[str, str]
) -> dict[str, tuple[Claim, ...]]:
    """Return file -> what its ``param_slice_mappings`` states about the partition that it holds.

    Parts of a group of experts are left out: each rank numbers its experts from 0 there.

    Args:
        wrapped_names: fqn -> the name that DeepSpeed lists, where that is another one.
    """
    found: dict[str, tuple[Claim, ...]] = {}
    listed = {name: fqn for fqn, name in wrapped_names.items()}
    for group in groups:
        for position, rank in enumerate(() if group.is_part else group.ranks):
            for claim in group.claims(position, listed):
                found[rank.file.path] = (*found.get(rank.file.path, ()), claim)
    return found


def _pieces(rank: OptimizerStates) -> list[Tensor]:
    return rank.listed("single_partition_of_fp32_groups")


def group_state(rank: OptimizerStates, group: int) -> dict[str, Any]:
    """The optimizer's state of one group; under elastic_checkpoint it is a list.

    Raises:
        CorruptError: there is no such group.
    """
    state = rank.root.get("base_optimizer_state")
    if state is None:
        return {}
    if isinstance(state, dict):
        return state.get("state", {}).get(group) or {}
    if group >= len(state):
        raise CorruptError(
            rank.file.path, f"base_optimizer_state holds {len(state)} groups, and no {group}", MIXED
        )
    return state[group] or {}


def slots_of(state: dict[str, Any]) -> Slots:
    """The flat tensors among a group's state; the step is 0-d and not one of them."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and len(value.shape) == 1
    }


def scalars_of(state: dict[str, Any]) -> Slots:
    """Return the 0-d tensors of a group's state that are not its step (NAdam's ``mu_product``)."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and not value.shape and name != "step"
    }


def scalars(
    fqns: Iterable[str], states: Sequence[tuple[OptimizerStates, dict[str, Any]]]
) -> Iterator[Entry]:
    """Yield the 0-d values of a flat tensor's state as slots of each of its members.

    Every rank keeps each value: the entries have the ranks' values as replicas, which must agree.
    """
    found = {rank.file.path: scalars_of(state) for rank, state in states}
    if not found:
        return
    names = agree(
        "the list of 0-d optimizer values", {k: sorted(v) for k, v in found.items()}, MIXED
    )
    held = {name: [own[name] for own in found.values()] for name in names}
    for name, tensors in held.items():
        chunks = tuple(tensor.chunk for tensor in tensors)
        for fqn in fqns:
            yield Entry(fqn, name, tensors[0].dtype, (), chunks)


def left_out(names: Iterable[str]) -> list[str]:
    """What to say of a state that `slots_of` has no place for."""
    return [f"optimizer state {n!r} is not per element and is left out" for n in sorted(names)]


class Group:
    """One group's flat tensor: where each parameter begins, and what each rank stored."""

    def __init__(
        self,
        index: int,
        members: dict[str, Index],
        ranks: Sequence[OptimizerStates],
        *,
        is_part: bool,
    ) -> None:
        self.is_part = is_part  # of a group of experts
        self.index = index
        self.members = members
        self.ranks = ranks
        self.flat, self.end = self._places()
        self.tails = self._tails()
        self.piece_numel = self._piece_numel()
        self._check_tail()

    def _tails(self) -> list[int]:
        """Each rank's padding at the end.

        DeepSpeed before 0.7.0 does not say it: it made every group a multiple of twice the ranks.
        """
        if any("group_paddings" in rank.root for rank in self.ranks):
            return [self._tail(rank) for rank in self.ranks]
        others = [0] * (len(self.ranks) - 1)
        return [*others, -self.end % (2 * len(self.ranks))]

    def _tail(self, rank: OptimizerStates) -> int:
        paddings = rank.root.get("group_paddings") or []
        if self.index >= len(paddings):
            return 0
        return elements(rank.file.path, "a group's padding", paddings[self.index])

    def _piece_numel(self) -> int:
        """Return P, the length of a rank's piece before its tail was cut.

        DeepSpeed up to 0.15.4 books a group's whole padding on the last rank. Where that is more
        than P, the bound of the slice ``[:P - padding]`` is negative and counts from the end:
        the rank keeps elements that are padding as well.
        """
        held = [_pieces(rank)[self.index].numel for rank in self.ranks]
        padded = [numel + tail for numel, tail in zip(held, self.tails, strict=True)]
        if len(set(held)) == 1:
            return held[0]
        for numel in sorted({*held, *padded}):
            if held == [len(range(numel)[: numel - tail]) for tail in self.tails]:
                return numel
        raise CorruptError(
            self.ranks[0].file.path,
            f"group {self.index}: the ranks hold {held} elements, with padding {padded}; equal"
            " pieces are expected",
            MIXED,
        )

    def _places(self) -> tuple[list[Member], int]:
        """Where each parameter lies, and the end of the last."""
        declared = agree(
            f"alignment padding of group {self.index}",
            each(self.ranks, self._alignment),
            MIXED,
        )
        places = []
        at = 0
        for (fqn, shape), padding in zip(self.members.items(), declared, strict=True):
            places.append(Member(fqn, shape, at))
            at = places[-1].stop + padding
        return places, at

    def _alignment(self, rank: OptimizerStates) -> list[int]:
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
        return [elements(rank.file.path, "a parameter's padding", padding) for padding in own]

    def _check_tail(self) -> None:
        """The group ends where the padding begins, of which the reader knows how much there is."""
        total = self.piece_numel * len(self.ranks)
        declared = sum(self.tails)
        stored = sum(_pieces(rank)[self.index].numel for rank in self.ranks)
        if self.end + declared != total and self.end != stored:
            raise CorruptError(
                self.ranks[0].file.path,
                f"group {self.index}: its {len(self.members)} parameters take {self.end} elements"
                f" and {declared} are padding, but {len(self.ranks)} ranks hold {total}",
                MIXED,
            )

    def claims(self, position: int, listed: Mapping[str, str]) -> Iterator[Claim]:
        """Yield what the file of a rank states about the order and place of its parameters.

        Args:
            listed: the name that DeepSpeed lists -> fqn, where they differ.
        """
        stated = self._stated_slices(position)
        if not stated:
            return
        stated = {listed.get(name, name): place for name, place in stated.items()}
        own = self._slices(position)
        for other in (position, *range(len(self.ranks))):
            if stated == self._slices(other):
                yield Claim("partition", str(other), _MAPPINGS, str(position))
                return
        # Names of another spelling (with a wrapper's prefix, say) state nothing about the order.
        if set(stated) <= self.members.keys() and list(stated.values()) == list(own.values()):
            found, known = next((a, b) for a, b in zip(stated, own, strict=True) if a != b)
            yield Claim(f"parameter at element {own[known][0]}", found, _MAPPINGS, known)

    def _slices(self, position: int) -> dict[str, tuple[int, int]]:
        """Return fqn -> (start, numel) of what a rank's partition holds of each parameter."""
        first = position * self.piece_numel
        last = first + self.piece_numel
        return {
            m.fqn: (max(m.start - first, 0), min(m.stop, last) - max(m.start, first))
            for m in self._meeting(position)
        }

    def _meeting(self, position: int) -> list[Member]:
        """Return the members whose range meets a rank's partition, empty ones inside it too."""
        first = position * self.piece_numel
        last = first + self.piece_numel
        return [m for m in self.flat if m.start < last and m.stop > first]

    def _stated_slices(self, position: int) -> dict[str, tuple[int, int]] | None:
        """Return the slices that the file of a rank states, as `_slices` has them; None if none."""
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

    def entries(self) -> Iterator[Entry]:
        """The master weights, then each slot, in flat order."""
        yield from self._split(MASTER, [_pieces(rank)[self.index] for rank in self.ranks])
        states = [(rank, group_state(rank, self.index)) for rank in self.ranks]
        slots = [slots_of(state) for _, state in states]
        inside = [self._inside(number) for number in range(len(self.ranks))]
        names = agree(
            f"the list of optimizer slots of group {self.index}",
            {
                rank.file.path: sorted(held)
                for rank, held, members in zip(self.ranks, slots, inside, strict=True)
                if held or members
            }
            or {"": []},
            MIXED,
        )
        for name in names:
            pieces = [held.get(name) for held in slots]
            if self._is_by_member(pieces):
                yield from self._by_member(name, pieces, inside)
            else:
                yield from self._split(name, [piece for piece in pieces if piece is not None])
        yield from scalars(self.members, [each for each in states if each[1]])

    def _inside(self, number: int) -> list[Member]:
        """Return the members of which a rank's partition holds an element."""
        return [m for m in self._meeting(number) if m.stop > m.start]

    def _is_by_member(self, pieces: Sequence[Tensor | None]) -> bool:
        """Return whether ranks hold whole members, as DeepSpeed's Muon keeps its momentum.

        DeepSpeed 0.19.8 ``stage_1_and_2.py`` (``_muon_momentum_buffer``): the buffer is as long as
        all parameters that meet the partition. With an offloaded optimizer it is as long as the
        partition.
        """
        masters = [_pieces(rank)[self.index].numel for rank in self.ranks]
        return any(
            piece is None or piece.numel not in (self.piece_numel, master, master + tail)
            for piece, master, tail in zip(pieces, masters, self.tails, strict=True)
        )

    def _by_member(
        self, name: str, pieces: Sequence[Tensor | None], inside: Sequence[list[Member]]
    ) -> Iterator[Entry]:
        """Yield a slot of which each rank holds the whole of every member that it shares.

        Raises:
            CorruptError: a rank's tensor is not as long as those members.
        """
        chunks: dict[str, list[Chunk]] = {member.fqn: [] for member in self.flat}
        dtypes = {piece.dtype for piece in pieces if piece is not None}
        for rank, piece, members in zip(self.ranks, pieces, inside, strict=True):
            numel = sum(member.stop - member.start for member in members)
            held = piece.numel if piece else 0
            if held != numel or len(dtypes) > 1:
                raise CorruptError(
                    rank.file.path,
                    f"group {self.index}: {name} has {held} elements; a partition has"
                    f" {self.piece_numel}, and the parameters that it meets have {numel}",
                    MIXED,
                )
            at = piece.chunk.byte_offset if piece else 0
            for member in members:
                dtype = next(iter(dtypes))
                box, shape = whole(member.shape), member.shape
                chunks[member.fqn].append(contiguous(rank.file.path, at, dtype, box, shape))
                at += (member.stop - member.start) * dtype.itemsize
        for member in self.flat:
            yield Entry(
                member.fqn, name, next(iter(dtypes)), member.shape, tuple(chunks[member.fqn])
            )

    def _split(self, kind: str, pieces: list[Tensor]) -> Iterator[Entry]:
        held = [piece.chunk for piece in pieces]
        starts = range(0, self.piece_numel * len(held), self.piece_numel or 1)
        chunks = flat_chunks(self.flat, zip(starts, held, strict=False))
        for member in self.flat:
            stored = tuple(chunks[member.fqn])
            yield Entry(member.fqn, kind, pieces[0].dtype, member.shape, stored)
