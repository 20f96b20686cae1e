"""Conversion of a training state between two forms of a model, without moving a byte.

A `FormConversion` states of which pieces of the tensors of one form every tensor of the other form
consists. It applies to weights, and to every optimizer slot that has its parameter's shape.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from reshard.core.box import Index, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import UINT8, DType
from reshard.core.manifest import (
    PARAM,
    WEIGHT_KINDS,
    Entry,
    Manifest,
    Origin,
    SourceFile,
    check,
    index_entries,
)
from reshard.core.renames import check_parts_dtype, replace_tensors
from reshard.core.views import Take, apply_views, invert_views
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.model.tracing import TensorPart, Traced, Zeros
from reshard.system.derived import Derived, ZeroBytes, list_files


@dataclass(frozen=True)
class FormConversion:
    """A mapping from the tensors of one form of a model to those of another form.

    Args:
        before: shapes of the tensors before the conversion.
        after: the tensors after it, in their order.
    """

    model: str
    before: Mapping[str, Index]
    after: Mapping[str, Traced]

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """The new names of each tensor: those of all tensors that have a part of it."""
        names: dict[str, dict[str, None]] = {}
        for name, traced in self.after.items():
            for piece in traced.pieces:
                names.setdefault(piece.fqn, {})[name] = None
        return {fqn: tuple(new) for fqn, new in names.items()}

    @property
    def changes_nothing(self) -> bool:
        """Whether both forms are the same."""
        return all(traced.pieces == (TensorPart(name),) for name, traced in self.after.items())

    def invert(self) -> FormConversion:
        """Return the conversion in the other direction, which leaves zeros out."""
        pieces: dict[str, list[TensorPart]] = {fqn: [] for fqn in self.before}
        for name, traced in self.after.items():
            for piece in traced.pieces:
                pieces[piece.fqn].append(TensorPart(name, invert_views(piece.views)))
        after = {fqn: Traced(self.before[fqn], tuple(parts)) for fqn, parts in pieces.items()}
        return FormConversion(
            self.model, {name: traced.shape for name, traced in self.after.items()}, after
        )

    def apply(self, manifest: Manifest) -> Manifest:
        """Return a training state in the form after the conversion.

        Every weight of the manifest must be in `before`; weights may be missing.
        """
        entries = index_entries(self._convert(manifest, manifest.entries.values()))
        copies = self._convert(manifest, manifest.tied_copies)
        return replace_tensors(manifest, entries, copies, lambda fqn: self.names.get(fqn, (fqn,)))

    def _convert(self, manifest: Manifest, entries: Iterable[Entry]) -> Iterator[Entry]:
        kinds: dict[str, dict[str, Entry]] = {}
        for entry in entries:
            kinds.setdefault(entry.kind, {})[entry.fqn] = entry
        for found in kinds.values():
            finders = _Finders(found)
            for name, traced in self.after.items():
                if any(piece.fqn in found for piece in traced.pieces):
                    yield self._build(manifest.origin.path, name, traced, finders)

    def _build(self, where: str, name: str, traced: Traced, finders: _Finders) -> Entry:
        found = finders.entries
        if len(traced.pieces) == 1 and not traced.pieces[0].views:
            return replace(found[traced.pieces[0].fqn], fqn=name)
        sources = dict.fromkeys(piece.fqn for piece in traced.pieces)
        present = [found[fqn] for fqn in sources if fqn in found]
        for fqn in sources:
            if fqn not in found:
                raise IncompleteError(
                    where,
                    f"contains the {present[0].kind} of {present[0].fqn!r}, but not of {fqn!r}:"
                    f" {name!r} combines the two",
                )
        for entry in present:
            self._check_shape(entry)
        chunks = tuple(
            chunk
            for piece in traced.pieces
            for chunk in apply_views(finders.find(piece), piece.views)
        )
        dtype = check_parts_dtype(where, name, present)
        file = present[0].where
        zeros = (chunk for block in traced.zeros for chunk in _build_zeros(block, file, dtype))
        return Entry(name, present[0].kind, dtype, traced.shape, (*chunks, *zeros))

    def _check_shape(self, entry: Entry) -> None:
        expected = self.before[entry.fqn]
        if entry.shape == expected:
            return
        problem = f"has shape {entry.shape}, in the model {expected}"
        if entry.kind in WEIGHT_KINDS:
            raise UnsupportedError(
                entry.fqn,
                f"{problem} ({self.model}), so it cannot be converted to the published names",
                "pass the config of this model, or keep the names in memory with --names module",
            )
        raise UnsupportedError(
            entry.fqn,
            f"its {entry.kind} {problem}, so how it is cut or joined is not known",
            "write only the weights: reshard merge SOURCE DIRECTORY",
        )

    def prove(self) -> None:
        """Check that both forms hold every element exactly once.

        Raises:
            UnsupportedError: an element is missing in a form, or is there twice.
        """
        if self.changes_nothing:
            return
        inverse = self.invert()
        for one, other in ((self, inverse), (inverse, self)):
            files = {fqn: SourceFile(fqn, prod(shape)) for fqn, shape in one.before.items()}
            # Each tensor is a file of one byte per element, so that `check` counts every element.
            whole_tensors = (
                Entry(fqn, PARAM, UINT8, shape, (_store_alone(fqn, shape),))
                for fqn, shape in one.before.items()
            )
            state = Manifest(
                Origin("model", self.model), index_entries(whole_tensors), files, ordered=False
            )
            try:
                check(one.apply(state))
            except CorruptError as error:
                raise UnsupportedError(
                    self.model,
                    f"its conversion to the published names loses or repeats elements: {error}",
                    "keep the names in memory with --names module",
                ) from error
            if other.before.keys() - one.after.keys():
                raise AssertionError(f"{self.model}: the inverse conversion lost a tensor")


def _store_alone(fqn: str, shape: Index) -> Chunk:
    return contiguous(fqn, 0, UINT8, whole(shape))


def _build_zeros(zeros: Zeros, file: str, dtype: DType) -> Iterator[Chunk]:
    computation = ZeroBytes(list_files(file), prod(zeros.shape) * dtype.itemsize)
    name = Derived(file, f"{computation.nbytes} zero bytes", computation)
    return apply_views([contiguous(name, 0, dtype, whole(zeros.shape))], zeros.views)


def drop_empty_pieces(traced: Traced, shapes: Mapping[str, Index]) -> Traced:
    """Return a tensor without the pieces of which no element remains."""
    pieces = tuple(
        piece
        for piece in traced.pieces
        if not prod(shapes[piece.fqn])
        or any(apply_views([_store_alone(piece.fqn, shapes[piece.fqn])], piece.views))
    )
    return replace(traced, pieces=pieces)


class _Finders:
    """The entries of one kind, with an index of the chunks of those that are cut into pieces."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self._finders: dict[str, _RowFinder] = {}

    def find(self, piece: TensorPart) -> Iterable[Chunk]:
        first = piece.views[0] if piece.views else None
        if not isinstance(first, Take) or not first.shape:
            return self.entries[piece.fqn].chunks
        if piece.fqn not in self._finders:
            self._finders[piece.fqn] = _RowFinder(self.entries[piece.fqn].chunks)
        start = first.box.origin[0]
        return self._finders[piece.fqn].find(start, start + first.box.shape[0])


class _RowFinder:
    """The chunks of one tensor, sorted by their rows (dim 0).

    A stack of experts is cut into hundreds of tensors; each looks at the chunks of its rows alone.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = sorted(
            (chunk for chunk in chunks if chunk.box.volume), key=lambda chunk: chunk.box.origin[0]
        )
        self._starts = [chunk.box.origin[0] for chunk in self._chunks]
        stops = (chunk.box.origin[0] + chunk.box.shape[0] for chunk in self._chunks)
        # The ends are not sorted, so a bisection needs their running maximum, which is.
        self._reaches = list(accumulate(stops, max))

    def find(self, start: int, stop: int) -> list[Chunk]:
        return self._chunks[bisect_right(self._reaches, start) : bisect_left(self._starts, stop)]
