"""A training state under Hugging Face's names, or back under a table's: no byte moves.

Every entry is restated, weights and optimizer alike, and with it what else a manifest says of its
names: param groups, steps, ties, what is frozen. Padding of the vocabulary stays on this side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from reshard.dtypes import DType
from reshard.errors import CorruptError, IncompleteError, UnsupportedError, UsageError
from reshard.manifest import WEIGHT_KINDS, Entry, Key, Manifest, ParamGroup, index_entries
from reshard.model_parallel import forms, moves, vocabulary
from reshard.model_parallel.architecture import Architecture
from reshard.model_parallel.rules import Table
from reshard.model_parallel.spellings import NUMBERS, Part, Spelled, Spellings
from reshard.units import some

_EXTRA = "_extra_state"  # of Transformer Engine: no weight


@dataclass(frozen=True, slots=True)
class RenamedState:
    """A manifest under other names, with notes of what was left out or assumed."""

    manifest: Manifest
    notes: tuple[str, ...] = ()


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
        manifest: under the table's names, or those of a dialect of it.
        dialect: which, where that is known: dialects number the layers each in its own way.
        keep_padding: leave the rows that pad the vocabulary where they are.

    Raises:
        UsageError: the table does not know a name, or the model says too little of a fused tensor.
        UnsupportedError: state that cannot be cut as its parameter is.
    """
    return _ToHf(manifest, table, model, dialect, keep_padding=keep_padding).rename()


