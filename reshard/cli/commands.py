"""The commands: each takes its options, calls one of `reshard.commands`, and shows the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reshard import units
from reshard.cli import layout, options
from reshard.cli.run import read, say, show_result, write
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
@click.option("--tensors", is_flag=True, help="List the tensors, repeated layers folded.")
@options.source
def inspect(
    sources: tuple[Path, ...],
    source_format: str | None,
    as_json: bool,
    verbose: bool,  # noqa: ARG001 - main has seen it
    **given: Any,
) -> None:
    """Say what the checkpoint SOURCE is; reads headers only.

    Give several directories where each node kept its own files.
    """
    from reshard.commands.inspect import inspect as run

    show_result(run(sources, force=source_format, **given), as_json=as_json)


@cli.command()
@options.sources
@options.destination
@_weights("--dtype", help="bf16, fp16, fp32 or keep (as stored).  [default: as trained]")
@_weights("--keep-fp32", multiple=True, metavar="REGEX", help="Weights that are written as fp32.")
@_weights(
    "--tied",
    type=click.Choice(["auto", "keep", "drop"]),
    default="auto",
    show_default=True,
    help="Second names of tied weights; auto drops those that are equal.",
)
@_weights(
    "--fill-missing-from",
    type=options.PATH,
    help="Model from which weights come that the checkpoint lacks (frozen ones that were not"
    " saved).",
)
@_weights(
    "--adapter",
    metavar="NAME",
    help="A LoRA adapter alone, as PEFT loads it; PEFT calls one that nobody named default.",
)
@_weights("--keep-padding", is_flag=True, help="Keep the vocabulary's rows that are no words.")
@_names(
    "--names",
    type=click.Choice(["source", "hf"]),
    help="Whose names weights get.  [default: the source's; Hugging Face's, of Megatron's and"
    " Meta's models in a directory]",
)
@options.family
@options.vocab_size
@_names("--no-strip", is_flag=True, help="Keep wrapper prefixes such as module. in names.")
@_names("--rename", multiple=True, metavar="REGEX=REPL", help="Applied in the order given.")
@_names("--include", multiple=True, metavar="REGEX", help="Only tensors so named.")
@_names("--exclude", multiple=True, metavar="REGEX", help="All but tensors so named.")
@_files("--max-shard-size", default="5GB", show_default=True, help="Largest file of a directory.")
@_files(
    "--hf-dir",
    type=options.PATH,
    help="Model whose config, tokenizer... to copy.  [default: what lies beside SOURCE]",
)
@options.output
@options.source
def merge(sources: tuple[Path, ...], destination: Path, **given: Any) -> None:
    """Write the full weights of SOURCE to DESTINATION.

    Give several directories where each node kept its own files. DESTINATION is one file if it ends
    in .safetensors, .pt, .bin or .pth, else a directory in Hugging Face form.
    """
    from reshard import keys
    from reshard.commands.merge.command import merge as run
    from reshard.commands.merge.options import MergeOptions

    edits = keys.Edits(
        strip_wrappers=not given.pop("no_strip"),
        rename=[_rename(text) for text in given.pop("rename")],
        include=given.pop("include"),
        exclude=given.pop("exclude"),
    )
    shard = units.parse_bytes(given.pop("max_shard_size"), "--max-shard-size")
    write(run, MergeOptions, sources, destination, edits=edits, max_shard_bytes=shard, **given)


@cli.command()
@layout.resharding(layout.to())
def split(sources: tuple[Path, ...], destination: Path, **given: Any) -> None:
    """Write a training state for other ranks, optimizer and all.

    SOURCE's is written to DESTINATION. Give several directories where each node kept its own files.
    """
    _split(sources, destination, **given)


@cli.command()
@layout.resharding(layout.to(required=True))
def convert(sources: tuple[Path, ...], destination: Path, **given: Any) -> None:
    """Write a training state in another layout, optimizer and all.

    SOURCE's is written to DESTINATION: a directory, or with --to torch one file if it ends in .pt,
    .bin or .pth. Give several directories where each node kept its own files.
    """
    _split(sources, destination, **given)


@cli.command()
@click.argument("a", type=options.PATH)
@click.argument("b", type=options.PATH)
@_compared("--atol", default=0.0, help="Absolute distance that is allowed.")
@_compared("--rtol", default=0.0, help="Distance that is allowed, relative to B.")
@_compared("--ulp", default=0, help="Representable numbers that may lie between A and B.")
@_compared("--exact", is_flag=True, help="Only equal bits are equal.  [default]")
@_compared("--dtype", help="Compare weights as if cast to bf16, fp16 or fp32.")
@_compared("--ignore", multiple=True, metavar="REGEX", help="Names to leave out.")
@_compared(
    "--kind",
    "kinds",
    multiple=True,
    help="weights, optimizer, train, or a slot such as exp_avg.  [default: all]",
)
@options.budget
@options.page
@click.option("-q", "--quiet", is_flag=True, help="Exit code only.")
@options.source
def diff(a: Path, b: Path, *, exact: bool, **given: Any) -> None:
    """Say whether two checkpoints are the same training state.

    A and B may be of any layouts. Exit code 0 if they are, 1 if not.
    """
    if exact and any(given[name] for name in ("atol", "rtol", "ulp")):
        raise UsageError("--exact", "allows no distance: leave out --atol, --rtol and --ulp")
    from reshard.commands.diff import DiffOptions
    from reshard.commands.diff import diff as run

    read(run, DiffOptions, a, b, **given)


@cli.command()
@options.sources
@_checked("--deep/--quick", default=False, help="Read every byte.  [default: headers alone]")
@_checked(
    "--write-manifest",
    type=options.PATH,
    metavar="FILE",
    help="Write what every tensor holds (SHA-256), if all checks pass.",
)
@_checked(
    "--against",
    type=options.PATH,
    metavar="FILE",
    help="Compare with a manifest, made from any layout.",
)
@_checked("--overwrite", is_flag=True, help="Replace the file of --write-manifest or --html.")
@options.html
@_checked(
    "--ignore",
    multiple=True,
    metavar="REGEX",
    help="Tensors so named may hold anything: NaN, infinities, zeros.",
)
@options.budget
@click.option("-q", "--quiet", is_flag=True, help="Exit code only.")
@options.source
def verify(sources: tuple[Path, ...], **given: Any) -> None:
    """Say whether the checkpoint SOURCE can be trusted.

    Exit code 0 if all checks pass, 1 if something is missing or different, 3 if a file is corrupt,
    5 if one is unsafe.
    """
    from reshard.commands.verify import VerifyOptions
    from reshard.commands.verify import verify as run

    read(run, VerifyOptions, sources, **given)


@cli.command("resume-check")
@click.argument("source", type=options.PATH)
@_runs(
    "--world-size",
    "--num-shards",
    "world_sizes",
    multiple=True,
    type=click.IntRange(min=1),
    help="Ranks to go on with; may be given again.  [default: as the source]",
)
@_runs(
    "--to",
    multiple=True,
    type=options.TARGET,
    help="Layout; may be given again.  [default: as the source]",
)
@_runs("--steps", default=4, show_default=True, help="Steps that each run goes on for.")
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
    help="What every layout must reach for exit code 0.",
)
@_runs(
    "--rtol", default=1e-3, show_default=True, help="Of losses, for the trajectory to be the same."
)
@_runs(
    "--unbroken",
    type=options.PATH,
    metavar="LOG",
    help="Log of the run that saved SOURCE and went on.  [default: go on from SOURCE now]",
)
@_runs("--control", is_flag=True, help="Also show that a lost optimizer would have been noticed.")
@_runs("--timeout", "timeout_s", default=3600.0, show_default=True, help="Seconds, of each run.")
@_runs(
    "--keep",
    type=options.PATH,
    metavar="DIR",
    help="Leave the checkpoints, logs and outputs there.",
)
@layout.layout
@options.page
@options.budget
@click.option("-q", "--quiet", is_flag=True, help="Exit code only.")
@options.source
def resume_check(source: Path, **given: Any) -> None:
    """Say whether training goes on the same after a split.

    A program goes on from SOURCE and from each layout that split makes of it; their losses are
    compared. Exit code 0 if every layout reaches what is required, 1 if not.
    """
    from reshard.commands.resume_check.command import resume_check as run
    from reshard.commands.resume_check.options import ResumeCheckOptions

    def told(source: Path, chosen: ResumeCheckOptions, meter: Any) -> Any:
        return run(source, chosen, meter, say if meter else None)

    read(told, ResumeCheckOptions.of, source, **given)


@cli.command()
@click.option(
    "--keep",
    type=options.PATH,
    metavar="DIR",
    help="Leave everything that is made there.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
def demo(keep: Path | None, verbose: bool) -> None:  # noqa: ARG001 - main has seen it
    """Train a tiny model, merge it, split it, and go on from that.

    It is trained at 4 ranks; it generates, and goes on at 2 ranks and under FSDP 2.

    Exit code 0 if the losses are those of the unbroken run, 1 if not.
    """
    from reshard.commands.demo import demo as run

    raise click.exceptions.Exit(0 if run(keep, click.echo) else 1)


def _split(sources: tuple[Path, ...], destination: Path, **given: Any) -> None:
    from reshard.commands.split.command import split as run
    from reshard.commands.split.options import SplitOptions

    write(run, SplitOptions, sources, destination, **given)


def _rename(text: str) -> tuple[str, str]:
    pattern, separator, replacement = text.partition("=")
    if not separator or not pattern:
        raise UsageError(f"--rename {text}", "must be REGEX=REPLACEMENT")
    return pattern, replacement
