"""The command line: parse, call, print. Results on stdout, progress and messages on stderr.

Exit codes: 0 done; 1 checked and different, or incomplete; 2 usage or unrecognised; 3 corrupt
input; 4 not enough memory or disk; 5 refused as unsafe; 6 a program that a check needs did not
run to its end; 70 a bug in reshard; 130 interrupted.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from reshard.cli.commands import cli
from reshard.cli.run import is_verbose, print_message
from reshard.errors import INTERRUPTED, ReshardError
from reshard.system import optional, signals

__all__ = ["cli", "main"]

_OUT_OF_MEMORY = "out of memory; pass a smaller --max-memory or fewer --workers"
# New objects per garbage collection; the default of 700 costs a tenth of the start.
_NEW_OBJECTS = 50_000


def main() -> NoReturn:
    """Run the command line; every failure is one message and a documented exit code."""
    gc.set_threshold(_NEW_OBJECTS)
    try:
        with signals.raised():
            # In this mode, click returns the exit code instead of ending the process.
            code = cli(standalone_mode=False) or 0
    except BaseException as error:  # noqa: BLE001 - every failure gets a message and a code
        if is_verbose():
            import traceback

            traceback.print_exc()
        code = _explain(error)
    sys.exit(code)


def _explain(error: BaseException) -> int:  # noqa: PLR0911 - one return per exit code
    if isinstance(error, ModuleNotFoundError):
        error = optional.explain(error, "this command") or error
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        error.show()
        return 2
    if isinstance(error, ReshardError):
        return _fail(*error.lines, code=error.exit_code)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        # click 8.1.0 raises Abort without a cause
        cause = error.__context__ if isinstance(error, click.Abort) else error
        return _fail(
            "; ".join(["interrupted", *map(str, cause.args if cause else ())]), code=INTERRUPTED
        )
    if isinstance(error, SystemExit):  # click raises it when the reader of stdout is gone
        return 0
    if isinstance(error, BrokenPipeError):  # Python flushes stdout at exit, which would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, MemoryError):
        return _fail("; ".join([_OUT_OF_MEMORY, *map(str, error.args)]), code=4)
    if isinstance(error, OSError):
        return _explain_os_error(error)
    return _fail(f"a bug in reshard ({type(error).__name__}: {error}); -v shows where", code=70)


def _explain_os_error(error: OSError) -> int:
    if error.errno == errno.ENOMEM:
        return _fail(f"{_OUT_OF_MEMORY}; {error.filename or error.strerror}", code=4)
    if error.errno == errno.ENOSPC:  # of stdout, which click writes a help text to
        return _fail(f"{error.filename or 'standard output'}: {error.strerror}", code=4)
    if isinstance(error, FileNotFoundError) and _is_working_directory_deleted():
        return _fail("the working directory was deleted: change to one that exists", code=2)
    return _fail(f"{error.filename or 'system'}: {error.strerror or error}", code=2)


def _is_working_directory_deleted() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _fail(first: str, *more: str, code: int) -> int:
    for line in (f"reshard: {first}", *more):
        print_message(line)
    return code
