"""Resolve flat parameters: FSDP 1's ``_flat_param``.

A unit's parameters are stored end to end in one flat tensor, of which each rank has a piece. The
pieces do not state which parameter is where. The layout comes from the first of these that exists:
the rank files' own views (``use_orig_params=True``), ``--model`` and ``--wrap``, an optimizer that
is saved by fqn. A layout is accepted only if it fills every unit to the last element.

Sources: torch 2.13 ``distributed/fsdp/_state_dict_utils.py`` (local state dicts),
``_flat_param.py``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from reshard.core.box import Box, Index
from reshard.core.chunks import Chunk
from reshard.errors import CorruptError, UnsupportedError
from reshard.layouts import flat_param
from reshard.layouts.partition import Member, build_flat_chunks, require_dense, run_chunks
from reshard.model import ModelShapes
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import LocalTensors
from reshard.units import abridge

KEY = "_flat_param"
_HINT = (
    "pass the model and how it was wrapped: --model config.json|DIR|module:factory"
    " --wrap LlamaDecoderLayer|size=N|none"
)
_HINT_WRAP = "pass the wrapping of the run: --wrap LlamaDecoderLayer|size=N|none"


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """One flat parameter and its members."""

    prefix: str
    members: tuple[Member, ...]
    numel: int  # elements before it is cut, with its padding

    def __str__(self) -> str:
        """Return how messages name the flat parameter."""
        return f"the flat parameter of {_describe_unit(self.prefix)}"

    def build_tensors(self, pieces: Iterable[tuple[int, Chunk]]) -> dict[str, GlobalTensor]:
        """Build the members' global tensors from pieces, each with its first flat element."""
        pieces = list(pieces)
        chunks = build_flat_chunks(self.members, pieces)
        dtype = pieces[0][1].dtype
        return {
            member.fqn: GlobalTensor(dtype, member.shape, tuple(chunks[member.fqn]))
            for member in self.members
        }


def parse_prefix(key: str) -> str | None:
    """Return the wrapped module that a flat parameter belongs to; None for other names."""
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
    """Return a model's state dict with its flat parameters resolved, and the units.

    Args:
        state: every rank's LOCAL_STATE_DICT, joined.
        model: the model that was wrapped, with its units, where the user named it.
        shapes: the shapes of parameters in an optimizer that is saved by fqn.
    """
    flats = _collect_flats(state, where)
    rest = {key: value for key, value in state.items() if parse_prefix(key) is None}
    known = {**shapes, **(model.parameters if model else {})}
    origins = _ShardOrigins(flats)
    views = {fqn: value for fqn, value in rest.items() if origins.contains(value, fqn in known)}
    if views:
        ordered = {fqn: origins.sort_slices(view) for fqn, view in views.items()}
        return {**rest, **_resolve_views(ordered, known, where)}, []
    _refuse_lone_slices(rest, known, where)
    known = {fqn: shape for fqn, shape in shapes.items() if fqn not in rest}
    units = [
        _resolve_unit(prefix, flat, flats, model, known, rest, where)
        for prefix, flat in flats.items()
    ]
    tensors: dict[str, Any] = {}
    for unit, value in zip(units, flats.values(), strict=True):
        tensors.update(unit.build_tensors((chunk.box.origin[0], chunk) for chunk in value.chunks))
    return {**tensors, **rest}, units


def _refuse_lone_slices(rest: Mapping[str, Any], known: Mapping[str, Index], where: str) -> None:
    # With ``use_orig_params=True``, ranks have slices under the same names, of which DCP saves one.
    sliced = [
        fqn
        for fqn, value in rest.items()
        if fqn in known and isinstance(value, GlobalTensor)
        if len(value.shape) == 1 and value.shape != known[fqn]
    ]
    if sliced:
        raise UnsupportedError(
            where,
            f"contains one rank's slice of {abridge(sliced)}: it is a LOCAL_STATE_DICT of"
            " use_orig_params=True, of which DCP saves a part",
            "save a SHARDED_STATE_DICT, which FSDP can load, too",
        )


def find_ignored(
    stored: Mapping[str, Any], resolved: Mapping[str, Any], model: ModelShapes
) -> frozenset[str]:
    """Return the parameters beside sharded ones of which every rank stores a copy.

    They are those that FSDP ignored.

    Args:
        stored: the model's state dict as the files have it.
        resolved: the same without flat parameters and slices.
    """
    if not any(isinstance(leaf, GlobalTensor) for leaf in stored.values()):
        return frozenset()
    return frozenset(
        fqn
        for fqn, leaf in stored.items()
        if fqn in model.parameters and isinstance(leaf, LocalTensors) and resolved[fqn] is leaf
    )


