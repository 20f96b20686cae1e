"""Layouts of an optimizer's tensors: whole, 1-d runs of parameters, or flat units.

A state dict that names its parameters has whole tensors (sharded or not). One that numbers them may
have any of the three layouts; it has the one under which every number gets a name.

Sources: torch 2.13 ``distributed/fsdp/_optim_utils.py``, ``_init_utils.py`` (hybrid groups).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from reshard.core.box import Box, Index
from reshard.core.chunks import Chunk, find_boxes
from reshard.core.manifest import Entry, ParamGroup
from reshard.errors import CorruptError
from reshard.state_dict import flat_params
from reshard.state_dict.flat_params import FlatUnit
from reshard.state_dict.optimizers import nested_slots
from reshard.state_dict.optimizers.numbering import (
    AmbiguousError,
    MoreParametersError,
    NameGroups,
    Signature,
    SignatureGroups,
    UnknownShapeError,
    name_divided,
    name_groups,
    name_jointly,
)
from reshard.state_dict.tree import LocalTensors, as_global, is_tensor
from reshard.training import optimizers

Slots = dict[str, Any]  # slot name -> leaf
Owner = Any  # what a state belongs to: an fqn, or a unit


@dataclass(frozen=True, slots=True)
class KnownParameters:
    """What is known of the model whose parameters an optimizer numbers or names.

    Args:
        shapes: in model order; buffers may be among them.
        divisions: ways in which HF Trainer may have divided the parameters into groups by decay.
        live: the param groups of the program's live optimizer; empty if unknown.
        model: the description of the model that the shapes are from; empty if a file has them.
        ignored: parameters that FSDP 1 did not shard: every rank has their whole state.
        frozen: parameters that have no state.
        blocks: the blocks in which the files store each weight; its state, cut like it, must have
            the same ones. Empty: not compared.
        are_joined: whether the param groups are those of several optimizers.
        missing: what to do to have a model; empty: name one.
        others: files with weights of other modules of the same model, which were not read.
    """

    shapes: Mapping[str, Index]
    units: Sequence[FlatUnit] = ()
    world: int = 1
    ordered: bool = True
    divisions: Sequence[Sequence[Sequence[str]]] = ()
    live: Sequence[ParamGroup] = ()
    model: str = ""
    ignored: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    blocks: Mapping[str, frozenset[Box]] = field(default_factory=dict)
    others: Sequence[str] = ()
    are_joined: bool = False
    missing: str = ""

    def name_by_groups(
        self, candidates: Mapping[Any, Signature], signs: SignatureGroups
    ) -> NameGroups | None:
        """Return the names if they follow from a known division of the parameters into groups.

        The parameters of each live group have the model's order or, if that does not fit, its own.
        """
        position = {fqn: number for number, fqn in enumerate(self.shapes)}
        own = [group.fqns for group in self.live]
        by_model = [sorted(fqns, key=lambda fqn: position.get(fqn, 0)) for fqns in own]
        for members in (by_model, own):
            divisions = [*self.divisions, *([members] if members else [])]
            named = name_divided(candidates, signs, divisions)
            if named is not None:
                return named
        return None


def infer_shape(slots: Slots) -> Index | None:
    """Infer the shape of a parameter from its slots.

    Nested slots count only if there are no others, because SOAP's preconditioners have other
    shapes.
    """
    tensors = select_tensors(slots)
    own = {name: value for name, value in tensors.items() if not nested_slots.is_nested(name)}
    known = ((name, as_global(value)) for name, value in (own or tensors).items())
    return optimizers.infer_shape({name: tensor.shape for name, tensor in known if tensor})


def select_tensors(slots: Slots) -> dict[str, Any]:
    """Return the slots that are tensors, except the step counter."""
    return {name: value for name, value in slots.items() if is_tensor(value) and name != "step"}


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """The layout in which tensors have their parameter's own shape."""

    known: KnownParameters

    def list_candidates(self) -> Mapping[Owner, Signature]:
        """Return the possible owners of a state, each with the signature that it would have."""
        shapes, blocks = self.known.shapes, self.known.blocks
        signs: dict[Owner, Signature] = {
            fqn: (shape, blocks.get(fqn)) if blocks else shape for fqn, shape in shapes.items()
        }
        return signs | self._mark_frozen()

    def sign(self, slots: Slots) -> Signature:
        """Return the signature of a state's owner; None if there is no state.

        It is -1, which nothing has, if ranks have slices of different shapes.
        """
        shape = infer_shape(slots)
        is_cut = shape is None and None in map(as_global, select_tensors(slots).values())
        if is_cut or shape is None or not self.known.blocks:
            return -1 if is_cut else shape
        tensors = filter(None, map(as_global, select_tensors(slots).values()))
        blocks = {find_boxes(tensor.chunks) for tensor in tensors if tensor.shape == shape}
        return (shape, blocks.pop()) if len(blocks) == 1 else -1

    def _mark_frozen(self) -> dict[Owner, Signature]:
        return {fqn: ("frozen", fqn) for fqn in self.known.frozen if fqn in self.known.shapes}

    def list_fqns(self, owner: Owner) -> list[str]:
        """Return the parameters of an owner."""
        return [owner]

    def build_entries(self, owner: Owner, slot: str, value: Any) -> Iterator[Entry]:
        """Yield the entries of one slot."""
        yield _build_whole_entry(owner, slot, value)

    def _is_piece(self, value: Any) -> bool:
        is_copied = isinstance(value, LocalTensors) and as_global(value) is not None
        return _is_1d(value) or (is_copied and bool(self.known.ignored))


