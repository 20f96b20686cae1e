"""Hugging Face's names of parameters: the lines of a table's ``hf`` section.

A line maps a name of the table to one of Hugging Face's, or to several in a form (see `forms`):

    NAME: OTHER
    NAME: {form: qkv, names: [Q, K, V]}
    NAME: {form: qkv_stacked, names: [OTHER], transposed: true}    rows and columns change places
    NAME: {names: [OTHER], added: 1}       OTHER's values are NAME's plus 1 (see `shifted`)
    NAME: {names: [OTHER], squeezed: true}  OTHER has one more dim of size 1, in front
    NAME: {names: [OTHER], stacked: e}     OTHER has one more dim, in front, which {e} numbers

or to a list of these if Hugging Face has several ways: the first is written, all are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reshard.errors import UnsupportedError, UsageError
from reshard.layouts.model_parallel import fused_tensors
from reshard.layouts.model_parallel.adapters import LoraMatrix, parse_matrix
from reshard.layouts.model_parallel.patterns import Fields, Pattern
from reshard.layouts.model_parallel.rules import RuleMatch, Table, suggest_names

_WRITE = (
    "write  NAME: OTHER  or  NAME: {form: "
    + "|".join(fused_tensors.NAMES)
    + ", names: [OTHER, ...]}"
)
_KEYS = {"form", "names", "transposed", "stacked", "squeezed", "added"}
NUMBERS = ("layers", "experts")


@dataclass(frozen=True, slots=True)
class Line:
    """One way in which Hugging Face stores a parameter.

    Args:
        own: the table's name of the parameter.
        names: the names of the parts from which it is fused; of copies if it is not.
        stacked: the field that numbers the slices of each part; empty if they are not stacked.
        squeezed: whether each part has one more dim of size 1, in front.
        added: what Hugging Face's values have more than the table's.
    """

    own: Pattern
    form: str
    names: tuple[Pattern, ...]
    transposed: bool = False
    stacked: str = ""
    squeezed: bool = False
    added: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether both sides store the same tensor."""
        changes = self.transposed or self.stacked or self.squeezed or self.added
        return self.form == fused_tensors.PLAIN and not changes


@dataclass(frozen=True, slots=True)
class Spelled:
    """A parameter of the table, with the line that names its Hugging Face tensors."""

    line: Line
    fields: Fields
    found: RuleMatch | None = None

    @property
    def own(self) -> str:
        """The table's name."""
        return self.line.own.fill(self.fields)

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face's names, one for each part."""
        return tuple(name.fill(self.fields) for name in self.line.names)


@dataclass(frozen=True, slots=True)
class SpelledPart:
    """A Hugging Face tensor: a part of a parameter of the table."""

    line: Line
    fields: Fields
    number: int

    def find_parameter(self, slice_number: int | None) -> Spelled:
        """Return the parameter that the tensor is a part of.

        Args:
            slice_number: number of the slice, if the line has a stack.
        """
        stack = {} if slice_number is None else {self.line.stacked: slice_number}
        return Spelled(self.line, {**self.fields, **stack})


