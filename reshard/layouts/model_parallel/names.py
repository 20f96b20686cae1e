"""A training state under Hugging Face's names, or back under a table's: no byte moves.

Every entry is renamed, of weights and optimizer, with everything else in a manifest that refers to
names: param groups, steps, ties, frozen parameters. Hugging Face's side has no padding of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from reshard.core.dtypes import DType
from reshard.core.manifest import (
    BUFFER,
    MASTER,
    PARAM,
    WEIGHT_KINDS,
    Entry,
    Key,
    Manifest,
    index_entries,
)
from reshard.core.renames import check_parts_dtype, replace_tensors
from reshard.core.views import Permute
from reshard.errors import CorruptError, IncompleteError, UnsupportedError, UsageError
from reshard.layouts.model_parallel import fused_tensors, moves, shifted, vocabulary
from reshard.layouts.model_parallel.architecture import Architecture
from reshard.layouts.model_parallel.rules import Table
from reshard.layouts.model_parallel.spellings import NUMBERS, Spelled, SpelledPart, Spellings
from reshard.units import abridge

_EXTRA = "_extra_state"  # of Transformer Engine: no weight


@dataclass(frozen=True, slots=True)
class RenamedState:
    """A manifest under other names, with notes of what was left out or assumed.

    Args:
        merged: tensors that several of the source became, whose values must be equal.
    """

    manifest: Manifest
    notes: tuple[str, ...] = ()
    merged: frozenset[str] = frozenset()


def rename_to_hf(
    manifest: Manifest,
    table: Table,
    model: Architecture,
    *,
    dialect: str | None = None,
    keep_padding: bool = False,
) -> RenamedState:
    """Return a training state under Hugging Face's names, with fused tensors cut apart.

    Args:
        manifest: manifest under the table's names, or those of a dialect of it.
        dialect: the dialect, if it is known: each numbers the layers differently.
        keep_padding: keep the padding rows of the vocabulary.
    """
    return _ToHf(manifest, table, model, dialect, keep_padding=keep_padding).rename()


def rename_from_hf(manifest: Manifest, table: Table, model: Architecture) -> RenamedState:
    """Return a training state under the table's names; the reverse of `rename_to_hf`.

    The vocabulary keeps its rows: the writer pads it for its tensor-parallel ranks.
    """
    return _FromHf(manifest, table, model).rename()


class _Renaming:
    """The part of a renaming that both directions share: everything but the tensors."""

    def __init__(
        self, manifest: Manifest, table: Table, model: Architecture, dialect: str | None = None
    ) -> None:
        self.manifest = manifest
        self.model = model
        numbers = {name: n for name in NUMBERS if (n := getattr(model, name)) is not None}
        self.spellings = Spellings(table, numbers, dialect)
        # A dict as an ordered set: the tensors of every layer give the same notes.
        self.notes: dict[str, None] = {}
        self.repeated: set[str] = set()  # tensors of which the source has copies
        self.shapes = manifest.weight_shapes
        self._new: dict[str, tuple[str, ...]] = {}

    def rename(self) -> RenamedState:
        kept = [e for e in self.manifest.entries.values() if self.find_new_names(e.fqn)]
        copies = [e for e in self.manifest.tied_copies if self.find_new_names(e.fqn)]
        entries = index_entries(self.convert(kept))
        copied = tuple(self.convert(copies))
        manifest = replace_tensors(self.manifest, entries, copied, self.find_new_names)
        dropped = [fqn for fqn, names in self._new.items() if not names]
        if dropped:
            self.notes[f"not a weight, left out: {abridge(dropped, 1)}"] = None
        merged = frozenset(name for fqn in self.repeated for name in self.find_new_names(fqn))
        return RenamedState(manifest, tuple(self.notes), merged)

    def convert(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        raise NotImplementedError

    def spell(self, fqn: str) -> tuple[str, ...]:
        raise NotImplementedError

    def find_new_names(self, fqn: str) -> tuple[str, ...]:
        if fqn not in self._new:
            opaque = fqn.endswith(_EXTRA) or self.spellings.is_computed(fqn)
            self._new[fqn] = () if opaque else self.spell(fqn)
        return self._new[fqn]

    def check_shape(self, entry: Entry, *, plain: bool) -> bool:
        """Return whether an entry has its parameter's shape, and so is cut like the parameter."""
        if entry.shape == self.shapes.get(entry.fqn, entry.shape):
            return True
        if not plain:
            raise UnsupportedError(
                entry.fqn,
                f"its {entry.kind} has shape {entry.shape}, but the parameter has"
                f" {self.shapes[entry.fqn]}, so how the state is cut or permuted is not known",
                "write only the weights: --weights-only",
            )
        return False

    def add(self, entry: Entry, added: float) -> Entry:
        """Return a weight with a constant added to its values; optimizer slots stay as they are."""
        if not added or entry.kind not in WEIGHT_KINDS:
            return entry
        text = f"the two sides define some norms differently: {added:+g} was added to their weights"
        self.notes[text] = None
        # A 16-bit copy stays the rounded master: both come from the same values.
        master = self.manifest.entries.get((MASTER, entry.fqn)) if entry.kind == PARAM else None
        source = master if master and master.shape == entry.shape else entry
        return replace(entry, chunks=tuple(shifted.add_to_chunks(source.chunks, added)))


