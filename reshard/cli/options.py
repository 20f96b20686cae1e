"""The options of commands, built from the dataclasses that declare them (`reshard.options`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.options import Option, Options, build_options, options_of
from reshard.paths import as_path

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
    _Choice = click.Choice[str]
else:  # click has no type parameters before 8.4
    _ParamType = click.ParamType
    _Choice = click.Choice

_REST = "Options"


class _Where(click.Path):
    """A local path, or a URL."""

    def convert(
        self, value: Any, _param: click.Parameter | None, _context: click.Context | None
    ) -> Any:
        """Return the path object that all lower layers use."""
        return as_path(value)


class _Parsed(_ParamType):
    """A text that a function of the option parses, such as a size."""

    name = "text"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse

    def convert(
        self, value: Any, _param: click.Parameter | None, _context: click.Context | None
    ) -> Any:
        """Return the parsed value; a default may be one already."""
        return self._parse(value) if isinstance(value, str) else value


class _OpenChoice(_Choice):
    """A choice to which extensions add values; they are imported only for an unknown value."""

    def __init__(self, option: Option) -> None:
        super().__init__(option.choices)
        self._option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value if the option allows it."""
        if value not in self.choices:
            self.choices = self._option.all_choices
        return super().convert(value, param, ctx)


PATH = _Where()


class _Option(click.Option):
    """An option under the title of its section."""

    def __init__(self, *names: str, section: str, **declared: Any) -> None:
        super().__init__(names, **declared)
        self.section = section


class Command(click.Command):
    """A command with the options of a dataclass, which is imported when they are first needed.

    Args:
        declared: name of the dataclass in `reshard`; empty for a command without one.
        required: options without which the command does not run.
    """

    def __init__(
        self, *args: Any, declared: str = "", required: Sequence[str] = (), **further: Any
    ) -> None:
        self._name_of_kind, self._required = declared, required
        self._params: list[click.Parameter] | None = None
        super().__init__(*args, **further)

    @property
    def declared(self) -> type[Options]:
        """The dataclass of the options."""
        kind: type[Options] = getattr(reshard, self._name_of_kind)
        return kind

    @property
    def params(self) -> list[click.Parameter]:
        """The arguments, the declared options, and those of the command line alone."""
        if self._params is None:
            declared = _make_options(self.declared, self._required) if self._name_of_kind else ()
            given = self._given
            arguments = [each for each in given if isinstance(each, click.Argument)]
            self._params = [
                *arguments,
                *declared,
                *(each for each in given if each not in arguments),
            ]
        return self._params

    @params.setter
    def params(self, given: list[click.Parameter]) -> None:
        self._given = given

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options like click, one list per section; those without a section come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if row is not None:
                sections.setdefault(getattr(param, "section", _REST), []).append(row)
        rest = sections.pop(_REST)  # contains at least --help
        for title, rows in (*sections.items(), (_REST, rest)):
            with formatter.section(title):
                formatter.write_dl(rows)


class Group(click.Group):
    """A group of such commands."""

    command_class = Command


def take_options(kind: type[Options], values: dict[str, Any], **further: Any) -> Any:
    """Remove the declared options from the values of a command; return the dataclass of them.

    Args:
        further: fields of the dataclass that are not options.
    """
    taken = {}
    for each in options_of(kind):
        value = values.pop(_destination(each))
        taken[each.name] = not value if each.is_negated else value
    return build_options(kind, taken, **further)


def _make_options(kind: type[Options], required: Sequence[str]) -> Iterator[click.Option]:
    declared_options = options_of(kind)
    users = _users_of_groups(declared_options)
    for each in declared_options:
        title = each.declared.group + users.get(each.declared.group, "")
        yield _make_option(each, title, is_required=each.name in required)


def _users_of_groups(declared_options: Sequence[Option]) -> dict[str, str]:
    """Return the targets that use options of a group, as the title shows them.

    Groups with options that every target uses are not in the result.
    """
    from reshard.formats.registry import list_writers_using

    users: dict[str, list[str]] = {}
    for each in declared_options:
        users.setdefault(each.declared.group, []).extend(list_writers_using(each.name))
    return {
        group: f" (--to {', '.join(dict.fromkeys(names))})"
        for group, names in users.items()
        if names
    }


def _make_option(option: Option, section: str, *, is_required: bool) -> click.Option:
    declared, text = option.declared, option.declared.help
    if declared.unset and not is_required:
        text += f"  [default: {declared.unset}]"
    further: dict[str, Any] = {}
    flags = option.flags
    if option.type is bool:
        further["is_flag"] = True
        if option.is_optional and not declared.flags:
            flags = (f"{flags[0]}/{flags[0].replace('--', '--no-', 1)}",)
    else:
        further["type"] = _type_of(option)
        further["show_default"] = option.default not in (None, ()) and not declared.unset
    if option.is_multiple:
        further["multiple"] = True
    else:
        default = False if option.is_negated else option.default
        further["default"] = declared.shown_default or default
    return _Option(
        *flags,
        _destination(option),
        section=section,
        help=text,
        required=is_required,
        metavar=declared.metavar,
        **further,
    )


def _type_of(option: Option) -> Any:
    """Return the type of an option's value, as click knows it."""
    declared = option.declared
    if declared.parse is not None:
        return _Parsed(declared.parse)
    if option.type is Path:
        return PATH
    if option.type is int and option.choices:  # consecutive numbers; click 8.1's Choice needs texts
        return click.IntRange(min(option.choices), max(option.choices))
    if option.choices:
        return _OpenChoice(option) if declared.find_choices else click.Choice(option.choices)
    if option.type is int and (declared.minimum is not None or declared.maximum is not None):
        return click.IntRange(declared.minimum, declared.maximum)
    return option.type


def _destination(option: Option) -> str:
    """Return the name under which click passes the value: that of the first flag."""
    return option.flags[0].partition("/")[0].lstrip("-").replace("-", "_")
