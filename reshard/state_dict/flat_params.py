"""Flat parameters: FSDP 1's ``_flat_param`` and FairScale's ``flat_param_N``.

A unit's parameters lie end to end in one flat tensor of which each rank has a piece. The pieces
do not say what lies where in them. That is taken, in this order, from: the rank files' own views
(``use_orig_params=True``), FairScale's ``shard_metadata``, ``--model`` and ``--wrap``, an optimizer
that is saved by fqn. A layout counts only if it fills every unit to the last element.

Sources: torch 2.13 ``distributed/fsdp/_state_dict_utils.py`` (local state dicts),
``_flat_param.py``; fairscale 0.4.13 ``nn/data_parallel/fully_sharded_data_parallel.py``
(``local_metadata_dict``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from reshard.box import Box, Index, as_index
from reshard.errors import CorruptError, UnsupportedError
from reshard.layout import flat_param
from reshard.layout.partition import Member, flat_chunks, run_chunks
from reshard.manifest import Chunk
from reshard.model import ModelShapes
from reshard.schema import COUNT, SHAPE, TEXT, expect, mapping, record, sequence
from reshard.state_dict.tree import GlobalTensor, LocalTensors

KEY = "_flat_param"
_HINT = (
    "say which model was wrapped and how: --model config.json|DIR|module:factory"
    " --wrap LlamaDecoderLayer|size=N|none"
)
_FLAT = record(names=sequence(TEXT), shapes=sequence(SHAPE), numels=sequence(COUNT))
_FAIRSCALE = record(param_metadata=sequence(record(fsdp_path=TEXT, params=mapping(TEXT, _FLAT))))


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """One flat parameter with what lies in it."""

    prefix: str
    members: tuple[Member, ...]
    numel: int  # with the padding that belongs to it, before it is cut

    def tensors(self, pieces: Iterable[tuple[int, Chunk]]) -> dict[str, GlobalTensor]:
        """The members as logical tensors, from pieces with their first flat element."""
        pieces = list(pieces)
        chunks = flat_chunks(self.members, pieces)
        dtype = pieces[0][1].dtype
        return {
            member.fqn: GlobalTensor(dtype, member.shape, tuple(chunks[member.fqn]))
            for member in self.members
        }


def parse_prefix(key: str) -> str | None:
    """The wrapped module that a flat parameter belongs to; None for other names."""
    if key == KEY or key.endswith(f".{KEY}"):
        return key.removesuffix(KEY).removesuffix(".")
    return None


def resolve(
    state: Mapping[str, Any],
    *,
    where: str,
    model: ModelShapes | None,
    shapes: Mapping[str, Index],
) -> tuple[dict[str, Any], list[FlatUnit]]:
    """A model's state dict with its flat parameters resolved, and the units.

    Args:
        state: every rank's LOCAL_STATE_DICT, joined.
        model: the model that was wrapped, with its units, where the user named it.
        shapes: what an optimizer that is saved by fqn says of the parameters.

    Raises:
        UnsupportedError: nothing says what a flat parameter holds.
        CorruptError: what was said does not fill it.
    """
    flats = {
        prefix: value
        for key, value in state.items()
        if (prefix := parse_prefix(key)) is not None and isinstance(value, GlobalTensor)
    }
    rest = {key: value for key, value in state.items() if parse_prefix(key) is None}
    known = {**shapes, **(model.parameters if model else {})}
    origins = _ShardOrigins(flats)
    views = {fqn: value for fqn, value in rest.items() if origins.holds(value)}
    if views:
        ordered = {fqn: origins.ordered(view) for fqn, view in views.items()}
        return {**rest, **_resolve_views(ordered, known, where)}, []
    units = [
        _resolve_unit(prefix, flat, flats, model, shapes, where) for prefix, flat in flats.items()
    ]
    found: dict[str, Any] = {}
    for unit, value in zip(units, flats.values(), strict=True):
        found.update(unit.tensors((chunk.box.origin[0], chunk) for chunk in value.chunks))
    return {**found, **rest}, units


class _ShardOrigins:
    """Where the flat shards lie in the ranks' files, and at which flat element each begins."""

    def __init__(self, flats: Mapping[str, GlobalTensor]) -> None:
        self._shards: dict[str, list[tuple[int, int, int]]] = {}
        for flat in flats.values():
            for chunk in flat.chunks:
                shard = (*chunk.byte_span, chunk.box.origin[0])
                self._shards.setdefault(chunk.file, []).append(shard)

    def of(self, chunk: Chunk) -> int | None:
        """The first flat element of the shard that a slice lies in."""
        start, stop = chunk.byte_span
        shards = self._shards.get(chunk.file, ())
        return next((origin for a, b, origin in shards if a <= start and stop <= b), None)

    def holds(self, value: Any) -> bool:
        """Whether ranks' plain 1-d tensors are slices of the flat shards in the same files."""
        if not isinstance(value, LocalTensors) or any(len(shape) != 1 for shape in value.shapes()):
            return False
        held = [chunk for chunk in value.pieces.values() if chunk.box.volume]
        return all(self.of(chunk) is not None for chunk in held)

    def ordered(self, view: LocalTensors) -> list[Chunk]:
        """A parameter's slices in the order of their shards, which the files state."""
        held = [chunk for chunk in view.pieces.values() if chunk.box.volume]
        empty = [chunk for chunk in view.pieces.values() if not chunk.box.volume]
        return [*sorted(held, key=lambda chunk: self.of(chunk) or 0), *empty]


