"""A command called, and what it says shown: results on stdout, progress and messages on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from reshard import units


def read(run: Callable[..., Any], made: Callable[..., Any], *places: Any, **given: Any) -> None:
    """Run a command that only reads tensors, and end with the code of its report.

    Args:
        run: called with the places, its options and a progress bar, if somebody looks on.
        made: makes its options of what else is given.
    """
    as_json, quiet = _how(given)
    report = run(*places, made(**given), bar if _is_watched(quiet=quiet) else None)
    if not quiet or as_json:
        show_result(report, as_json=as_json)
    raise click.exceptions.Exit(report.exit_code)


def write(
    run: Callable[..., Any],
    made: Callable[..., Any],
    sources: tuple[Path, ...],
    destination: Path,
    **given: Any,
) -> None:
    """The same of a command that writes, which several processes may share."""
    as_json, quiet = _how(given)
    given["verify"] = not given.pop("no_verify")
    from reshard.ranks import torchrun

    try:
        with torchrun.join_team() as team:
            if not team.first:
                given["html"] = None
            watched = team.first and _is_watched(quiet=quiet)
            chosen = made(team=team, **given)
            report = run(sources, destination, chosen, bar if watched else None)
    except torchrun.ReportedByFirstRankError as silent:
        raise click.exceptions.Exit(silent.exit_code) from silent
    if team.first and (not quiet or as_json):
        show_result(report, as_json=as_json)


def _how(given: dict[str, Any]) -> tuple[bool, bool]:
    """Whether to show JSON, and whether to be quiet; what is left is what a command is told."""
    as_json, quiet, _ = (given.pop(name) for name in ("as_json", "quiet", "verbose"))
    given["max_memory_bytes"] = units.parse_bytes(given.pop("max_memory"), "--max-memory")
    return as_json, quiet


def _is_watched(*, quiet: bool) -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and not quiet


@contextlib.contextmanager
def bar(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, of bytes."""
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, leave=False) as shown:
        yield shown.update


def show_result(result: Any, *, as_json: bool) -> None:
    """A report on stdout, for a person or as one JSON document."""
    if as_json:
        import json

        click.echo(json.dumps(result.to_json(), indent=2, default=str))
        return
    for line in result.lines():
        _show(line)


def say(line: str) -> None:
    """A line on stderr."""
    _show(line, err=True)


def _show(line: str, *, err: bool = False) -> None:
    from reshard.commands.lines import printable

    click.echo(printable(line), err=err)
