"""Options that ``--help`` shows under titles, in the order in which they are listed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

Command = Callable[..., Any]
Option = Callable[[Command], Command]

_REST = "Options"


class _Option(click.Option):
    """One that stands in a section."""

    def __init__(self, *names: Any, section: str = _REST, **given: Any) -> None:
        super().__init__(*names, **given)
        self.section = section


class _Command(click.Command):
    """One whose help has sections; what stands in none is in the last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does, a list a section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if row is not None:
                sections.setdefault(getattr(param, "section", _REST), []).append(row)
        rest = sections.pop(_REST)  # --help at least
        for title, rows in (*sections.items(), (_REST, rest)):
            with formatter.section(title):
                formatter.write_dl(rows)


class Group(click.Group):
    """Commands whose help has sections."""

    command_class = _Command


def section(title: str) -> Callable[..., Option]:
    """What makes options of a section, as `click.option` makes others."""
    return partial(click.option, cls=_Option, section=title)


def together(*options: Option) -> Option:
    """Several options as one."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
