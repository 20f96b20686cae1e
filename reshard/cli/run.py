"""Running a command and showing its report: results on stdout, progress and messages on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from reshard.cli import terminal
from reshard.cli.options import take_options
from reshard.errors import ResourceError

_SHOWN_EVERY_S = 30.0  # between two lines if stderr is not a terminal


def pop_options(values: dict[str, Any], **further: Any) -> Any:
    """Remove the options of the running command from its values; return their dataclass."""
    command: Any = click.get_current_context().command
    return take_options(command.declared, values, **further)


def run_reader(
    run: Callable[..., Any],
    /,
    *paths: Any,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Run a command that only reads tensors, and exit with the code of its report.

    Args:
        run: called with the paths, the options, and a progress bar if stderr is a terminal.
    """
    chosen = pop_options(values)
    report = run(*paths, chosen, _show_progress if _shows_progress(quiet=quiet) else None)
    if not quiet or as_json:
        show_result(report, as_json=as_json)
    raise click.exceptions.Exit(report.exit_code)


def run_writer(
    run: Callable[..., Any],
    sources: tuple[Path, ...],
    destination: Path,
    /,
    *,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Run a command that writes, alone or in several processes, and show its report."""
    from reshard.system.ranks import torchrun

    # Its threads would do nothing but wait, which takes time at the import of numpy: reshard has
    # threads of its own, and no matrix products for those of OpenBLAS.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        with torchrun.join_team() as team:
            if not team.first:
                values["html"] = None  # one rank writes the page
            shows_progress = team.first and _shows_progress(quiet=quiet)
            chosen = pop_options(values, team=team)
            report = run(sources, destination, chosen, _show_progress if shows_progress else None)
    except torchrun.ReportedByFirstRankError as silent:
        raise click.exceptions.Exit(silent.exit_code) from silent
    if team.first and (not quiet or as_json):
        show_result(report, as_json=as_json)


def _shows_progress(*, quiet: bool) -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and not quiet


@contextlib.contextmanager
def _show_progress(total: int) -> Iterator[Callable[[int], None]]:
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, leave=False) as progress:
        yield progress.update


@contextlib.contextmanager
def show_program(name: str, steps: int) -> Iterator[Callable[[int, float, str], None]]:
    """Show on stderr how many steps a program has done, its time and its last line.

    On a terminal that is a progress bar; elsewhere a line every 30 seconds.
    """
    from reshard.commands.lines import make_printable

    if _shows_progress(quiet=False):
        with _show_steps(name, steps) as update:
            yield update
        return
    shown = 0.0

    def watch(done: int, seconds: float, line: str) -> None:
        nonlocal shown
        if seconds - shown >= _SHOWN_EVERY_S:
            shown = seconds
            text = make_printable(line) or "nothing printed yet"
            print_message(f"{name}: {done} of {steps} steps; {seconds:.0f} s; {text}")

    yield watch


@contextlib.contextmanager
def _show_steps(name: str, steps: int) -> Iterator[Callable[[int, float, str], None]]:
    from tqdm import tqdm

    from reshard.commands.lines import make_printable

    with tqdm(
        total=steps,
        desc=name,
        unit="step",
        file=sys.stderr,
        leave=False,
        dynamic_ncols=True,
        bar_format="{desc}: {n_fmt}/{total_fmt} steps |{bar:20}| {elapsed}{postfix}",
    ) as bar:

        def update(done: int, _seconds: float, line: str) -> None:
            bar.n = done
            bar.set_postfix_str(make_printable(line), refresh=True)

        yield update


def show_result(result: Any, *, as_json: bool) -> None:
    """Print a report on stdout, as text or as one JSON document.

    Raises:
        ResourceError: stdout cannot be written; the message says that the output is complete.
    """
    try:
        if as_json:
            click.echo(result.to_json())
            return
        from reshard.commands.lines import DetailLine

        for line in result.lines():
            if is_verbose() or not isinstance(line, DetailLine):
                _show(line)
    except BrokenPipeError:  # the reader has closed the pipe
        raise
    except OSError as error:
        from reshard.commands.page import describe_whole_output

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        done = describe_whole_output(result.destination) if getattr(result, "done", False) else ""
        raise ResourceError(
            "standard output", f"the report cannot be written: {error.strerror}", done
        ) from error


def is_verbose() -> bool:
    """Return whether the command line asks for details and for tracebacks."""
    return not {"-v", "--verbose"}.isdisjoint(sys.argv)


def print_message(line: str) -> None:
    """Print a line on stderr."""
    _show(line, err=True)


def _show(line: str, *, err: bool = False) -> None:
    from reshard.commands.lines import make_printable

    stream = sys.stderr if err else sys.stdout
    text = make_printable(line)
    click.echo(text if stream is None else terminal.lay_out(text, stream), err=err)
