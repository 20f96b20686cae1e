"""Options, each declared once: as a field of a dataclass, with its help text.

Everything else follows from these fields: the options of the command line (`reshard.cli`), the
keywords of the Python functions (`reshard.api`), the options listed in JSON reports, and
docs/options.md. The type of a field decides what the command line accepts: a `bool` is a flag, a
`Literal` a choice, a `Sequence` an option that can be repeated.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from reshard import units
from reshard.errors import UsageError
from reshard.system.paths import as_path

_O = TypeVar("_O", bound="Options")
_KEY = "option"
_NESTED = "options"
_UNIONS = (Union, types.UnionType)
_TYPE_NAMES = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
}
_known: dict[type[Any], tuple[Option, ...]] = {}


class Declaration(NamedTuple):
    """What a field states about its option, besides its name, type and default.

    Args:
        group: title of the section of ``--help`` that lists the option.
        flags: spellings on the command line; empty for ``--`` and the name of the field.
        unset: what happens by default, where the default value does not show it.
        choices: the allowed values, where the type of the field does not list them.
        find_choices: returns all choices, those of extensions included; called only for a value
            that is not among ``choices``, because it imports the extensions.
        advice: what to do for a value that is not allowed.
        parse: converts the text of the command line, where the type does not decide it.
        shown_default: the default as the command line spells it, for an option with ``parse``.
        shapes_output: whether the bytes of the output depend on the option.
        is_common: whether ``--help`` lists it; ``--help-all`` lists every option.
    """

    help: str
    group: str
    flags: tuple[str, ...] = ()
    unset: str = ""
    metavar: str | None = None
    choices: tuple[Any, ...] = ()
    find_choices: Callable[[], Iterable[Any]] | None = None
    advice: str = ""
    minimum: int | None = None
    maximum: int | None = None
    parse: Callable[[str], Any] | None = None
    shown_default: str | None = None
    shapes_output: bool = True
    is_common: bool = False


def option(default: Any, text: str, *, group: str, **declared: Any) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        text: the help text, a sentence.
        declared: as in `Declaration`.
    """
    declaration = Declaration(text, group, **declared)
    return field(default=default, metadata={_KEY: declaration})


def size_option(default: str, text: str, *, flag: str, **declared: Any) -> Any:
    """Declare an option that is a number of bytes, which the command line takes as ``5GB``."""

    def parse(size: str) -> int:
        return units.parse_bytes(size, flag)

    return option(
        parse(default), text, flags=(flag,), parse=parse, shown_default=default, **declared
    )


def repeat_option(kind: type[Any], name: str, **changed: Any) -> Any:
    """Declare an option of another dataclass again, where a part of its declaration differs.

    Args:
        changed: what differs, as in `Declaration`.
    """
    declaring = next(declaring for declaring in fields(kind) if declaring.name == name)
    declaration = declaring.metadata[_KEY]._replace(**changed)
    return field(default=declaring.default, metadata={_KEY: declaration})


def nested_options(kind: type) -> Any:
    """Declare a field that holds another dataclass of options."""
    return field(default_factory=kind, metadata={_NESTED: kind})


class Option(NamedTuple):
    """One option of a command.

    Args:
        name: the field, and the keyword in Python.
        type: the type of one value: `bool`, `int`, `float`, `str` or `Path`.
        is_multiple: whether the value is a sequence.
        is_optional: whether the value can be None.
        within: the field of the nested dataclass that declares the option; empty if the command's
            own dataclass declares it.
    """

    name: str
    default: Any
    declared: Declaration
    type: type
    choices: tuple[Any, ...]
    is_multiple: bool
    is_optional: bool
    within: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """The spellings on the command line."""
        return self.declared.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def is_negated(self) -> bool:
        """Whether the flag on the command line makes the value false."""
        return self.type is bool and self.default is True

    @property
    def all_choices(self) -> tuple[Any, ...]:
        """The choices with those of extensions, which are imported."""
        find = self.declared.find_choices
        return tuple(find()) if find else self.choices

    def check(self, value: Any) -> None:
        """Refuse a value that the option does not allow.

        Raises:
            UsageError: the value has another type, is not among the choices, or is out of range.
        """
        if self.is_multiple:
            if isinstance(value, (str, bytes)):  # its letters would be taken as the values
                raise UsageError(f"{self.name}={value!r}", "must be a list", f"pass [{value!r}]")
            for item in value:
                self._check_one(item)
        elif value is not None or not self.is_optional:
            self._check_one(value)

    def _check_one(self, value: Any) -> None:
        if not self.choices and not self._is_of_type(value):
            problem = f"must be {_TYPE_NAMES[self.type]}"
            raise UsageError(f"{self.name}={value!r}", problem, self.declared.advice)
        least, most = self.declared.minimum, self.declared.maximum
        if self.choices and value not in self.choices:
            # Only now, because this imports the extensions.
            known = self.all_choices
            if value not in known:
                raise UsageError(
                    f"{self.name}={value!r}",
                    f"must be one of {', '.join(map(str, known))}",
                    self.declared.advice,
                )
        if least is not None and value < least:
            raise UsageError(f"{self.name}={value!r}", f"must be at least {least}")
        if most is not None and value > most:
            raise UsageError(f"{self.name}={value!r}", f"must be at most {most}")

    def _is_of_type(self, value: Any) -> bool:
        # Only mistakes that Python would accept silently are found. A text option also takes
        # objects, such as a ``torch.dtype``, which the code that uses the option converts.
        if self.type is bool:  # "no" is true in Python
            return isinstance(value, bool)
        if self.type is str:
            return not isinstance(value, (bool, int, float, bytes))
        if self.type in (int, float) and isinstance(value, (str, bytes, bool)):
            return False
        return self.type is not int or not isinstance(value, float)