def _resolve_views(
    views: Mapping[str, Sequence[Chunk]], known: Mapping[str, Index], where: str
) -> dict[str, GlobalTensor]:
    """use_orig_params=True: every rank names its own slices; only shapes are missing."""
    same = {tuple(held): known[fqn] for fqn, held in views.items() if fqn in known}
    tied = {fqn: tuple(held) for fqn, held in views.items() if fqn not in known}
    known = {**known, **{fqn: same[held] for fqn, held in tied.items() if held in same}}
    missing = [fqn for fqn in views if fqn not in known]
    if missing:
        sizes = ", ".join(
            f"{fqn} ({sum(chunk.box.volume for chunk in views[fqn])} elements)"
            for fqn in missing[:3]
        )
        raise UnsupportedError(
            where,
            f"holds flat slices of {len(missing)} parameters whose shapes no file says: {sizes}"
            + (" ..." if len(missing) > 3 else ""),
            "say which model it is: --model config.json|DIR|module:factory",
        )
    return {fqn: join_slices(where, fqn, known[fqn], held) for fqn, held in views.items()}


def join_slices(where: str, fqn: str, shape: Index, pieces: Sequence[Chunk]) -> GlobalTensor:
    """A tensor whose 1-d slices follow one another.

    Raises:
        CorruptError: they do not add up to the shape.
    """
    at = 0
    chunks: list[Chunk] = []
    total = sum(piece.box.volume for piece in pieces)
    if total != prod(shape):
        raise CorruptError(
            where,
            f"{fqn!r} is {shape}, {prod(shape)} elements, but the ranks hold {total} of it",
            "the model is another one, or a rank's file is missing",
        )
    for piece in pieces:
        stop = at + piece.box.volume
        chunks += run_chunks(piece.file, piece.byte_offset, piece.dtype, shape, at, stop)
        at = stop
    return GlobalTensor(pieces[0].dtype, shape, tuple(chunks))


