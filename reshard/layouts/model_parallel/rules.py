"""Tables of parameters: how each is cut, and its other names. Data in ``tables/``, or a user's.

A table is YAML. ``parameters`` maps a name (see `patterns`) to its ``cut`` and, by dialect, to its
other names; ``hf`` maps such a name to Hugging Face's name and to the form in which it is stored
there (see `spellings`). ``base`` names a table that this one extends. A user's file extends a table
too; in both cases the added lines take precedence.

``prefix`` is a first component of Hugging Face's names that files may lack, namely those of a base
model that was saved without its head. ``wrapper`` is a first component that the source's names may
have in addition. ``computed`` lists tensors of either side that a model computes when it is loaded.
``copies`` maps names of Hugging Face's side to those of the tensor that they repeat. ``repeated``
maps prefixes of names to those of a module that has the same parameters: each line of the one holds
for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from reshard.core.schema import TEXT, Kind, fields, mapping, sequence
from reshard.errors import UnsupportedError, UsageError
from reshard.layouts.model_parallel import segments
from reshard.layouts.model_parallel.adapters import LoraMatrix, parse_matrix
from reshard.layouts.model_parallel.patterns import Pattern, make_group_key
from reshard.layouts.model_parallel.segments import Numbers
from reshard.layouts.model_parallel.shards import REPLICATED, Split

_CUTS: Mapping[str, Split] = {
    "vocab": Split(0, padded=True),
    "column": Split(0),
    "row": Split(1),
    "gated": Split(0, (1, 1)),
    "replicated": REPLICATED,
    "summed": Split(summed=True),
}
_OF_RULE = ("cut", "buffer", "segments")
_MAYBE_GATED = "maybe_gated"
_COLUMN_OR_WHOLE = "column_or_whole"
_WHOLE_OR_HEADS = "whole_or_heads"
_NORM_IS_CUT = "qk_layernorm_is_cut"  # an argument of our own
MEGATRON = "megatron"  # the table of megatron-core's own names
TABLES = Path(__file__).parent / "tables"
_DOCUMENT = fields(
    **dict.fromkeys(("parameters", "hf"), mapping()),
    families=mapping(item=mapping()),
    numbers=mapping(item=sequence(TEXT)),
    copies=mapping(item=TEXT),
    repeated=mapping(TEXT, TEXT),
    base=TEXT,
)
_LINE = fields(segments=mapping(item=TEXT))
FORM = "under  parameters:  write  NAME: {cut: vocab|column|row|gated|replicated|summed}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of ``parameters``: a name, its cut, and its other names by dialect.

    Args:
        is_buffer: whether no optimizer trains it.
        segments: rows of a fused parameter that are cut apart, by name (see `segments`).
        numbers: numbers that the segments are made of.
    """

    name: Pattern
    cut: str
    others: Mapping[str, tuple[Pattern, ...]] = field(default_factory=dict)
    is_buffer: bool = False
    segments: Mapping[str, str] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)

    @property
    def is_vocabulary(self) -> bool:
        """Whether its rows are entries of the vocabulary, the last of which may be padding."""
        return self.cut in _CUTS and _CUTS[self.cut].padded

    def get_patterns(self, dialect: str) -> tuple[Pattern, ...]:
        """Return the names of a dialect, or the table's own name if the dialect has none."""
        return self.others.get(dialect, (self.name,))

    def split(
        self,
        *,
        gated: bool,
        te: bool = False,
        args: Mapping[str, Any] | None = None,
        source: str = "",
    ) -> Split:
        """Return how tensor-parallel ranks share the parameter.

        Args:
            gated: whether the model has gated linear units.
            te: whether its layers are Transformer Engine's.
            args: the arguments of the run, of which segments are made.
        """
        if self.segments:
            return segments.make_split(self.segments, self.numbers, args or {}, source)
        if self.cut == _MAYBE_GATED:
            return _CUTS["gated" if gated else "column"]
        if self.cut == _WHOLE_OR_HEADS:
            return _CUTS["column" if (args or {}).get(_NORM_IS_CUT) else "replicated"]
        if self.cut == _COLUMN_OR_WHOLE:
            return _CUTS["replicated" if te else "column"]
        return _CUTS[self.cut]


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """A parameter that a table knows: its rule, and the values of the name's fields.

    Args:
        pattern: the one of the rule's patterns that the name matches.
    """

    rule: Rule
    fields: Mapping[str, str | int]
    pattern: Pattern

    @property
    def name(self) -> str:
        """The table's own name of the parameter."""
        return self.rule.name.fill(self.fields)

    def spell(self, dialect: str | None, constants: Mapping[str, int]) -> str:
        """Return a dialect's name of the parameter, or the table's own if the dialect has none."""
        return self.rule.get_patterns(dialect or "")[0].fill({**constants, **self.fields})