@dataclass(frozen=True, slots=True)
class RunLayout(WholeLayout):
    """The layout of ``use_orig_params=True``: each shard has a 1-d slice of each parameter."""

    shards: int = 1

    def list_candidates(self) -> Mapping[Owner, Signature]:
        """Return each parameter with the number of elements that the ranks of a replica have."""
        sizes: dict[Owner, Signature] = {
            fqn: prod(shape) * (self.shards if fqn in self.known.ignored else 1)
            for fqn, shape in self.known.shapes.items()
        }
        return sizes | self._mark_frozen()

    def sign(self, slots: Slots) -> Signature:
        """Return the number of elements that the ranks of a replica have together."""
        sizes = set()
        for value in _select_cut(slots):
            replicas = _split_replicas(value, self.shards) if self._is_piece(value) else None
            sizes |= (
                {sum(c.box.volume for c in pieces) for pieces in replicas} if replicas else {-1}
            )
        return _get_single_size(sizes)

    def build_entries(self, owner: Owner, slot: str, value: Any) -> Iterator[Entry]:
        """Yield one entry, with the chunks of all replicas."""
        if _is_0d(value) or owner in self.known.ignored:
            yield _build_whole_entry(owner, slot, value)
            return
        shape = self.known.shapes[owner]
        tensors = [
            flat_params.join_slices(pieces[0].file, owner, shape, pieces)
            for pieces in _split_replicas(value, self.shards)
        ]
        chunks = tuple(chunk for tensor in tensors for chunk in tensor.chunks)
        yield Entry(owner, slot, tensors[0].dtype, shape, chunks)


