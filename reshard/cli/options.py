"""The options of commands, built from the dataclasses that declare them (`reshard.options`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import reshard
from reshard.options import Option, Options, build_options, options_of
from reshard.system.paths import as_path

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
    _Choice = click.Choice[str]
else:  # click has no type parameters before 8.4
    _ParamType = click.ParamType
    _Choice = click.Choice

_REST = "Options"
_COMMON = "Common options"
_FEW = 24  # a command with at most so many options shows all of them in --help
_ARGUMENTS, _ALL = "reshard.arguments", "reshard.help_all"  # keys of a click context


class _PathOrUrl(click.Path):
    def convert(
        self, value: Any, _param: click.Parameter | None, _context: click.Context | None
    ) -> Any:
        """Return the path object that the commands take."""
        return as_path(value)


class _Parsed(_ParamType):
    name = "text"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse

    def convert(
        self, value: Any, _param: click.Parameter | None, _context: click.Context | None
    ) -> Any:
        """Return the parsed value; a default may be one already."""
        return self._parse(value) if isinstance(value, str) else value


class _SpelledChoice(_Choice):
    """click's own shows every value as ``token_normalize_func`` returns it (``torch-dist``)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        wanted = str(value).replace("_", "-")
        spelled = (choice for choice in self.choices if choice.replace("_", "-") == wanted)
        return super().convert(next(spelled, value), param, ctx)

    def normalize_choice(self, choice: object, ctx: click.Context | None) -> str:  # noqa: ARG002
        """Return a choice as click 8.2 and later show it in help, messages and completions."""
        return str(choice)


class _OpenChoice(_SpelledChoice):
    """A choice to which extensions add values; they are imported only for an unknown value."""

    def __init__(self, option: Option) -> None:
        super().__init__(option.choices)
        self._option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices:
            return value
        try:
            return _SpelledChoice(self._option.all_choices).convert(value, param, ctx)
        except click.BadParameter as error:
            advice = self._option.declared.advice
            raise click.BadParameter(f"{error.message}\n{advice}".rstrip(), ctx, param) from None


PATH = _PathOrUrl()


class _ClickOption(click.Option):
    """An option under the title of its section; without ``writers``, all targets use it."""

    def __init__(
        self,
        *names: str,
        field: str,
        section: str,
        writers: Sequence[str],
        is_common: bool,
        **declared: Any,
    ) -> None:
        super().__init__(names, **declared)
        self.section, self.is_common = section, is_common
        self._field, self.writers = field, writers

    def is_used_by(self, target: str) -> bool:
        from reshard.formats.registry import list_writers_using

        return bool(self.writers) and target in list_writers_using(self._field)


class Command(click.Command):
    """A command with the options of a dataclass, which is imported when they are first needed.

    Args:
        declared: name of the dataclass in `reshard`; empty for a command without one.
        required: options without which the command does not run.
        examples: command lines, each with its purpose, for the help.
    """

    def __init__(
        self,
        *args: Any,
        declared: str = "",
        required: Sequence[str] = (),
        examples: Sequence[tuple[str, str]] = (),
        **further: Any,
    ) -> None:
        self._name_of_kind, self._required, self.examples = declared, required, examples
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
            arguments = [param for param in given if isinstance(param, click.Argument)]
            own = [param for param in given if param not in arguments]
            self._params = [*arguments, *declared, *own]
            if len(self._params) > _FEW:
                self._params.append(_make_help_all())
        return self._params

    @params.setter
    def params(self, given: list[click.Parameter]) -> None:
        self._given = given

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments: ``--help`` is answered before they are parsed."""
        ctx.meta[_ARGUMENTS] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            raise self._name_missing_arguments(error) from error

    def _name_missing_arguments(self, error: click.MissingParameter) -> click.UsageError:
        # click names only one, and not the missing one: it fills arguments from the end.
        needed = [param for param in self.params if isinstance(param, click.Argument)]
        if error.param not in needed or len(needed) < 2:
            return error
        names = " and ".join(param.metavar or param.human_readable_name for param in needed)
        example = f", for example: {self.examples[0][0]}" if self.examples else ""
        return click.UsageError(f"{names} are required{example}", error.ctx)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description and the examples."""
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line, purpose in self.examples:
                    indent = " " * formatter.current_indent
                    formatter.write(f"{indent}# {purpose}\n{indent}{line}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options like click, one list per section; those without a section come last.

        Without ``--help-all`` these are the common options, and those of the target that the
        command line names.
        """
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        is_short = not ctx.meta.get(_ALL) and len(options) > _FEW
        target = _find_target(ctx.meta.get(_ARGUMENTS, ())) if is_short else None
        sections: dict[str, list[tuple[str, str]]] = {}
        hidden = 0
        for option in options:
            row = option.get_help_record(ctx)
            title = _find_section(option, target) if is_short else getattr(option, "section", _REST)
            if row is not None and title:
                sections.setdefault(title, []).append(row)
            hidden += not title
        rest = sections.pop(_REST)  # contains at least --help
        for title, rows in (*sections.items(), (_REST, rest)):
            with formatter.section(title):
                formatter.write_dl(rows)
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(self._point_to_more(ctx, hidden, target, options))

    def _point_to_more(
        self, ctx: click.Context, hidden: int, target: str | None, options: Sequence[click.Option]
    ) -> str:
        text = f"{hidden} more options: {ctx.command_path} --help-all"
        if target is None and any(option.name == "to" for option in options):
            text += f". Those of a target: {ctx.command_path} --to TARGET --help"
        return text


class Group(click.Group):
    """The commands of the program, each a `Command`."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without arguments, print the help on stderr and exit with 2, as click does since 8.2."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)