def rename_from_hf(manifest: Manifest, table: Table, model: Architecture) -> RenamedState:
    """Return a training state under the table's names; the reverse of `rename_to_hf`.

    The vocabulary keeps its rows: whoever cuts it pads it.

    Raises:
        UsageError: the table does not know a name; or parts of a fused tensor differ in what is
            one for it (param group, step, frozen or not).
        IncompleteError: a part of a fused tensor is missing.
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
        self.notes: dict[str, None] = {}
        self.shapes = {e.fqn: e.shape for e in manifest.of_kind(*WEIGHT_KINDS)}
        self._new: dict[str, tuple[str, ...]] = {}

    def rename(self) -> RenamedState:
        """Return the renamed manifest."""
        kept = [e for e in self.manifest.entries.values() if self.find_new_names(e.fqn)]
        again = [e for e in self.manifest.tied_copies if self.find_new_names(e.fqn)]
        manifest = self._restate(index_entries(self.convert(kept)), tuple(self.convert(again)))
        left = [fqn for fqn, names in self._new.items() if not names]
        if left:
            self.notes[f"not a weight, left out: {some(left, 1)}"] = None
        return RenamedState(manifest, tuple(self.notes))

    def convert(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield the tensors of the other side."""
        raise NotImplementedError

    def spell(self, fqn: str) -> tuple[str, ...]:
        """Return the names of what a tensor becomes, or becomes a part of."""
        raise NotImplementedError

    def find_new_names(self, fqn: str) -> tuple[str, ...]:
        """Return the result of `spell`, cached; empty for what is no weight."""
        if fqn not in self._new:
            opaque = fqn.endswith(_EXTRA) or self.spellings.is_computed(fqn)
            self._new[fqn] = () if opaque else self.spell(fqn)
        return self._new[fqn]

    def rename_all(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """Return the names of what these become, each once."""
        return tuple(dict.fromkeys(name for fqn in fqns for name in self.find_new_names(fqn)))

    def check_shape(self, entry: Entry, *, plain: bool) -> bool:
        """Check that an entry has its parameter's shape, and so is cut as the parameter is.

        Raises:
            UnsupportedError: it has not, and its parameter is cut.
        """
        if entry.shape == self.shapes.get(entry.fqn, entry.shape):
            return True
        if not plain:
            raise UnsupportedError(
                entry.fqn,
                f"its {entry.kind} is of shape {entry.shape}, the parameter of"
                f" {self.shapes[entry.fqn]}: nothing says how it is cut or permuted with it",
                "convert the weights alone",
            )
        return False

    def _restate(self, entries: Mapping[Key, Entry], again: tuple[Entry, ...]) -> Manifest:
        old = self.manifest
        sources: dict[str, list[str]] = {}
        for fqn in dict.fromkeys(e.fqn for e in old.of_kind(*WEIGHT_KINDS)):
            for name in self.find_new_names(fqn):
                sources.setdefault(name, []).append(fqn)
        groups = tuple(ParamGroup(g.hyper, self.rename_all(g.fqns)) for g in old.train.param_groups)
        owner = {fqn: n for n, group in enumerate(old.train.param_groups) for fqn in group.fqns}
        if groups:
            _find_common(sources, owner.get, "param group")
        steps = _find_common(sources, old.train.optimizer_step.get, "step")
        frozen = _find_common(sources, lambda fqn: fqn in old.frozen, "frozen")
        dtypes = _find_common(sources, old.trained_dtypes.get, "dtype")
        tied = {
            alias: kept
            for aliases, kepts in old.tied.items()
            for alias, kept in zip(
                self.find_new_names(aliases), self.find_new_names(kepts), strict=True
            )
        }
        return replace(
            old,
            entries=entries,
            train=replace(old.train, param_groups=groups, optimizer_step=_drop_unknown(steps)),
            tied=tied,
            tied_copies=again,
            frozen=frozenset(name for name, is_frozen in frozen.items() if is_frozen),
            trained_dtypes=_drop_unknown(dtypes),
            absent=self.rename_all(old.absent),
            ordered=False,  # each side's modules stand in an order of their own
        )


def _drop_unknown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _find_common(
    sources: Mapping[str, Iterable[str]], value_of: Callable[[str], Any], what: str
) -> dict[str, Any]:
    """Return the value that all parts of one tensor have in common.

    Raises:
        UsageError: they differ.
    """
    found: dict[str, Any] = {}
    for name, (first, *others) in sources.items():
        found[name] = value_of(first)
        for other in others:
            if value_of(other) != found[name]:
                raise UsageError(
                    f"{name!r}",
                    f"is one tensor for both {first!r} and {other!r}, which differ in their {what}:"
                    f" {_format_value(found[name])} and {_format_value(value_of(other))}",
                    "give all its parts the same, e.g. with --param-groups, or convert the weights"
                    " alone",
                )
    return found


def _format_value(value: Any) -> str:
    return "none" if value is None else str(value)


def _join_parts(
    where: str, name: str, pieces: Mapping[int, Entry], wanted: Mapping[int, str]
) -> tuple[list[Entry], DType]:
    """Return the parts of one tensor in order, and their dtype.

    Args:
        pieces: what there is, by number; ``wanted``: the name of each that there must be.
    """
    lacking = [other for number, other in wanted.items() if number not in pieces]
    held = list(pieces.values())
    if lacking:
        raise IncompleteError(
            where,
            f"holds the {held[0].kind} of {held[0].fqn!r}, and none of {lacking[0]!r}:"
            f" {name!r} is made of both",
        )
    odd = next((piece for piece in held if piece.dtype != held[0].dtype), None)
    if odd:
        raise CorruptError(
            where,
            f"{held[0].fqn!r} ({odd.kind}) is {held[0].dtype}, {odd.fqn!r} {odd.dtype}: they cannot"
            f" be one tensor, {name!r}",
        )
    return [pieces[number] for number in sorted(pieces)], held[0].dtype


class _ToHf(_Renaming):
    """The renaming from a table's names."""

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
            for name, part in zip(spelled.names, self._cut_parts(entry, spelled), strict=True):
                if not spelled.line.stacked:
                    yield replace(part, fqn=name)
                    continue
                number = spelled.fields[spelled.line.stacked]
                slices.setdefault((entry.kind, name), {})[int(number)] = part
        for (kind, name), found in slices.items():
            count = self.model.experts or max(found) + 1
            wanted = {n: f"slice {n} of {name}" for n in range(count)}
            parts, dtype = _join_parts(self.manifest.origin.path, name, found, wanted)
            chunks = (c for n, part in enumerate(parts) for c in moves.put_in_stack(part.chunks, n))
            yield Entry(name, kind, dtype, (len(parts), *parts[0].shape), tuple(chunks))

    def _cut_parts(self, entry: Entry, spelled: Spelled) -> Iterator[Entry]:
        """Yield the tensors that a fused one is cut into."""
        line = spelled.line
        padded = spelled.found is not None and spelled.found.rule.is_vocabulary
        if not self.check_shape(entry, plain=line.is_plain and not padded):
            yield entry
            return
        entry = self._drop_padding(entry) if padded else entry
        if line.form == forms.PLAIN:
            yield _transpose(entry) if line.transposed else entry
            return
        for shape, part in forms.make_form(line.form, entry.shape[0], self.model).cut(entry.shape):
            made = replace(entry, shape=shape, chunks=tuple(moves.apply_moves(entry.chunks, part)))
            yield _transpose(made) if line.transposed else made

    def _drop_padding(self, entry: Entry) -> Entry:
        """Return a tensor of the vocabulary without its padding rows.

        Raises:
            UsageError: it has fewer rows than the model has words.
        """
        rows, words = entry.shape[0], self.model.vocab
        if self._keep_padding or rows == words:
            return entry
        if words is None:
            self.notes[
                f"the vocabulary has {rows} rows, padding included: nothing says how many are words"
                " (--vocab-size N takes the rest off)"
            ] = None
            return entry
        if rows < words:
            raise UsageError(
                self.model.source,
                f"states a vocabulary of {words}, but {entry.fqn!r} has {rows} rows",
                "give the true size: --vocab-size N",
            )
        self.notes[f"padding rows {words} to {rows - 1} of the vocabulary taken off"] = None
        return vocabulary.take_first_rows(entry, words)


class _FromHf(_Renaming):
    """The renaming to a table's names."""

    def __init__(self, manifest: Manifest, table: Table, model: Architecture) -> None:
        super().__init__(manifest, table, model)
        self._parts: dict[str, Part] = {}

    def spell(self, fqn: str) -> tuple[str, ...]:
        part = self._parts[fqn] = self.spellings.find_by_hf(fqn)
        return tuple(part.spelled(number).own for number in self._list_slices(fqn, part))

    def _list_slices(self, fqn: str, part: Part) -> Iterable[int | None]:
        if not part.line.stacked:
            return (None,)
        shape = self.shapes.get(fqn)
        return range(shape[0] if shape else self.model.require("experts"))

    def convert(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield each fused tensor at the place of the first of its parts."""
        gathered: dict[Key, tuple[Spelled, dict[int, Entry]]] = {}
        whole: list[Key | Entry] = []
        for entry in entries:
            part = self._parts[entry.fqn]
            if part.line.is_plain:
                whole.append(replace(entry, fqn=self.find_new_names(entry.fqn)[0]))
                continue
            self.check_shape(entry, plain=False)
            for number in self._list_slices(entry.fqn, part):
                spelled = part.spelled(number)
                key = entry.kind, spelled.own
                if key not in gathered:
                    whole.append(key)
                _, held = gathered.setdefault(key, (spelled, {}))
                held[part.number] = _take_slice(entry, number, transposed=part.line.transposed)
        for each in whole:
            yield each if isinstance(each, Entry) else self._fuse(each, *gathered[each])

    def _fuse(self, key: Key, spelled: Spelled, held: Mapping[int, Entry]) -> Entry:
        names = dict(enumerate(spelled.names))
        parts, dtype = _join_parts(self.manifest.origin.path, key[1], held, names)
        if spelled.line.form == forms.PLAIN:
            return replace(parts[0], fqn=key[1])
        tail = parts[0].shape[1:]
        odd = next((part for part in parts if part.shape[1:] != tail), None)
        if odd:
            raise CorruptError(
                self.manifest.origin.path,
                f"{odd.fqn!r} is of shape {odd.shape}, {parts[0].fqn!r} of {parts[0].shape}: they"
                f" cannot be one tensor, {key[1]!r}",
            )
        form = forms.make_form_of_parts(
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
    """Return the transposed matrix; a vector stays as it is."""
    if len(entry.shape) != 2:
        return entry
    chunks = tuple(moves.transpose(chunk) for chunk in entry.chunks)
    return replace(entry, shape=entry.shape[::-1], chunks=chunks)