def options_of(kind: type[Any]) -> tuple[Option, ...]:
    """Return the options that a dataclass declares: its own first, then those of its bases."""
    if kind not in _known:
        _known[kind] = tuple(_read_declarations(kind))
    return _known[kind]


def _read_declarations(kind: type[Any]) -> Iterator[Option]:
    hints = get_type_hints(kind)
    by_name = {declaring.name: declaring for declaring in fields(kind)}
    # `fields` lists those of the bases first; help lists a command's own options first.
    names = dict.fromkeys(
        name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())
    )
    for name in names:
        yield from _options_of_field(by_name[name], hints[name])


def _options_of_field(declaring: Field[Any], hint: Any) -> Iterator[Option]:
    inner = declaring.metadata.get(_NESTED)
    if inner is not None:
        for option in options_of(inner):
            yield option._replace(within=declaring.name)
    declared = declaring.metadata.get(_KEY)
    if declared is None:
        return
    parts = [part for part in _parts(hint) if part is not type(None)]
    is_multiple = get_origin(parts[0]) is Sequence
    value = get_args(parts[0])[0] if is_multiple else parts[0]
    literals = get_args(value) if get_origin(value) is Literal else ()
    kinds = [type(literals[0])] if literals else (parts if not is_multiple else [value])
    yield Option(
        declaring.name,
        declaring.default,
        declared,
        Path if Path in kinds else kinds[0],
        declared.choices or literals,
        is_multiple,
        len(parts) < len(_parts(hint)),
    )


def _parts(hint: Any) -> Sequence[Any]:
    if get_origin(hint) not in _UNIONS:
        return (hint,)
    return [part for member in get_args(hint) for part in _parts(member)]


def build_options(kind: type[_O], values: Mapping[str, Any], **further: Any) -> _O:
    """Build a dataclass of options, and the dataclasses nested in it, from flat values.

    Args:
        values: option name -> value, for every option of ``kind``.
        further: fields that are not options.
    """
    inside: dict[str, dict[str, Any]] = {}
    for option in options_of(kind):
        inside.setdefault(option.within, {})[option.name] = values[option.name]
    for holder in fields(kind):
        if _NESTED in holder.metadata:
            further[holder.name] = holder.metadata[_NESTED](**inside[holder.name])
    return kind(**inside.get("", {}), **further)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all dataclasses of options; their values are checked when one is created."""

    def __post_init__(self) -> None:
        """Convert strings to paths, and refuse the first value that its option does not allow.

        Raises:
            UsageError: a value is not allowed; the message names the option and what it allows.
        """
        for option in options_of(type(self)):
            value = None if option.within else getattr(self, option.name)
            if option.type is Path and isinstance(value, str):
                object.__setattr__(self, option.name, as_path(value))  # the class is frozen
        for option, value in self._values():
            option.check(value)

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, name -> value, for a JSON report."""
        return {
            option.name: _as_json(value)
            for option, value in self._values()
            if value != option.default
        }

    def refuse_beside(self, flag: str, *names: str) -> None:
        """Refuse options that have no effect beside another one.

        Args:
            flag: the other option, for the message.
            names: the fields of the options to refuse.

        Raises:
            UsageError: one of them is given; the message names it.
        """
        self.refuse_given(names, f"has no effect with {flag}", "leave it out")

    def refuse_given(self, names: Collection[str], problem: str, remedy: str) -> None:
        """Refuse options that differ from their defaults.

        Args:
            names: the fields of the options to refuse.
            problem: what the error says is wrong.
            remedy: what the error advises.

        Raises:
            UsageError: one of them is given; the message names it.
        """
        for option, value in self._values():
            if option.name in names and _as_json(value) != _as_json(option.default):
                raise UsageError(option.flags[0], problem, remedy)

    def convert_to(self, kind: type[_O], **changed: Any) -> _O:
        """Return options of another command, with the values of those that both commands have.

        Args:
            changed: values that differ.
        """
        own = {field.name for field in fields(self)}
        shared = {
            field.name: getattr(self, field.name) for field in fields(kind) if field.name in own
        }
        return kind(**shared | changed)

    def shaping_output(self) -> dict[str, Any]:
        """Return the fields on which the bytes of the output depend, name -> value."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if _NESTED in field.metadata
            or (_KEY in field.metadata and field.metadata[_KEY].shapes_output)
        }

    def _values(self) -> Iterator[tuple[Option, Any]]:
        for option in options_of(type(self)):
            holder = getattr(self, option.within) if option.within else self
            yield option, getattr(holder, option.name)


def _as_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value