def _resolve_unit(
    prefix: str,
    flat: GlobalTensor,
    flats: Mapping[str, GlobalTensor],
    model: ModelShapes | None,
    shapes: Mapping[str, Index],
    where: str,
) -> FlatUnit:
    total = prod(flat.shape)
    given = {unit.prefix: unit for unit in model.units} if model else {}
    if model and given:
        if prefix not in given:
            raise CorruptError(
                where,
                f"has a flat parameter of {prefix or 'the root'!r}, which --wrap does not make;"
                f" it makes {', '.join(repr(p or 'the root') for p in list(given)[:4])}",
                "give --wrap as the run had it",
            )
        members = [(fqn, model.parameters[fqn]) for fqn in given[prefix].members]
    else:
        nested = [other for other in flats if other != prefix and _under(other, prefix)]
        members = [
            (fqn, shape)
            for fqn, shape in shapes.items()
            if _under(fqn, prefix) and not any(_under(fqn, other) for other in nested)
        ]
    if not members:
        raise UnsupportedError(
            where,
            f"holds the flat parameter of {prefix or 'the root'!r}, {total} elements, and nothing"
            " that says which parameters lie in it",
            _HINT,
        )
    return build_unit(prefix, members, total, where)


def _under(fqn: str, prefix: str) -> bool:
    return not prefix or fqn.startswith(f"{prefix}.")


def build_unit(
    prefix: str, members: Sequence[tuple[str, Index]], total: int, where: str
) -> FlatUnit:
    """A flat parameter of ``total`` elements filled with these members.

    Raises:
        CorruptError: they do not fill it.
    """
    numel = sum(prod(shape) for _, shape in members)
    if numel != total:
        raise CorruptError(
            where,
            f"the flat parameter of {prefix or 'the root'!r} has {total} elements; the"
            f" {len(members)} parameters found for it ({members[0][0]} ...) have {numel}",
            _HINT,
        )
    starts, _ = flat_param.place_members(members, aligned_to=1, ranks=1)
    return FlatUnit(prefix, tuple(Member(fqn, s, starts[fqn]) for fqn, s in members), total)


def build_units(model: ModelShapes) -> list[FlatUnit]:
    """The units of a model whose optimizer is flat and whose weights are not."""
    found = []
    for unit in model.units:
        members = [(fqn, model.parameters[fqn]) for fqn in unit.members]
        found.append(build_unit(unit.prefix, members, sum(prod(s) for _, s in members), ""))
    return found


def locate_pieces(pieces: Sequence[Chunk], numel: int) -> list[tuple[int, Chunk]]:
    """Equal pieces of a flat tensor in shard order, with their places; zero padding cut off.

    Raises:
        CorruptError: they are not the equal pieces of so many elements.
    """
    size = -(-numel // len(pieces))
    found = []
    for number, piece in enumerate(pieces):
        if piece.box.volume != size:
            raise CorruptError(
                piece.file,
                f"holds {piece.box.volume} elements of a flat parameter of {numel}; each of"
                f" {len(pieces)} ranks has {size}",
                "files of runs of other sizes are mixed",
            )
        at = number * size
        box = Box((0,), (min(size, max(numel - at, 0)),))
        found.append((at, replace(piece, box=box)))
    return found


def read_fairscale_units(metadata: Any, where: str) -> dict[str, FlatUnit]:
    """Key of each flat parameter -> what FairScale's own metadata say of it.

    Raises:
        CorruptError: they contradict themselves.
    """
    expect(where, metadata, _FAIRSCALE, "shard_metadata")
    units = {}
    for about in metadata["param_metadata"]:
        path = about["fsdp_path"]
        prefix = f"{path}." if path else ""
        for name, held in about["params"].items():
            if len(held["names"]) != len(held["shapes"]):
                raise CorruptError(where, f"shard_metadata of {name!r}: not a shape for each name")
            named = zip(held["names"], held["shapes"], strict=True)
            members = [(prefix + fqn, as_index(shape)) for fqn, shape in named]
            if not members:
                raise CorruptError(where, f"shard_metadata of {name!r} names no parameter")
            units[prefix + name] = build_unit(path, members, sum(held["numels"]), where)
    return units
