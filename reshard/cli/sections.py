"""Options that ``--help`` lists under section titles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

Command = Callable[..., Any]
Option = Callable[[Command], Command]

_REST = "Options"


class _Option(click.Option):
    """An option that belongs to a section."""

    def __init__(self, *names: Any, section: str = _REST, **given: Any) -> None:
        super().__init__(*names, **given)
        self.section = section


class _Command(click.Command):
    """A command whose help has sections; options without a section come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options like click, one list per section."""
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
    """A group of commands whose help has sections."""

    command_class = _Command


def section(title: str) -> Callable[..., Option]:
    """Return a function that declares options of a section, like `click.option`."""
    return partial(click.option, cls=_Option, section=title)


def together(*options: Option) -> Option:
    """Combine several options into one decorator."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
