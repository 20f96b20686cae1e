"""The commands: each parses its options, calls a function of `reshard.commands`, and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reshard import units
from reshard.cli import layout, options
from reshard.cli.run import read, say, show_programs, show_result, write
from reshard.cli.sections import Group, section
from reshard.errors import UsageError
from reshard.version import __version__

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}
_weights, _names, _files = section("Weights"), section("Names"), section("Files")
_compared, _checked, _runs = section("Comparison"), section("Checks"), section("Runs")


@click.group(cls=Group, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="reshard")
def cli() -> None:
    """Reshard training checkpoints, without a GPU, a process group or the framework."""


@cli.command()
@options.sources
@options.page
@click.option("--tensors", is_flag=True, help="List the tensors, with repeated layers folded.")
@options.source
def inspect(
    sources: tuple[Path, ...],
    source_format: str | None,
    as_json: bool,
    verbose: bool,  # noqa: ARG001 - `main` reads it from sys.argv
    **values: Any,
) -> None:
    """Describe the checkpoint SOURCE.

    Only headers are read. Pass several directories if each node stored its own files.
    """
    from reshard.commands.inspect import inspect as run

    show_result(run(sources, force=source_format, **values), as_json=as_json)


@cli.command()
@options.sources
@options.destination
@_weights("--dtype", help="bf16, fp16, fp32 or keep (as stored).  [default: as trained]")
@_weights(
    "--keep-fp32",
    multiple=True,
    metavar="REGEX",
    help="Write weights with a matching name as fp32.",
)
@_weights(
    "--tied",
    type=click.Choice(["auto", "keep", "drop"]),
    default="auto",
    show_default=True,
    help="Further names of tied weights; auto drops those with equal values.",
)
@_weights(
    "--fill-missing-from",
    type=options.PATH,
    help="Model that supplies weights missing from the checkpoint (frozen ones that were not"
    " saved).",
)
@_weights(
    "--adapter",
    metavar="NAME",
    help="Write only this LoRA adapter, as PEFT loads it; an unnamed one is called default.",
)
@_weights("--keep-padding", is_flag=True, help="Keep padding rows of the embedding.")
@_names(
    "--names",
    type=click.Choice(["source", "hf"]),
    help="Naming scheme of the weights.  [default: source; hf for a directory made of a Megatron"
    " or Meta model]",
)
@options.family
@options.vocab_size
@_names("--no-strip", is_flag=True, help="Keep wrapper prefixes such as module. in names.")
@_names(
    "--rename",
    multiple=True,
    metavar="REGEX=REPL",
    help="Rename tensors; repeat for several rules.",
)
@_names(
    "--include", multiple=True, metavar="REGEX", help="Write only tensors with a matching name."
)
@_names("--exclude", multiple=True, metavar="REGEX", help="Leave out tensors with a matching name.")
@_files(
    "--max-shard-size", default="5GB", show_default=True, help="Maximum size of each weights file."
)
@_files(
    "--hf-dir",
    type=options.PATH,
    help="Copy config, tokenizer... from this model.  [default: files beside SOURCE]",
)
@options.output
@options.source
def merge(sources: tuple[Path, ...], destination: Path, **values: Any) -> None:
    """Write the full weights of SOURCE to DESTINATION.

    Pass several directories if each node stored its own files. DESTINATION is one file if its name
    ends in .safetensors, .pt, .bin or .pth, else a directory in Hugging Face format.
    """
    from reshard import keys
    from reshard.commands.merge.command import merge as run
    from reshard.commands.merge.options import MergeOptions

    edits = keys.Edits(
        strip_wrappers=not values.pop("no_strip"),
        rename=[_rename(text) for text in values.pop("rename")],
        include=values.pop("include"),
        exclude=values.pop("exclude"),
    )
    shard = units.parse_bytes(values.pop("max_shard_size"), "--max-shard-size")
    write(run, MergeOptions, sources, destination, edits=edits, max_shard_bytes=shard, **values)


@cli.command()
@layout.resharding(layout.to())
def split(sources: tuple[Path, ...], destination: Path, **values: Any) -> None:
    """Write a training state for other ranks.

    The state of SOURCE, with its optimizer, is written to DESTINATION. Pass several directories if
    each node stored its own files.
    """
    _split(sources, destination, **values)


@cli.command()
@layout.resharding(layout.to(required=True))
def convert(sources: tuple[Path, ...], destination: Path, **values: Any) -> None:
    """Write a training state in another layout.

    The state of SOURCE, with its optimizer, is written to DESTINATION: a directory, or with --to
    torch one file if its name ends in .pt, .bin or .pth. Pass several directories if each node
    stored its own files.
    """
    _split(sources, destination, **values)


@cli.command()
@click.argument("a", type=options.PATH)
@click.argument("b", type=options.PATH)
@_compared("--atol", default=0.0, help="Absolute tolerance.")
@_compared("--rtol", default=0.0, help="Tolerance relative to B.")
@_compared("--ulp", default=0, help="Tolerance in units in the last place.")
@_compared("--exact", is_flag=True, help="Require equal bits.  [default]")
@_compared("--dtype", help="Cast weights to bf16, fp16 or fp32 before comparing.")
@_compared(
    "--ignore", multiple=True, metavar="REGEX", help="Leave out tensors with a matching name."
)
@_compared(
    "--kind",
    "kinds",
    multiple=True,
    help="Compare only weights, optimizer, train, or a slot such as exp_avg.  [default: all]",
)
@options.budget
@options.page
@click.option("-q", "--quiet", is_flag=True, help="Exit code only.")
@options.source
def diff(a: Path, b: Path, *, exact: bool, **values: Any) -> None:
    """Check whether two checkpoints are the same.

    A and B may have different layouts; all of the training state is compared. The exit code is 0 if
    they are the same, 1 if not.
    """
    if exact and any(values[name] for name in ("atol", "rtol", "ulp")):
        raise UsageError("--exact", "excludes --atol, --rtol and --ulp")
    from reshard.commands.diff import DiffOptions
    from reshard.commands.diff import diff as run

    read(run, DiffOptions, a, b, **values)


@cli.command()
@options.sources
@_checked("--deep/--quick", default=False, help="Read every byte.  [default: only headers]")
@_checked(
    "--write-manifest",
    type=options.PATH,
    metavar="FILE",
    help="Write the SHA-256 of every tensor, if all checks pass.",
)
@_checked(
    "--against",
    type=options.PATH,
    metavar="FILE",
    help="Compare with such a manifest, made from any layout.",
)
@_checked(
    "--overwrite", is_flag=True, help="Replace an existing file of --write-manifest or --html."
)
@options.html
@_checked(
    "--ignore",
    multiple=True,
    metavar="REGEX",
    help="Accept any values (NaN, infinities, zeros) in tensors with a matching name.",
)
@options.budget
@click.option("-q", "--quiet", is_flag=True, help="Exit code only.")
@options.source
def verify(sources: tuple[Path, ...], **values: Any) -> None:
    """Check whether the checkpoint SOURCE is complete and sound.

    The exit code is 0 if all checks pass, 1 if something is missing or different, 3 if a file is
    corrupt, 5 if a file is unsafe.
    """
    from reshard.commands.verify import VerifyOptions
    from reshard.commands.verify import verify as run

    read(run, VerifyOptions, sources, **values)


@cli.command("resume-check")
@click.argument("source", type=options.PATH)
@_runs(
    "--world-size",
    "--num-shards",
    "world_sizes",
    multiple=True,
    type=click.IntRange(min=1),
    help="Number of ranks to continue on; repeatable.  [default: same as the source]",
)
@_runs(
    "--to",
    multiple=True,
    type=options.TARGET,
    help="Layout; repeatable.  [default: same as the source]",
)
@_runs("--steps", default=4, show_default=True, help="Number of steps of each run.")
@_runs(
    "--command",
    metavar="WORDS",
    help="Your program, with {checkpoint}, {log}, {steps} or {until}, {world_size}, {out}."
    "  [default: python -m trainer]",
)
@_runs(
    "--require",
    type=options.OneOf("reshard.commands.resume_check.report", "LEVELS"),
    default="trajectory",
    show_default=True,
    help="Level that every layout must reach for exit code 0.",
)
@_runs(
    "--rtol",
    default=1e-3,
    show_default=True,
    help="Relative tolerance of losses for the level trajectory.",
)
@_runs(
    "--unbroken",
    type=options.PATH,
    metavar="LOG",
    help="Log of the run that saved SOURCE and continued.  [default: continue from SOURCE now]",
)
@_runs("--control", is_flag=True, help="Also check that a lost optimizer would be noticed.")
@_runs(
    "--timeout",
    "timeout_s",
    default=3600.0,
    show_default=True,
    help="Time limit of each run, in seconds.",
)
@_runs(
    "--keep",
    type=options.PATH,
    metavar="DIR",
    help="Keep checkpoints, logs and outputs in DIR.",
)
@layout.layout
@options.page
@options.budget
@click.option("-q", "--quiet", is_flag=True, help="Exit code only.")
@options.source
def resume_check(source: Path, **values: Any) -> None:
    """Check that training continues identically after a split.

    A program continues from SOURCE and from each layout that split makes of it; the losses are
    compared. The exit code is 0 if every layout reaches the required level, 1 if one does not, and
    6 if a program did not run to its end, so that nothing is known.
    """
    from reshard.commands.resume_check.command import resume_check as run
    from reshard.commands.resume_check.options import ResumeCheckOptions

    quiet = values["quiet"]

    def run_with_messages(source: Path, chosen: ResumeCheckOptions, meter: Any) -> Any:
        if quiet:
            return run(source, chosen)
        with show_programs() as watch:
            return run(source, chosen, meter, say if meter else None, watch)

    read(run_with_messages, ResumeCheckOptions.of, source, **values)


@cli.command()
@click.option(
    "--keep",
    type=options.PATH,
    metavar="DIR",
    help="Keep all files in DIR.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
def demo(keep: Path | None, verbose: bool) -> None:  # noqa: ARG001 - `main` reads it from sys.argv
    """Train, merge and split a tiny model.

    It trains on 4 ranks, generates text, and continues on 2 ranks and with FSDP 2. The exit code is
    0 if the losses equal those of the uninterrupted run, 1 if not.
    """
    from reshard.commands.demo import demo as run

    raise click.exceptions.Exit(0 if run(keep, click.echo) else 1)


def _split(sources: tuple[Path, ...], destination: Path, **values: Any) -> None:
    from reshard.commands.split.command import split as run
    from reshard.commands.split.options import SplitOptions

    write(run, SplitOptions, sources, destination, **values)


def _rename(text: str) -> tuple[str, str]:
    pattern, separator, replacement = text.partition("=")
    if not separator or not pattern:
        raise UsageError(f"--rename {text}", "must be REGEX=REPLACEMENT")
    return pattern, replacement
