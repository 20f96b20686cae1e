"""How an optimizer's tensors are stored: whole, in 1-d runs of parameters, or in flat units.

A state dict that names its parameters has whole tensors (sharded or not). One that numbers them may
have any of the three; the form under which every number gets a name is the one.

Sources: torch 2.13 ``distributed/fsdp/_optim_utils.py``, ``_init_utils.py`` (hybrid groups).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from reshard.box import Index
from reshard.errors import CorruptError
from reshard.manifest import Chunk, Entry
from reshard.state_dict import flat_params, nested_slots
from reshard.state_dict.flat_params import FlatUnit
from reshard.state_dict.optimizer_names import AmbiguousError, Signature, name_groups
from reshard.state_dict.tree import LocalTensors, as_global, is_tensor

Slots = dict[str, Any]  # slot name -> leaf
Owner = Any  # what a state belongs to: an fqn, or a unit


@dataclass(frozen=True, slots=True)
class KnownParameters:
    """What is known of the model whose parameters an optimizer numbers or names."""

    shapes: Mapping[str, Index]  # in model order; buffers may be among them
    units: Sequence[FlatUnit] = ()
    world: int = 1
    ordered: bool = True


def infer_shape(slots: Slots) -> Index | None:
    """The shape of the parameter that a state belongs to: that of its largest slot.

    Adafactor keeps a row and a column instead: torch's as (7, 1) and (1, 13), transformers' as (7,)
    and (13,). What is nested counts where there is nothing else: SOAP's preconditioners do not.
    """
    tensors = select_tensors(slots)
    own = {name: value for name, value in tensors.items() if not nested_slots.is_nested(name)}
    held = {k: tensor.shape for k, v in (own or tensors).items() if (tensor := as_global(v))}
    row, column = held.get("exp_avg_sq_row"), held.get("exp_avg_sq_col")
    if row and column:
        return (*row, column[-1])
    most = max(map(len, held.values()), default=None)
    dims = zip(*(shape for shape in held.values() if len(shape) == most), strict=True)
    return None if most is None else tuple(max(extents) for extents in dims)


def select_tensors(slots: Slots) -> dict[str, Any]:
    """The slots that are per element, or at least no counter."""
    return {name: value for name, value in slots.items() if is_tensor(value) and name != "step"}


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """Tensors have their parameter's own shape."""

    known: KnownParameters

    def candidates(self) -> Mapping[Owner, Signature]:
        """What a state may belong to, and what it would then be known by."""
        return dict(self.known.shapes)

    def sign(self, slots: Slots) -> Signature:
        """What is known of whom a state belongs to; None without state."""
        return infer_shape(slots)

    def fqns(self, owner: Owner) -> list[str]:
        """The parameters of an owner."""
        return [owner]

    def entries(self, owner: Owner, slot: str, value: Any) -> Iterator[Entry]:
        """The entries of one slot.

        Raises:
            CorruptError: it is not stored in this form.
        """
        tensor = as_global(value)
        if tensor is None:
            raise CorruptError(
                next(iter(value.pieces.values())).file,
                f"{slot} of {owner!r} has other shapes on other ranks: {sorted(value.shapes())}",
                "these are slices of a flat optimizer under a parameter's name",
            )
        yield Entry(owner, slot, tensor.dtype, tensor.shape, tensor.chunks)


@dataclass(frozen=True, slots=True)
class RunLayout(WholeLayout):
    """use_orig_params=True: each of ``shards`` ranks has a 1-d slice of each parameter."""

    shards: int = 1

    def candidates(self) -> Mapping[Owner, Signature]:
        """Parameters by their number of elements."""
        return {fqn: prod(shape) for fqn, shape in self.known.shapes.items()}

    def sign(self, slots: Slots) -> Signature:
        """The elements that the ranks of a replica hold together."""
        sizes = set()
        for value in select_tensors(slots).values():
            replicas = _split_replicas(value, self.shards) if _is_1d(value) else None
            sizes |= {sum(c.box.volume for c in held) for held in replicas} if replicas else {-1}
        return _get_single_size(sizes)

    def entries(self, owner: Owner, slot: str, value: Any) -> Iterator[Entry]:
        """One entry, the replicas' chunks one after the other."""
        shape = self.known.shapes[owner]
        made = [
            flat_params.join_slices(held[0].file, owner, shape, held)
            for held in _split_replicas(value, self.shards)
        ]
        chunks = tuple(chunk for tensor in made for chunk in tensor.chunks)
        yield Entry(owner, slot, made[0].dtype, shape, chunks)