@dataclass(frozen=True, slots=True)
class _Spelling:
    """A name in a rule, and the dialect that uses it; None for the table's own name."""

    rule: Rule
    pattern: Pattern
    dialect: str | None

    def is_of(self, dialect: str) -> bool:
        return self.dialect == dialect or (self.dialect is None and dialect not in self.rule.others)


@dataclass(frozen=True, slots=True)
class Table:
    """The rules of one file, or of several files that override one another."""

    source: str
    rules: tuple[Rule, ...]
    hf: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    computed: tuple[Pattern, ...] = ()
    wrapper: str = ""
    copies: Mapping[Pattern, str] = field(default_factory=dict)
    _spellings: Mapping[str | None, Sequence[_Spelling]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Index the names for `find`."""
        # A pattern without a group may match any name, so it is in every list, in table order: the
        # first match counts. The list of None serves names whose group no pattern has.
        spellings: dict[str | None, list[_Spelling]] = {None: []}
        for spelling in self._list_spellings():
            group = spelling.pattern.group
            for dialect in list(spellings) if group is None else [group]:
                spellings.setdefault(dialect, [*spellings[None]]).append(spelling)
        object.__setattr__(self, "_spellings", spellings)

    def _list_spellings(self) -> Iterator[_Spelling]:
        for rule in self.rules:
            yield _Spelling(rule, rule.name, None)
            for dialect, patterns in rule.others.items():
                yield from (_Spelling(rule, pattern, dialect) for pattern in patterns)

    def prepend_to(self, other: Table) -> Table:
        """Return a table of both, with this one's lines first."""
        return Table(
            f"{self.source} and {other.source}",
            self.rules + other.rules,
            {**self.hf, **{name: line for name, line in other.hf.items() if name not in self.hf}},
            self.prefix or other.prefix,
            self.computed + other.computed,
            self.wrapper or other.wrapper,
            {**other.copies, **self.copies},
        )

    def repeat(self, prefixes: Mapping[str, str]) -> Table:
        """Return the table with each line once more for a module that has the same parameters.

        The new lines come first, as the names of both may match the older ones.

        Args:
            prefixes: first components of a name -> those in the other module.
        """
        old = tuple(prefixes)

        def rename(name: str) -> str:
            prefix = next((prefix for prefix in old if name.startswith(prefix)), "")
            return prefixes.get(prefix, "") + name[len(prefix) :]

        rules = tuple(
            replace(
                rule,
                name=Pattern(rename(rule.name.text)),
                others={
                    dialect: tuple(Pattern(rename(pattern.text)) for pattern in patterns)
                    for dialect, patterns in rule.others.items()
                    if all(pattern.text.startswith(old) for pattern in patterns)
                },
            )
            for rule in self.rules
            if rule.name.text.startswith(old)
        )
        # Hugging Face may have no such module: its prefix is not among the others then.
        hf = {
            rename(name): renamed
            for name, line in self.hf.items()
            if name.startswith(old) and (renamed := _rename_line(line, rename)) != line
        }
        return replace(self, rules=rules + self.rules, hf={**hf, **self.hf})

    def find(
        self, name: str, constants: Mapping[str, int], dialect: str | None = None
    ) -> RuleMatch | None:
        """Return the rule of a name in the table's own names or a dialect's, or None.

        Args:
            dialect: the dialect of the name; None: the table's own names, then those of any.
        """
        name = name.removeprefix(f"{self.wrapper}.") if self.wrapper else name
        for spelling in self._spellings.get(make_group_key(name), self._spellings[None]):
            if dialect is None or spelling.is_of(dialect):
                fields = spelling.pattern.match(name, constants)
                if fields is not None:
                    return RuleMatch(spelling.rule, fields, spelling.pattern)
        matrix = parse_matrix(name)
        adapted = self.find(matrix.weight, constants, dialect) if matrix else None
        return _derive_rule(adapted, matrix) if matrix and adapted else None

    def require(
        self, name: str, constants: Mapping[str, int], dialect: str | None = None
    ) -> RuleMatch:
        """Return the rule of a name, like `find`, but raise an error if there is none.

        Raises:
            UsageError: no rule names it.
            UnsupportedError: it is an adapter that experts share.
        """
        match = self.find(name, constants, dialect)
        if match is None and ".experts." in name and parse_matrix(name):
            raise UnsupportedError(
                f"{name!r}",
                "is LoRA of experts by Megatron-Bridge, where the experts of a rank share an"
                " adapter, of which the files have that of one rank",
                "merge the adapter with Megatron-Bridge first (scripts of its peft recipes)",
            )
        if match is None:
            near = suggest_names(name, (spelling.pattern for spelling in self._list_spellings()))
            raise UsageError(
                f"{name!r}",
                f"matches no rule of {self.source}{near}",
                f"state how it is cut in a file: --rules FILE: {FORM}",
            )
        return match


def _derive_rule(adapted: RuleMatch, matrix: LoraMatrix) -> RuleMatch:
    rule = adapted.rule
    pattern = Pattern(f"{rule.name.text.rpartition('.')[0]}.{matrix.suffix}")
    cut = matrix.choose_cut(rule.cut)
    segments = rule.segments if matrix.is_out else {}
    return RuleMatch(Rule(pattern, cut, {}, False, segments, rule.numbers), adapted.fields, pattern)


def suggest_names(name: str, known: Iterable[Pattern]) -> str:
    """Return the nearest known names, as the end of a message."""
    near = get_close_matches(name, [pattern.text for pattern in known], n=3, cutoff=0.4)
    return f"; the nearest are {', '.join(near)}" if near else ""


@cache
def load_table(name: str | Path) -> Table:
    """Return a built-in table, or the file of another package, with the table that it extends."""
    table = _load_lines(name)
    documents = map(load_document, (name, *list_bases(name)))
    repeated = next((doc["repeated"] for doc in documents if "repeated" in doc), None)
    return table.repeat(repeated) if repeated else table


@cache
def _load_lines(name: str | Path) -> Table:
    root = load_document(name)
    own = _parse_table(root, _describe(_find_file(name)))
    return own.prepend_to(_load_lines(root["base"])) if "base" in root else own


def list_tables() -> tuple[str, ...]:
    """Return the names of the built-in tables."""
    return tuple(sorted(path.stem for path in TABLES.glob("*.yaml")))


def list_bases(name: str | Path) -> tuple[str, ...]:
    """Return the tables that a table extends, the nearest first."""
    base = load_document(name).get("base")
    return () if base is None else (base, *list_bases(base))


@cache
def load_whole_table(name: str | Path) -> Table:
    """Return a table with the parameters of every family whose table extends it.

    A reader of ranks' files needs them before it knows the model's family.
    """
    table = load_table(name)
    names = {rule.name for rule in table.rules}
    for other in list_tables():
        if name in list_bases(other) and "families" in load_document(other):
            new = tuple(rule for rule in load_table(other).rules if rule.name not in names)
            names |= {rule.name for rule in new}
            table = replace(table, rules=table.rules + new)
    return table


def load_base(document: Mapping[str, Any], source: str) -> Table:
    """Return the built-in table that a user's family extends; Megatron's if it names none.

    Raises:
        UsageError: there is no such table.
    """
    base = document.get("base", MEGATRON)
    if base not in list_tables():
        raise UsageError(
            source, f"extends the unknown table {base!r}: there are {', '.join(list_tables())}"
        )
    return load_table(base)


@cache
def load_document(name: str | Path) -> Mapping[str, Any]:
    """Return the content of a table's file."""
    path = _find_file(name)
    return parse_document(path.read_text(), _describe(path))


def _find_file(name: str | Path) -> Path:
    return name if isinstance(name, Path) else TABLES / f"{name}.yaml"


def _describe(path: Path) -> str:
    return f"the table {path.stem!r}"


def add_user_rules(table: Table, path: Path | None) -> Table:
    """Return a table with the lines of a user's file before its own."""
    if path is None:
        return table
    root = parse_document(path.read_text(errors="replace"), str(path))
    table = _parse_table(root, str(path)).prepend_to(table)
    return table.repeat(root["repeated"]) if "repeated" in root else table


def parse_document(text: str, source: str) -> Mapping[str, Any]:
    """Return the sections of a table's file.

    Raises:
        UsageError: the text is not YAML, has no sections, or has one of another structure.
    """
    # Imported late: commands that need no table start without it.
    import yaml  # type: ignore[import-untyped]

    try:
        root = yaml.safe_load(text)
    # PyYAML calls itself for each level of nesting, so a deeply nested text exceeds Python's limit.
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f" in line {mark.line + 1}" if mark else ""
        raise UsageError(
            source, f"is not valid YAML{at}: {str(error).splitlines()[0]}", FORM
        ) from error
    if not isinstance(root, dict):
        raise UsageError(source, "has neither 'parameters' nor 'hf'", FORM)
    refuse_malformed(source, root, _DOCUMENT)
    return root


def refuse_malformed(source: str, value: Any, kind: Kind, what: str = "") -> None:
    """Refuse a value of a table's file that does not have the structure of its kind.

    Args:
        what: the value's key in the file.

    Raises:
        UsageError: the value, or one in it, is of another kind.
    """
    fault = kind.fault(value)
    if fault:
        key, problem = fault
        raise UsageError(source, f"{(what + key).lstrip('.')} {problem}")


def _parse_table(root: Mapping[str, Any], source: str) -> Table:
    lines, hf = root.get("parameters", {}), root.get("hf", {})
    if not (lines or hf or root.get("families")):
        raise UsageError(source, "has neither 'parameters' nor 'hf'", FORM)
    for name in map(str, (*lines, *hf, *hf.values())):
        if "*" in name:
            raise UsageError(
                source,
                f"{name!r} has a '*', which matches nothing",
                "write {i} for a number and {p} for any last component of a name",
            )
    return Table(
        source,
        tuple(
            _parse_rule(str(n), line, source, root.get("numbers", {})) for n, line in lines.items()
        ),
        hf,
        str(root.get("prefix", "")),
        _parse_patterns(root.get("computed", [])),
        str(root.get("wrapper", "")),
        {Pattern(str(name)): str(kept) for name, kept in root.get("copies", {}).items()},
    )


def _rename_line(line: Any, rename: Callable[[str], str]) -> Any:
    """Return a line of ``hf`` whose names of Hugging Face's side are other ones."""
    if isinstance(line, str):
        return rename(line)
    if isinstance(line, list):
        return [_rename_line(part, rename) for part in line]
    names = line.get("names") if isinstance(line, dict) else None
    if not isinstance(names, list):
        return line  # `spellings` refuses it
    return {**line, "names": [rename(str(name)) for name in names]}


def _parse_rule(name: str, line: Any, source: str, numbers: Numbers) -> Rule:
    line = line if isinstance(line, dict) else {"cut": line}
    refuse_malformed(source, line, _LINE, f"parameters[{name!r}]")
    cut = line.get("cut")
    if cut not in (*_CUTS, _MAYBE_GATED, _COLUMN_OR_WHOLE, _WHOLE_OR_HEADS):
        raise UsageError(source, f"{name!r} has the unknown cut {cut!r}", FORM)
    others = {key: _parse_patterns(v) for key, v in line.items() if key not in _OF_RULE}
    parts = line.get("segments", {})
    if parts and cut != "column":
        raise UsageError(
            source, f"{name!r} has segments, which cannot be combined with the cut {cut!r}", FORM
        )
    return Rule(Pattern(name), cut, others, bool(line.get("buffer")), parts, numbers)


def _parse_patterns(value: Any) -> tuple[Pattern, ...]:
    return tuple(Pattern(str(text)) for text in (value if isinstance(value, list) else [value]))