@dataclass(frozen=True, slots=True)
class UnitLayout(WholeLayout):
    """The layout of ``use_orig_params=False``: one zero-padded 1-d state for each unit."""

    shards: int = 1

    def list_candidates(self) -> Mapping[Owner, Signature]:
        """Return each unit, and each ignored parameter, with the number of elements on a rank."""
        units = {unit: -(-unit.numel // self.shards) for unit in self.known.units}
        shapes = self.known.shapes
        alone = {fqn: prod(shapes[fqn]) for fqn in self.known.ignored if fqn in shapes}
        owners: dict[Owner, Signature] = {**units, **alone}
        if not alone:
            return owners
        numbers = {fqn: number for number, fqn in enumerate(shapes)}
        places = {
            unit: flat_params.find_place(unit.prefix, alone, numbers) for unit in self.known.units
        }
        order = sorted(owners, key=lambda owner: places.get(owner, numbers.get(owner, 0)))
        return {owner: owners[owner] for owner in order}

    def sign(self, slots: Slots) -> Signature:
        """Return the number of elements on a rank."""
        sizes = set()
        for value in _select_cut(slots):
            is_piece = self._is_piece(value)
            sizes |= {c.box.volume for c in value.pieces.values()} if is_piece else {-1}
        return _get_single_size(sizes)

    def list_fqns(self, owner: Owner) -> list[str]:
        """Return the parameters of a unit."""
        if owner in self.known.ignored:
            return [owner]
        return [member.fqn for member in owner.members]

    def build_entries(self, owner: Owner, slot: str, value: Any) -> Iterator[Entry]:
        """Yield one entry for each member; all of them have the unit's 0-d values."""
        if _is_0d(value) or owner in self.known.ignored:
            yield from (_build_whole_entry(fqn, slot, value) for fqn in self.list_fqns(owner))
            return
        pieces = [
            piece
            for replica in _split_replicas(value, self.shards)
            for piece in flat_params.locate_pieces(replica, owner.numel)
        ]
        for fqn, tensor in owner.build_tensors(pieces).items():
            yield tensor.make_entry(fqn, slot)


def _build_whole_entry(fqn: str, slot: str, value: Any) -> Entry:
    tensor = as_global(value)
    if tensor is None:
        raise CorruptError(
            next(iter(value.pieces.values())).file,
            f"{slot} of {fqn!r} has different shapes on different ranks: {sorted(value.shapes())}",
            "slices of a flat optimizer are stored under a parameter's name: save it with DCP",
        )
    return tensor.make_entry(fqn, slot)


def _get_single_size(sizes: set[int]) -> Signature:
    """Return the only size; -1, which nothing has, if there are several; None if there is none."""
    return sizes.pop() if len(sizes) == 1 else -1 if sizes else None


def _is_1d(value: Any) -> bool:
    return isinstance(value, LocalTensors) and all(len(shape) == 1 for shape in value.shapes())


def _is_0d(value: Any) -> bool:
    return isinstance(value, LocalTensors) and value.shapes() == {()}


def _select_cut(slots: Slots) -> Iterator[Any]:
    """Yield the slots that ranks have a piece of; a 0-d value (``mu_product``) is on each rank."""
    return (value for value in select_tensors(slots).values() if not _is_0d(value))


def _split_replicas(value: LocalTensors, shards: int) -> list[list[Chunk]]:
    # Ranks 0 to ``shards - 1`` are the first replica: FSDP 1's hybrid groups are consecutive ranks
    # (``_init_process_group_state_for_hybrid_shard``).
    groups: dict[int, list[Chunk]] = {}
    for rank in sorted(value.pieces):
        groups.setdefault(rank // shards, []).append(value.pieces[rank])
    return list(groups.values())


def identify_layout(
    state: Mapping[Any, Slots],
    members: Sequence[Sequence[Any]],
    known: KnownParameters,
    stored: Mapping[Any, str],
) -> tuple[WholeLayout, dict[Any, Owner]]:
    """Return the one layout under which every number gets a name, and the owner of each number.

    Args:
        members: the numbers of each param group.
        stored: the names that the file gives for the numbers, if any.

    Raises:
        AmbiguousError: no layout fits; the reason is that of the first one in which every state is
            of a known shape or size, or else that of the layout of whole tensors.
    """
    order = [key for keys in members for key in keys]
    if not all(isinstance(key, int) for key in order):
        raise AmbiguousError(list(map(str, order)), "are listed among numbered ones")
    if order != sorted(order):
        # The ids of FSDP's ``rekey_optim_state_dict`` count the parameters of the whole model.
        members = [sorted(keys) for keys in members]
    layouts: list[WholeLayout] = [WholeLayout(known)]
    leaves = [value for slots in state.values() for value in select_tensors(slots).values()]
    world = max((len(leaf.pieces) for leaf in leaves if isinstance(leaf, LocalTensors)), default=0)
    if world:
        # Hybrid sharding divides over a part of the ranks; full sharding, the usual case, is first.
        shards = [n for n in range(known.world, 0, -1) if known.world % n == 0]
        layouts += [UnitLayout(known, n) for n in shards if known.units]
        layouts += [RunLayout(known, n) for n in shards]
    reasons: list[AmbiguousError] = []
    for layout in layouts:
        signs = [[layout.sign(state.get(key, {})) for key in keys] for keys in members]
        candidates = layout.list_candidates()
        try:
            if stored:
                return layout, _check_stored_names(stored, candidates, members, signs)
            find_names = name_jointly if known.are_joined else name_groups
            named = find_names(candidates, signs, ordered=known.ordered)
        except AmbiguousError as error:
            reasons.append(error)
            continue
        if any(None in fqns for fqns in named):
            named = known.name_by_groups(candidates, signs) or named
        return layout, _pair_owners(members, named)
    signs = [[layouts[0].sign(state.get(key, {})) for key in keys] for keys in members]
    divided = known.name_by_groups(layouts[0].list_candidates(), signs)
    if divided is not None:
        return layouts[0], _pair_owners(members, divided)
    fitting = (reason for reason in reasons if not isinstance(reason, UnknownShapeError))
    raise next(fitting, reasons[0])


def fits_live_order(
    state: Mapping[Any, Slots],
    members: Sequence[Sequence[Any]],
    known: KnownParameters,
    names: Mapping[Any, Owner],
) -> bool:
    """Return whether the order of the live optimizer fits as well, and gives other names."""
    layout = WholeLayout(known)
    signs = [[layout.sign(state.get(key, {})) for key in keys] for keys in members]
    division = [group.fqns for group in known.live]
    own = name_divided(layout.list_candidates(), signs, [division])
    return own is not None and _pair_owners(members, own) != names


def _pair_owners(
    members: Sequence[Sequence[Any]], named: Sequence[Sequence[Owner | None]]
) -> dict[Any, Owner]:
    pairs = zip(members, named, strict=True)
    return {key: fqn for keys, fqns in pairs for key, fqn in zip(keys, fqns, strict=True)}


def _check_stored_names(
    stored: Mapping[Any, str],
    candidates: Mapping[Any, Signature],
    members: Sequence[Sequence[Any]],
    signs: Sequence[Sequence[Signature]],
) -> dict[Any, str]:
    for keys, group_signs in zip(members, signs, strict=True):
        for key, sign in zip(keys, group_signs, strict=True):
            if sign is not None and stored[key] not in candidates:
                raise MoreParametersError(
                    f"its parameter {stored[key]!r} is not among the weights that were read"
                )
            if sign is not None and candidates[stored[key]] != sign:
                raise AmbiguousError([stored[key]])
    return dict(stored)
