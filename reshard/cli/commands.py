"""The commands: each calls a function of `reshard.commands` with its options, and reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from reshard.cli.options import PATH, Group
from reshard.cli.run import (
    pop_options,
    print_message,
    run_reader,
    run_writer,
    show_program,
    show_result,
)
from reshard.version import __version__

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --world_size, too
    "max_content_width": 100,
}
_sources = click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=PATH)
_source = click.argument("source", type=PATH)
_destination = click.argument("destination", type=PATH)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
_quiet = click.option("-q", "--quiet", is_flag=True, help="Print no progress and no report.")
_verbose = click.option("-v", "--verbose", is_flag=True, help="Show more lines, and tracebacks.")


def _reported(function: Callable[..., None]) -> Callable[..., None]:
    return _json(_quiet(_verbose(function)))


@click.group(cls=Group, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="reshard")
def cli() -> None:
    """Reshard training checkpoints, without a GPU, a process group or the framework."""


@cli.command(
    declared="InspectOptions",
    examples=[
        ("reshard inspect run/", "format, step, ranks, optimizer"),
        ("reshard inspect run/ --tensors", "every tensor"),
    ],
)
@_sources
@_json
@_verbose
def inspect(sources: tuple[Path, ...], as_json: bool, **values: Any) -> None:
    """Describe the checkpoint SOURCE.

    Only headers are read. Pass several directories if each node stored its own files.
    """
    from reshard.commands.inspect import inspect as run

    show_result(run(sources, pop_options(values)), as_json=as_json)


@cli.command(
    declared="MergeOptions",
    examples=[
        ("reshard merge run/ model/", "a Hugging Face directory"),
        ("reshard merge run/ model.safetensors --dtype fp32", "one file"),
        ("reshard merge run/ model/ --tag global_step500", "an older checkpoint"),
        ("reshard merge run/ model/ --merge-lora BASE", "a LoRA run, into its base"),
    ],
)
@_sources
@_destination
@_reported
def merge(sources: tuple[Path, ...], destination: Path, **values: Any) -> None:
    """Write the full weights of SOURCE to DESTINATION.

    Pass several directories if each node stored its own files. DESTINATION is one file if its name
    ends in .safetensors, .pt, .bin or .pth, a commit to the Hub if it is hf://ORG/NAME, else a
    directory in Hugging Face format.
    """
    from reshard.commands.merge.command import merge as run

    run_writer(run, sources, destination, **values)


@cli.command(
    declared="AverageOptions",
    examples=[
        ("reshard average run/ model/ --last 5", "the newest five of a run"),
        ("reshard average run/ model/ --last 10 --ema 0.8", "a moving average"),
        ("reshard average a/ b/ model/ --weights 0.3,0.7", "a weighted mean"),
        ("reshard average run/ dcp/ --last 5 --to dcp", "in a layout of split"),
    ],
)
@_sources
@_destination
@_reported
def average(sources: tuple[Path, ...], destination: Path, **values: Any) -> None:
    """Write the mean of the weights of several checkpoints.

    Each SOURCE is a checkpoint, of any layout. DESTINATION is as in merge, or with --to as in
    convert. With --last N, SOURCE is the directory of a run, and its newest N checkpoints are
    averaged.
    """
    from reshard.commands.average.command import average as run

    run_writer(run, sources, destination, **values)


@cli.command(
    declared="SplitOptions",
    examples=[
        ("reshard split run/ run8/ --world-size 8", "the same layout for 8 ranks"),
        ("reshard split megatron/ grid/ --tp 4 --pp 2", "another grid of ranks"),
    ],
)
@_sources
@_destination
@_reported
def split(sources: tuple[Path, ...], destination: Path, **values: Any) -> None:
    """Write a training state for other ranks.

    The state of SOURCE, with its optimizer, is written to DESTINATION. Pass several directories if
    each node stored its own files.
    """
    _split(sources, destination, **values)


@cli.command(
    declared="SplitOptions",
    required=["to"],
    examples=[
        ("reshard convert run/ dcp/ --to dcp", "DeepSpeed to DCP"),
        ("reshard convert fsdp/ zero/ --to deepspeed --zero-stage 3", "FSDP to DeepSpeed"),
        (
            "reshard convert model/ megatron/ --to megatron --tp 2 --init-optimizer none",
            "from a Hugging Face model",
        ),
    ],
)
@_sources
@_destination
@_reported
def convert(sources: tuple[Path, ...], destination: Path, **values: Any) -> None:
    """Write a training state in another layout.

    The state of SOURCE, with its optimizer, is written to DESTINATION: a directory, or with --to
    torch one file if its name ends in .pt, .bin or .pth. Pass several directories if each node
    stored its own files.
    """
    _split(sources, destination, **values)


@cli.command(
    declared="DiffOptions",
    examples=[
        ("reshard diff run/ run8/", "are they the same training state?"),
        ("reshard diff model/ run/ --dtype bf16", "as if cast"),
    ],
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@_reported
def diff(a: Path, b: Path, **values: Any) -> None:
    """Check whether two checkpoints are the same.

    A and B may have different layouts; all of the training state is compared. The exit code is 0 if
    they are the same, 1 if not.
    """
    from reshard.commands.diff import diff as run

    run_reader(run, a, b, **values)


@cli.command(
    declared="VerifyOptions",
    examples=[
        ("reshard verify run/", "headers alone"),
        ("reshard verify run/ --deep", "every byte"),
        ("reshard verify run/ --history", "all checkpoints of a run, one after another"),
        ("reshard verify run/ --write-manifest run.json", "keep digests for later"),
    ],
)
@_sources
@_reported
def verify(sources: tuple[Path, ...], **values: Any) -> None:
    """Check whether the checkpoint SOURCE is complete and sound.

    With --history, check that each checkpoint of the run SOURCE is what training made of the one
    before. The exit code is 0 if all checks pass, 1 if something is missing or different, 3 if a
    file is corrupt, 5 if a file is unsafe.
    """
    from reshard.commands.verify.command import verify as run

    run_reader(run, sources, **values)


@cli.command(
    "resume-check",
    declared="ResumeCheckOptions",
    examples=[
        ("reshard resume-check run/ --world-size 2 --world-size 8", "with our trainer"),
        ('reshard resume-check run/ --world-size 2 --command "..."', "with your program"),
    ],
)
@_source
@_reported
def resume_check(source: Path, quiet: bool, **values: Any) -> None:
    """Check that training continues identically after a split.

    A program continues from SOURCE and from each layout that split makes of it; the losses are
    compared. The exit code is 0 if every layout reaches the required level, 1 if one does not, and
    6 if a program did not run to its end, so that nothing is known.
    """
    from reshard.commands.resume_check.command import resume_check as run

    def run_with_messages(source: Path, chosen: Any, meter: Any) -> Any:
        if quiet:
            return run(source, chosen)
        return run(source, chosen, meter, print_message if meter else None, show_program)

    run_reader(run_with_messages, source, quiet=quiet, **values)


@cli.command(
    declared="PlanOptions",
    examples=[
        ("reshard plan --params 7B --gpus 8x80GB", "any model of 7 billion parameters"),
        ("reshard plan --model config.json --gpus 8x80GB --nodes 2", "a configuration"),
        (
            "reshard plan run/ --gpus 4x24GB --strategy zero3 --write ds_config.json",
            "a checkpoint, elsewhere",
        ),
    ],
)
@click.argument("sources", metavar="[SOURCE]...", nargs=-1, type=PATH)
@_reported
def plan(sources: tuple[Path, ...], **values: Any) -> None:
    """Forecast the memory of each strategy and recommend one.

    The model is --model, --params, or that of the checkpoint SOURCE. Nothing is read but configs
    and headers. The exit code is 0 if the recommended strategy fits, 1 if none does.
    """
    from reshard.commands.plan.command import plan as run

    def run_at_once(paths: tuple[Path, ...], chosen: Any, _meter: Any) -> Any:
        return run(paths or None, chosen)

    run_reader(run_at_once, sources, **values)


@cli.command(
    declared="FilesOptions",
    examples=[
        ("reshard mount run/ model/", "a Hugging Face directory"),
        ("reshard mount run/ dcp/ --to dcp", "for torch.distributed.checkpoint"),
    ],
)
@_sources
@click.argument("directory", type=PATH)
@_verbose
def mount(sources: tuple[Path, ...], directory: Path, **values: Any) -> None:
    """Show the files of SOURCE in DIRECTORY, without writing them.

    By default they are those of a merge to a directory in Hugging Face format. Nothing is written:
    every byte is computed when a program reads it. DIRECTORY must be empty. Runs until Ctrl-C, or
    until DIRECTORY is unmounted.
    """
    from reshard.commands.mount import mount as run

    run(sources, directory, pop_options(values), print_message)


@cli.command(examples=[("reshard demo --keep files/", "and look at the files afterwards")])
@click.option("--keep", type=PATH, metavar="DIR", help="Keep all files in DIR.")
@_verbose
def demo(keep: Path | None, verbose: bool) -> None:  # noqa: ARG001 - `main` reads it from sys.argv
    """Train, merge and split a tiny model.

    It trains on 4 ranks, generates text, and continues on 2 ranks and with FSDP 2. The exit code is
    0 if the losses equal those of the uninterrupted run, 1 if not.
    """
    from reshard.commands.demo import demo as run

    raise click.exceptions.Exit(0 if run(keep, click.echo, show_program) else 1)


def _split(sources: tuple[Path, ...], destination: Path, **values: Any) -> None:
    from reshard.commands.split.command import split as run

    run_writer(run, sources, destination, **values)
