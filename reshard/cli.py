"""The command line: parse, call, print. Results on stdout, progress and messages on stderr.

Exit codes: 0 done; 1 checked and different, or incomplete; 2 usage or unrecognised; 3 corrupt
input; 4 not enough memory or disk; 5 refused as unsafe; 70 a bug of ours; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

from reshard import __version__, formats, keys, units
from reshard.commands.inspect import inspect as run_inspect
from reshard.commands.merge import MergeOptions
from reshard.commands.merge import merge as run_merge
from reshard.errors import ReshardError, UsageError

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}


def main() -> NoReturn:
    """Run the command line; every failure is one message and a documented exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _interrupt)
    try:
        cli(standalone_mode=False)
        code = 0
    except BaseException as error:  # noqa: BLE001 - nothing leaves without its message and code
        if "-v" in sys.argv or "--verbose" in sys.argv:
            traceback.print_exc()
        code = _explain(error)
    sys.exit(code)


def _explain(error: BaseException) -> int:  # noqa: PLR0911 - one return an exit code
    """Print what went wrong; the exit code."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        error.show()
        return 2
    if isinstance(error, ReshardError):
        return _fail(str(error), error.exit_code)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return _fail("interrupted; nothing was written", 130)
    if isinstance(error, SystemExit):  # click's way to say that the reader of stdout has gone
        return 0
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, MemoryError):
        return _fail("out of memory; give a smaller --max-memory or fewer --workers", 4)
    if isinstance(error, OSError):
        return _fail(f"{error.filename or 'system'}: {error.strerror or error}", 2)
    return _fail(f"a bug in reshard ({type(error).__name__}: {error}); -v shows where", 70)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    """End with the cleaning-up done; a second signal must not end that."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> int:
    click.echo(f"reshard: {message}", err=True)
    return code


@click.group(context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="reshard")
def cli() -> None:
    """Reshard training checkpoints, without a GPU, a process group or the framework."""


def _source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say how a source is read; the same for every command."""
    for option in (
        click.option("-v", "--verbose", is_flag=True, help="Show tracebacks."),
        click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout."),
        click.option("--key", help="State dict inside a torch.save file, dotted."),
        click.option("--tag", "--step", "tag", help="Checkpoint of a run directory."),
        click.option(
            "--from", "source_format", type=click.Choice(formats.NAMES), help="Skip detection."
        ),
    ):
        command = option(command)
    return command


@cli.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--tensors", is_flag=True, help="List the tensors, repeated layers folded.")
@_source_options
def inspect(
    source: Path,
    tensors: bool,
    source_format: str | None,
    tag: str | None,
    key: str | None,
    as_json: bool,
    **_seen_by_main: bool,
) -> None:
    """Say what the checkpoint SOURCE is; reads headers only."""
    found = run_inspect(source, force=source_format, tag=tag, key=key, tensors=tensors)
    _print(found, as_json=as_json)


@cli.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--dtype", help="bf16, fp16, fp32 or keep (as stored).  [default: as trained]")
@click.option("--keep-fp32", multiple=True, metavar="REGEX", help="Weights to write as fp32.")
@click.option(
    "--on-overflow",
    type=click.Choice(["error", "clamp", "allow"]),
    default="error",
    show_default=True,
    help="When a finite value would become infinite.",
)
@click.option("--max-shard-size", default="5GB", show_default=True, help="Of a directory's files.")
@click.option(
    "--hf-dir", type=click.Path(path_type=Path), help="Model whose config, tokenizer... to copy."
)
@click.option(
    "--tied",
    type=click.Choice(["auto", "keep", "drop"]),
    default="auto",
    show_default=True,
    help="Second names of tied weights.",
)
@click.option("--no-strip", is_flag=True, help="Keep wrapper prefixes such as module. in names.")
@click.option("--rename", multiple=True, metavar="REGEX=REPL", help="Applied in the order given.")
@click.option("--include", multiple=True, metavar="REGEX", help="Only tensors so named.")
@click.option("--exclude", multiple=True, metavar="REGEX", help="All but tensors so named.")
@click.option(
    "--allow-pickle", multiple=True, metavar="NAME", help="Accept an unknown class (never run)."
)
@click.option("--workers", default=0, help="Threads; the output does not depend on it.")
@click.option(
    "--max-memory", default="256MiB", show_default=True, help="For the buffers of all workers."
)
@click.option("--overwrite", is_flag=True, help="Replace DESTINATION.")
@click.option("--no-verify", is_flag=True, help="Do not read the output back.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no report.")
@_source_options
def merge(source: Path, destination: Path, **options: Any) -> None:
    """Write the full weights of SOURCE to DESTINATION.

    DESTINATION is one file if it ends in .safetensors, .pt, .bin or .pth, else a directory in
    Hugging Face form.
    """
    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    chosen = _merge_options(options)
    show = sys.stderr is not None and sys.stderr.isatty() and not quiet
    report = run_merge(source, destination, chosen, _bar if show else None)
    if not quiet or as_json:
        _print(report, as_json=as_json)


def _merge_options(options: dict[str, Any]) -> MergeOptions:
    """The options as `MergeOptions` has them."""
    options.pop("verbose")
    edits = keys.Edits(
        strip_wrappers=not options.pop("no_strip"),
        rename=[_rename(text) for text in options.pop("rename")],
        include=options.pop("include"),
        exclude=options.pop("exclude"),
    )
    return MergeOptions(
        edits=edits,
        verify=not options.pop("no_verify"),
        max_shard_bytes=units.parse_bytes(options.pop("max_shard_size"), "--max-shard-size"),
        max_memory_bytes=units.parse_bytes(options.pop("max_memory"), "--max-memory"),
        **options,
    )


def _rename(text: str) -> tuple[str, str]:
    pattern, separator, replacement = text.partition("=")
    if not separator or not pattern:
        raise UsageError(f"--rename {text}", "must be REGEX=REPLACEMENT")
    return pattern, replacement


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, leave=False) as bar:
        yield bar.update


def _print(result: Any, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, default=str))
        return
    for line in result.lines():
        click.echo(line)


if __name__ == "__main__":
    main()