def _join_parts(
    where: str, name: str, pieces: Mapping[int, Entry], expected: Mapping[int, str]
) -> tuple[list[Entry], DType]:
    """Return the existing ``pieces`` in the order of all ``expected`` names, and their dtype."""
    lacking = [other for number, other in expected.items() if number not in pieces]
    present = list(pieces.values())
    if lacking:
        raise IncompleteError(
            where,
            f"contains the {present[0].kind} of {present[0].fqn!r}, but not of {lacking[0]!r}:"
            f" {name!r} combines the two",
        )
    dtype = check_parts_dtype(where, name, present)
    return [pieces[number] for number in sorted(pieces)], dtype


class _ToHf(_Renaming):
    def __init__(
        self,
        manifest: Manifest,
        table: Table,
        model: Architecture,
        dialect: str | None,
        *,
        keep_padding: bool,
    ) -> None:
        super().__init__(manifest, table, model, dialect)
        self._keep_padding = keep_padding
        self._spelled: dict[str, Spelled] = {}

    def spell(self, fqn: str) -> tuple[str, ...]:
        self._spelled[fqn] = self.spellings.find_by_table(fqn)
        return self._spelled[fqn].names

    def convert(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        slices: dict[Key, dict[int, Entry]] = {}
        for entry in entries:
            spelled = self._spelled[entry.fqn]
            whole = zip(spelled.names, self._cut_parts(entry, spelled), strict=True)
            for name, cut in whole:
                part = self.add(cut, spelled.line.added)
                if spelled.line.squeezed:
                    stack = tuple(moves.put_in_stack(part.chunks, 0))
                    part = replace(part, shape=(1, *part.shape), chunks=stack)
                if not spelled.line.stacked:
                    yield replace(part, fqn=name)
                    continue
                number = spelled.fields[spelled.line.stacked]
                slices.setdefault((entry.kind, name), {})[int(number)] = part
        for (kind, name), parts_by_number in slices.items():
            count = self.model.experts or max(parts_by_number) + 1
            expected = {n: f"slice {n} of {name}" for n in range(count)}
            parts, dtype = _join_parts(self.manifest.origin.path, name, parts_by_number, expected)
            chunks = (c for n, part in enumerate(parts) for c in moves.put_in_stack(part.chunks, n))
            yield Entry(name, kind, dtype, (len(parts), *parts[0].shape), tuple(chunks))

    def _cut_parts(self, entry: Entry, spelled: Spelled) -> Iterator[Entry]:
        line = spelled.line
        padded = spelled.found is not None and spelled.found.rule.is_vocabulary
        if not self.check_shape(entry, plain=line.is_plain and not padded):
            yield entry
            return
        entry = self._drop_padding(entry) if padded else entry
        if line.form == fused_tensors.PLAIN:
            if len(line.names) > 1:
                self.notes["each part of a fused layer gets a copy of its lora_A"] = None
            plain = _transpose(entry) if line.transposed else entry
            yield from [plain] * len(line.names)
            return
        for shape, part in fused_tensors.make_form(line.form, entry.shape[0], self.model).cut(
            entry.shape
        ):
            piece = replace(entry, shape=shape, chunks=tuple(moves.apply_moves(entry.chunks, part)))
            yield _transpose(piece) if line.transposed else piece

    def _drop_padding(self, entry: Entry) -> Entry:
        rows, entries = entry.shape[0], self.model.vocab
        if self._keep_padding or rows == entries:
            return entry
        if entries is None:
            self.notes[
                f"the vocabulary has {rows} rows, padding included. No file states how many are"
                " padding; --vocab-size N removes those after row N"
            ] = None
            return entry
        if rows < entries:
            raise UsageError(
                self.model.source,
                f"states a vocabulary of {entries}, but {entry.fqn!r} has {rows} rows",
                "pass the size without padding: --vocab-size N",
            )
        self.notes[f"removed padding rows {entries} to {rows - 1} of the vocabulary"] = None
        return vocabulary.take_first_rows(entry, entries)


class _FromHf(_Renaming):
    def __init__(self, manifest: Manifest, table: Table, model: Architecture) -> None:
        super().__init__(manifest, table, model)
        self._parts: dict[str, SpelledPart] = {}
        # Before any entry is converted: a copy has no name of its own on the table's side.
        self.manifest = self._merge_copies(manifest)

    def _merge_copies(self, manifest: Manifest) -> Manifest:
        merged = dict(manifest.entries)
        for (kind, fqn), entry in manifest.entries.items():
            kept = self.spellings.find_copied(fqn)
            if kept is None or (kind, kept) not in merged:
                continue
            other = merged[kind, kept]
            if (other.shape, other.dtype) != (entry.shape, entry.dtype):
                raise CorruptError(
                    manifest.origin.path,
                    f"{fqn!r} is {entry.dtype} {entry.shape}, but {kept!r}, of which it should be"
                    f" a copy, is {other.dtype} {other.shape}",
                )
            copies = moves.align_copies(other.chunks, entry.chunks)
            merged[kind, kept] = replace(other, chunks=copies)
            del merged[kind, fqn]
            self.repeated.add(kept)
            self.notes[f"a copy of {kept}, stored once: {fqn}"] = None
        return (
            replace(manifest, entries=merged) if len(merged) < len(manifest.entries) else manifest
        )

    def spell(self, fqn: str) -> tuple[str, ...]:
        kept = self.spellings.find_copied(fqn)
        if kept is not None and any(key[1] == kept for key in self.manifest.entries):
            return self.find_new_names(kept)
        part = self._parts[fqn] = self.spellings.find_by_hf(fqn)
        return tuple(part.find_parameter(number).own for number in self._list_slices(fqn, part))

    def _list_slices(self, fqn: str, part: SpelledPart) -> Iterable[int | None]:
        if not part.line.stacked:
            return (None,)
        shape = self.shapes.get(fqn)
        return range(shape[0] if shape else self.model.require("experts"))

    def convert(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        # The parts of a fused tensor need not be neighbours: all are gathered before any is fused.
        gathered: dict[Key, tuple[Spelled, dict[int, Entry]]] = {}
        whole: list[Key | Entry] = []
        for entry in entries:
            part = self._parts[entry.fqn]
            if part.line.is_plain:
                name = self.find_new_names(entry.fqn)[0]
                whole.append(replace(entry, fqn=name, kind=self._find_kind(entry, name)))
                continue
            self.check_shape(entry, plain=False)
            for number in self._list_slices(entry.fqn, part):
                spelled = part.find_parameter(number)
                key = self._find_kind(entry, spelled.own), spelled.own
                if key not in gathered:
                    whole.append(key)
                _, pieces = gathered.setdefault(key, (spelled, {}))
                place = 0 if part.line.squeezed else number
                piece = _take_slice(entry, place, transposed=part.line.transposed)
                pieces[part.number] = self.add(piece, -part.line.added)
        for item in whole:
            yield item if isinstance(item, Entry) else self._fuse(item, *gathered[item])

    def _find_kind(self, entry: Entry, name: str) -> str:
        """Return the kind of a tensor under its new name: a parameter may be a buffer there."""
        rule = self.spellings.table.find(name, self.spellings.numbers)
        is_buffer = entry.kind == PARAM and rule is not None and rule.rule.is_buffer
        return BUFFER if is_buffer else entry.kind

    def _fuse(self, key: Key, spelled: Spelled, pieces: Mapping[int, Entry]) -> Entry:
        names = dict(enumerate(spelled.names))
        parts, dtype = _join_parts(self.manifest.origin.path, key[1], pieces, names)
        if spelled.line.form == fused_tensors.PLAIN:
            return replace(parts[0], fqn=key[1], kind=key[0])
        tail = parts[0].shape[1:]
        odd = next((part for part in parts if part.shape[1:] != tail), None)
        if odd:
            raise CorruptError(
                self.manifest.origin.path,
                f"{odd.fqn!r} has shape {odd.shape}, but {parts[0].fqn!r} has {parts[0].shape}:"
                f" they cannot be joined to {key[1]!r}",
            )
        form = fused_tensors.make_form_of_parts(
            spelled.line.form, [part.shape[0] for part in parts], self.model
        )
        chunks = (
            chunk
            for part, fused in zip(parts, form.fuse(tail), strict=True)
            for chunk in moves.apply_moves(part.chunks, fused)
        )
        return Entry(key[1], key[0], dtype, (sum(form.parts), *tail), tuple(chunks))


def _take_slice(entry: Entry, number: int | None, *, transposed: bool) -> Entry:
    if number is not None:
        chunks = tuple(moves.take_slice(entry.chunks, number))
        entry = replace(entry, shape=entry.shape[1:], chunks=chunks)
    return _transpose(entry) if transposed else entry


def _transpose(entry: Entry) -> Entry:
    if len(entry.shape) != 2:
        return entry
    chunks = tuple(Permute((1, 0)).apply(entry.chunks))
    return replace(entry, shape=entry.shape[::-1], chunks=chunks)