def _collect_flats(state: Mapping[str, Any], where: str) -> dict[str, GlobalTensor]:
    # FSDP's state dict has each as a ShardedTensor, which states the rank's part of it. The tensors
    # of ``named_parameters`` are plain.
    flats = {}
    for key, value in state.items():
        prefix = parse_prefix(key)
        if prefix is None:
            continue
        if not isinstance(value, GlobalTensor):
            raise UnsupportedError(
                where,
                f"contains {key!r} as a plain tensor, which does not state which part of the flat"
                " parameter it is",
                "save model.state_dict() of the FSDP module, not its parameters",
            )
        flats[prefix] = value
    return flats


class _ShardOrigins:
    """The byte ranges of the flat shards in the ranks' files, each with its first flat element."""

    def __init__(self, flats: Mapping[str, GlobalTensor]) -> None:
        self._shards: dict[str, list[tuple[int, int, int]]] = {}
        for flat in flats.values():
            for chunk in flat.chunks:
                shard = (*chunk.byte_span, chunk.box.origin[0])
                self._shards.setdefault(chunk.file, []).append(shard)

    def find(self, chunk: Chunk) -> int | None:
        start, stop = chunk.byte_span
        shards = self._shards.get(chunk.file, ())
        return next((origin for a, b, origin in shards if a <= start and stop <= b), None)

    def contains(self, value: Any, is_parameter: bool) -> bool:
        # Without elements, only its name distinguishes a parameter (``is_parameter``) from a
        # buffer.
        if not isinstance(value, LocalTensors) or any(len(shape) != 1 for shape in value.shapes()):
            return False
        slices = [chunk for chunk in value.pieces.values() if chunk.box.volume]
        return (is_parameter or bool(slices)) and all(self.find(c) is not None for c in slices)

    def sort_slices(self, view: LocalTensors) -> list[Chunk]:
        slices = [chunk for chunk in view.pieces.values() if chunk.box.volume]
        empty = [chunk for chunk in view.pieces.values() if not chunk.box.volume]
        return [*sorted(slices, key=lambda chunk: self.find(chunk) or 0), *empty]


def _resolve_views(
    views: Mapping[str, Sequence[Chunk]], known: Mapping[str, Index], where: str
) -> dict[str, GlobalTensor]:
    """Resolve ``use_orig_params=True``, where ranks name their slices but not the shapes."""
    # Two names of the same bytes are tied weights: one name's shape is also the other's.
    same = {tuple(slices): known[fqn] for fqn, slices in views.items() if fqn in known}
    tied = {fqn: tuple(slices) for fqn, slices in views.items() if fqn not in known}
    known = {**known, **{fqn: same[slices] for fqn, slices in tied.items() if slices in same}}
    missing = [fqn for fqn in views if fqn not in known]
    if missing:
        sizes = ", ".join(
            f"{fqn} ({sum(chunk.box.volume for chunk in views[fqn])} elements)"
            for fqn in missing[:3]
        )
        raise UnsupportedError(
            where,
            f"contains flat slices of {len(missing)} parameters whose shapes no file states:"
            f" {sizes}" + (" ..." if len(missing) > 3 else ""),
            "pass the model: --model config.json|DIR|module:factory",
        )
    return {fqn: join_slices(where, fqn, known[fqn], slices) for fqn, slices in views.items()}


def join_slices(where: str, fqn: str, shape: Index, pieces: Sequence[Chunk]) -> GlobalTensor:
    """Build a tensor whose 1-d slices follow one another.

    Raises:
        CorruptError: the slices do not add up to the shape.
    """
    at = 0
    chunks: list[Chunk] = []
    total = sum(piece.box.volume for piece in pieces)
    if total != prod(shape):
        raise CorruptError(
            where,
            f"{fqn!r} has shape {shape} ({prod(shape)} elements), but the ranks store {total}"
            " elements of it",
            "pass the model of this checkpoint, or copy the missing rank's file here",
        )
    for piece in pieces:
        stop = at + piece.box.volume
        chunks += run_chunks(piece, 0, shape, at, stop)
        at = stop
    return GlobalTensor(pieces[0].dtype, shape, tuple(chunks))