@dataclass(frozen=True)
class Spellings:
    """The lines of a table, for lookup from either side."""

    table: Table
    numbers: Mapping[str, int]  # fields of names that the model gives
    dialect: str | None = None  # of the source's names; None: the table's own, then any

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Every line; if a parameter has several, the first one is written."""
        source = self.table.source
        return tuple(
            _parse_line(str(name), value, source)
            for name, values in self.table.hf.items()
            for value in (values if isinstance(values, list) else [values])
        )

    def is_computed(self, name: str) -> bool:
        """Whether a model computes the tensor as it is loaded."""
        matches = (pattern.match(name, self.numbers) for pattern in self.table.computed)
        return any(match is not None for match in matches)

    def find_copied(self, name: str) -> str | None:
        """Return the Hugging Face tensor that another one repeats, or None."""
        for pattern, kept in self.table.copies.items():
            fields = pattern.match(name, self.numbers)
            if fields is not None:
                return Pattern(kept).fill({**self.numbers, **fields})
        return None

    def find_by_table(self, name: str) -> Spelled:
        """Return a parameter of the table by the source's name, as it is written.

        Raises:
            UsageError: no rule, or no line, has the name.
        """
        match = self.table.require(name, self.numbers, self.dialect)
        matrix = parse_matrix(match.name)
        for line in self.lines:
            fields = line.own.match(matrix.weight if matrix else match.name, self.numbers)
            if fields is not None:
                spelled = _adapt_line(name, line, matrix) if matrix else line
                return Spelled(spelled, {**self.numbers, **fields}, match)
        raise UsageError(
            f"{name!r}",
            f"has no Hugging Face name in {self.table.source}"
            + suggest_names(match.name, (line.own for line in self.lines)),
            f"state its name in a file: --rules FILE: hf: {_WRITE}",
        )

    def find_by_hf(self, name: str) -> SpelledPart:
        """Return the part that a Hugging Face tensor is.

        Raises:
            UsageError: no line has the name.
        """
        part = self._find_part(name)
        prefix = f"{self.table.prefix}."
        if part is None and self.table.prefix and not name.startswith(prefix):
            part = self._find_part(prefix + name)
        if part is None:
            known = (pattern for line in self.lines for pattern in line.names)
            raise UsageError(
                f"{name!r}",
                f"matches no line of {self.table.source}{suggest_names(name, known)}",
                f"state what it is in a file: --rules FILE: parameters: NAME: CUT and hf: {_WRITE}",
            )
        return part

    def _find_part(self, name: str) -> SpelledPart | None:
        for line in self.lines:
            for number, pattern in enumerate(line.names):
                fields = pattern.match(name, self.numbers)
                if fields is not None:
                    return SpelledPart(line, {**self.numbers, **fields}, number)
        return None


def _adapt_line(name: str, line: Line, matrix: LoraMatrix) -> Line:
    if line.stacked or line.squeezed:
        raise UnsupportedError(
            f"{name!r}", "is an adapter of an expert, of which Hugging Face has all in one tensor"
        )
    layers = line.names if matrix.part is None else line.names[matrix.part : matrix.part + 1]
    names = (f"{layer.text.rpartition('.')[0]}.{matrix.suffix_in_peft}" for layer in layers)
    is_whole = matrix.is_out and matrix.part is None
    form = line.form if is_whole else fused_tensors.PLAIN
    return Line(line.own, form, tuple(map(Pattern, names)))


def _parse_line(own: str, value: Any, source: str) -> Line:
    value = {"names": [value]} if isinstance(value, str) else value
    problem = next(_find_problems(own, value), None)
    if problem:
        raise UsageError(source, f"hf: {own!r}: {problem}", _WRITE)
    return Line(
        Pattern(own),
        value.get("form", fused_tensors.PLAIN),
        tuple(Pattern(str(name)) for name in value["names"]),
        bool(value.get("transposed", False)),
        str(value.get("stacked", "")),
        bool(value.get("squeezed", False)),
        float(value.get("added", 0)),
    )


def _find_problems(own: str, value: Any) -> Iterator[str]:
    if not isinstance(value, dict) or not isinstance(value.get("names"), list):
        yield f"{value!r} has no list of names"
        return
    form, names = value.get("form", fused_tensors.PLAIN), value["names"]
    if form not in fused_tensors.NAMES:
        yield f"form {form!r} does not exist"
    elif len(names) != fused_tensors.PARTS.get(form, 1):
        parts = fused_tensors.PARTS.get(form, 1)
        yield f"form {form} takes {parts} names, but {len(names)} are stated"
    if not isinstance(value.get("added", 0), (int, float)):
        yield f"added is {value['added']!r}, not a number"
    if value.keys() - _KEYS:
        yield f"{min(map(str, value.keys() - _KEYS))!r} is not a known key"
    required = Pattern(own).fields - {str(value.get("stacked", ""))}
    for name in names:
        if Pattern(str(name)).fields - set(NUMBERS) != required:
            yield f"{name!r} does not contain the fields of {own!r}, which the way back requires"