def take_options(kind: type[Options], values: dict[str, Any], **further: Any) -> Any:
    """Remove the declared options from the values of a command; return the dataclass of them.

    Args:
        further: fields of the dataclass that are not options.
    """
    taken = {}
    for option in options_of(kind):
        value = values.pop(_name_value(option))
        taken[option.name] = not value if option.is_negated else value
    return build_options(kind, taken, **further)


def _make_help_all() -> click.Option:
    def show(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show every option and exit.",
    )


def _find_section(param: click.Option, target: str | None) -> str:
    if not isinstance(param, _ClickOption):
        return _REST
    if target is not None and param.is_used_by(target):
        return f"Options of --to {target}"
    return _COMMON if param.is_common and not (target and param.writers) else ""


def _find_target(arguments: Sequence[str]) -> str | None:
    for at, argument in enumerate(arguments):
        flag, is_joined, value = argument.partition("=")
        if flag == "--to":
            return value if is_joined else next(iter(arguments[at + 1 :]), None)
    return None


def _make_options(kind: type[Options], required: Sequence[str]) -> Iterator[click.Option]:
    from reshard.formats.registry import list_built_in_writers_using

    declared_options = options_of(kind)
    writers = {option.name: list_built_in_writers_using(option.name) for option in declared_options}
    users = _list_targets_of_groups(declared_options, writers)
    for option in declared_options:
        title = option.declared.group + users.get(option.declared.group, "")
        is_required = option.name in required
        yield _make_option(option, title, writers[option.name], is_required=is_required)


def _list_targets_of_groups(
    declared_options: Sequence[Option], writers: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    # Groups with options that every target uses are not in the result.
    users: dict[str, list[Sequence[str]]] = {}
    for option in declared_options:
        users.setdefault(option.declared.group, []).append(writers[option.name])
    return {
        group: f" (--to {', '.join(dict.fromkeys(chain(*named)))})"
        for group, named in users.items()
        if all(named)
    }


def _make_option(
    option: Option, section: str, writers: Sequence[str], *, is_required: bool
) -> click.Option:
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
        further["type"] = _choose_type(option)
        further["show_default"] = option.default not in (None, ()) and not declared.unset
    if option.is_multiple:
        further["multiple"] = True
    elif not is_required:  # from click 8.3 on, a default of None satisfies `required`
        default = False if option.is_negated else option.default
        further["default"] = declared.shown_default or default
    return _ClickOption(
        *flags,
        _name_value(option),
        field=option.name,
        section=section,
        writers=writers,
        is_common=declared.is_common or is_required,
        help=text,
        required=is_required,
        metavar=declared.metavar,
        **further,
    )


def _choose_type(option: Option) -> Any:
    declared = option.declared
    if declared.parse is not None:
        return _Parsed(declared.parse)
    if option.type is Path:
        return PATH
    if option.type is int and option.choices:  # consecutive numbers; click 8.1's Choice needs texts
        return click.IntRange(min(option.choices), max(option.choices))
    if option.choices:
        return _OpenChoice(option) if declared.find_choices else _SpelledChoice(option.choices)
    if option.type is int and (declared.minimum is not None or declared.maximum is not None):
        return click.IntRange(declared.minimum, declared.maximum)
    return option.type


def _name_value(option: Option) -> str:
    return option.flags[0].partition("/")[0].lstrip("-").replace("-", "_")