@dataclass(frozen=True, slots=True)
class UnitLayout(WholeLayout):
    """use_orig_params=False: one 1-d state a flat parameter, each rank's zero-padded."""

    shards: int = 1

    def candidates(self) -> Mapping[Owner, Signature]:
        """Units by the elements of a rank's piece."""
        return {unit: -(-unit.numel // self.shards) for unit in self.known.units}

    def sign(self, slots: Slots) -> Signature:
        """The elements of a rank's piece."""
        sizes = set()
        for value in select_tensors(slots).values():
            sizes |= {c.box.volume for c in value.pieces.values()} if _is_1d(value) else {-1}
        return _get_single_size(sizes)

    def fqns(self, owner: Owner) -> list[str]:
        """The parameters of a unit."""
        return [member.fqn for member in owner.members]

    def entries(self, owner: Owner, slot: str, value: Any) -> Iterator[Entry]:
        """One entry a member."""
        pieces = [
            piece
            for held in _split_replicas(value, self.shards)
            for piece in flat_params.locate_pieces(held, owner.numel)
        ]
        for fqn, tensor in owner.tensors(pieces).items():
            yield Entry(fqn, slot, tensor.dtype, tensor.shape, tensor.chunks)


def _get_single_size(sizes: set[int]) -> Signature:
    """The one size; -1, which nothing has, where there are several."""
    return sizes.pop() if len(sizes) == 1 else -1 if sizes else None


def _is_1d(value: Any) -> bool:
    return isinstance(value, LocalTensors) and all(len(shape) == 1 for shape in value.shapes())


def _split_replicas(value: LocalTensors, shards: int) -> list[list[Chunk]]:
    """The ranks' pieces, a list a replica: ranks 0 to shards-1 are the first.

    FSDP 1's hybrid groups are consecutive ranks (``_init_process_group_state_for_hybrid_shard``).
    """
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
    """The one form under which every number gets a name, and what each number means.

    Args:
        members: the numbers of each param group.
        stored: the names that the file gives beside them, if it does.

    Raises:
        AmbiguousError: none, for the reason that holds for whole tensors.
    """
    order = [key for keys in members for key in keys]
    if not all(isinstance(key, int) for key in order):
        raise AmbiguousError(list(map(str, order)), "stand among numbered ones")
    if order != sorted(order):
        members = [sorted(keys) for keys in members]  # FSDP's rekeyed ids count the whole model
    forms: list[WholeLayout] = [WholeLayout(known)]
    leaves = [value for slots in state.values() for value in select_tensors(slots).values()]
    world = max((len(leaf.pieces) for leaf in leaves if isinstance(leaf, LocalTensors)), default=0)
    if world:
        shards = [n for n in range(known.world, 0, -1) if known.world % n == 0]
        forms += [UnitLayout(known, n) for n in shards if known.units]
        forms += [RunLayout(known, n) for n in shards]
    reason: AmbiguousError | None = None
    for form in forms:
        signs = [[form.sign(state.get(key, {})) for key in keys] for keys in members]
        candidates = form.candidates()
        try:
            if stored:
                return form, _check_stored_names(stored, candidates, members, signs)
            named = name_groups(candidates, signs, ordered=known.ordered)
        except AmbiguousError as error:
            reason = reason or error
            continue
        pairs = zip(members, named, strict=True)
        return form, {key: fqn for keys, fqns in pairs for key, fqn in zip(keys, fqns, strict=True)}
    raise reason or AmbiguousError(list(known.shapes))


def _check_stored_names(
    stored: Mapping[Any, str],
    candidates: Mapping[Any, Signature],
    members: Sequence[Sequence[Any]],
    signs: Sequence[Sequence[Signature]],
) -> dict[Any, str]:
    """The names that the file itself gives, where the states fit the parameters."""
    for keys, held in zip(members, signs, strict=True):
        for key, sign in zip(keys, held, strict=True):
            if sign is not None and candidates.get(stored[key]) != sign:
                raise AmbiguousError([stored[key]])
    return dict(stored)