def _resolve_unit(
    prefix: str,
    flat: GlobalTensor,
    flats: Mapping[str, GlobalTensor],
    model: ModelShapes | None,
    shapes: Mapping[str, Index],
    ignored: Container[str],
    where: str,
) -> FlatUnit:
    # ``ignored``: the parameters that are stored by themselves (``ignored_modules`` of FSDP).
    total = prod(flat.shape)
    given = {unit.prefix: unit for unit in model.units} if model else {}
    if model and given:
        if prefix not in given:
            raise CorruptError(
                where,
                f"has a flat parameter of {_describe_unit(prefix)}, but --wrap does not create one"
                f" there; it creates {', '.join(map(_describe_unit, list(given)[:4]))}",
                "pass --wrap with the wrapping of the run",
            )
        own = (fqn for fqn in given[prefix].members if fqn not in ignored)
        members = [(fqn, model.parameters[fqn]) for fqn in own]
    else:
        # FSDP puts a parameter into the innermost wrapped module that contains it.
        nested = [other for other in flats if other != prefix and _is_inside(other, prefix)]
        members = [
            (fqn, shape)
            for fqn, shape in shapes.items()
            if _is_inside(fqn, prefix) and not any(_is_inside(fqn, other) for other in nested)
        ]
    if not members:
        raise UnsupportedError(
            where,
            f"contains the flat parameter of {_describe_unit(prefix)} with {total} elements, but"
            " no file states which parameters it combines",
            _HINT if model is None else _HINT_WRAP,
        )
    return build_unit(prefix, members, total, where, hint=_HINT if model is None else _HINT_WRAP)


def _describe_unit(prefix: str) -> str:
    return repr(prefix) if prefix else "the root module"


def find_place(prefix: str, ignored: Container[str], numbers: Mapping[str, int]) -> float:
    """Return a number by which a unit has its place among the parameters that FSDP ignored.

    In FSDP's model, a module has its own ignored parameters first, then its flat parameter, then
    its children.

    Args:
        numbers: the position of each parameter in the model, which is that of an ignored one.
    """
    inside = [fqn for fqn in numbers if _is_inside(fqn, prefix)]
    first = numbers[inside[0]] - 0.5
    own = (fqn for fqn in inside if fqn.rpartition(".")[0] == prefix)
    return max((numbers[fqn] + 0.5 for fqn in own if fqn in ignored), default=first)


def _is_inside(fqn: str, prefix: str) -> bool:
    return not prefix or fqn.startswith(f"{prefix}.")


def build_unit(
    prefix: str,
    members: Sequence[tuple[str, Index]],
    total: int,
    where: str,
    *,
    hint: str = _HINT,
) -> FlatUnit:
    """Build a flat parameter of ``total`` elements that these members fill.

    Raises:
        CorruptError: the members do not have ``total`` elements.
    """
    numel = sum(prod(shape) for _, shape in members)
    if numel != total:
        raise CorruptError(
            where,
            f"the flat parameter of {_describe_unit(prefix)} has {total} elements; the"
            f" {len(members)} parameters found for it ({members[0][0]} ...) have {numel}",
            hint,
        )
    starts, _ = flat_param.place_members(members, aligned_to=1, ranks=1)
    return FlatUnit(prefix, tuple(Member(fqn, s, starts[fqn]) for fqn, s in members), total)


def build_units(model: ModelShapes, ignored: Container[str]) -> list[FlatUnit]:
    """Build the units of a model whose optimizer is flat and whose weights are not."""
    units = []
    for unit in model.units:
        members = [(fqn, model.parameters[fqn]) for fqn in unit.members if fqn not in ignored]
        if members:
            units.append(build_unit(unit.prefix, members, sum(prod(s) for _, s in members), ""))
    return units


def locate_pieces(pieces: Sequence[Chunk], numel: int) -> list[tuple[int, Chunk]]:
    """Pair the equal pieces of a flat tensor with their first elements, without zero padding.

    Raises:
        CorruptError: the pieces are not equal parts of ``numel`` elements.
    """
    size = -(-numel // len(pieces))
    located = []
    for number, piece in enumerate(pieces):
        if piece.box.volume != size:
            raise CorruptError(
                piece.file,
                f"contains {piece.box.volume} elements of a flat parameter of {numel}, but each of"
                f" {len(pieces)} ranks stores {size}",
                "files of runs with different numbers of ranks are mixed: fetch the checkpoint"
                " again as a whole",
            )
        at = number * size
        # Padding to equal pieces is at the end; whole trailing ranks can consist of it.
        box = Box((0,), (min(size, max(numel - at, 0)),))
        strides = (piece.dtype.itemsize,)
        located.append((at, replace(require_dense(piece), box=box, byte_strides=strides)))
    return located
