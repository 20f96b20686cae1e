"""The command line: parse, call, print. Results on stdout, progress and messages on stderr.

Exit codes: 0 done; 1 checked and different, or incomplete; 2 usage or unrecognised; 3 corrupt
input; 4 not enough memory or disk; 5 refused as unsafe; 70 a bug of ours; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import click

from reshard import units
from reshard.errors import ReshardError, UsageError
from reshard.paths import as_path
from reshard.signals import ENDING
from reshard.version import __version__

if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # which takes no parameter before click 8.4

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}


def main() -> NoReturn:
    """Run the command line; every failure is one message and a documented exit code."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _interrupt)
    try:
        code = cli(standalone_mode=False) or 0  # an int where a command ended with its own code
    except BaseException as error:  # noqa: BLE001 - nothing leaves without its message and code
        if "-v" in sys.argv or "--verbose" in sys.argv:
            import traceback

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
        return _fail(*error.lines, code=error.exit_code)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        told = error.__cause__ if isinstance(error, click.Abort) else error
        return _fail("; ".join(["interrupted", *map(str, told.args if told else ())]), code=130)
    if isinstance(error, SystemExit):  # click's way to say that the reader of stdout has gone
        return 0
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, MemoryError):
        lacking = "out of memory; give a smaller --max-memory or fewer --workers"
        return _fail("; ".join([lacking, *map(str, error.args)]), code=4)
    if isinstance(error, OSError):
        return _fail(f"{error.filename or 'system'}: {error.strerror or error}", code=2)
    return _fail(f"a bug in reshard ({type(error).__name__}: {error}); -v shows where", code=70)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    """End with the cleaning-up done; a second signal must not end that."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _fail(first: str, *more: str, code: int) -> int:
    for line in (f"reshard: {first}", *more):
        _say(line)
    return code


class _OneOf(_Choice):
    """One of some words, which are asked for no sooner than needed: their modules take time."""

    def __init__(self, words: Callable[[], Sequence[str]]) -> None:
        super().__init__(())
        del self.choices
        self._words = words

    def __getattr__(self, name: str) -> Any:
        if name != "choices":
            raise AttributeError(name)
        self.choices = tuple(self._words())
        return self.choices


class _Where(click.Path):
    """A path of this machine, or a URL."""

    def convert(
        self, value: Any, _param: click.Parameter | None, _context: click.Context | None
    ) -> Any:
        """As every layer below takes it."""
        return as_path(value)


_PATH = _Where()


def _sources_known() -> Sequence[str]:
    from reshard import formats

    return formats.NAMES


def _targets_known() -> Sequence[str]:
    from reshard.formats import targets

    return targets.NAMES


def _state_dict_types() -> Sequence[str]:
    from reshard.formats.targets import request

    return request.STATE_DICT_TYPES


def _beginnings() -> Sequence[str]:
    from reshard.formats import groups

    return get_args(groups.InitOptimizer)


def _rng_policies() -> Sequence[str]:
    from reshard.formats import rng

    return get_args(rng.Policy)


def _megatron_forms() -> Sequence[str]:
    from reshard.formats.megatron.target import choice

    return choice.FORMS


def _megatron_adams() -> Sequence[str]:
    from reshard.formats.megatron.target import choice

    return choice.ADAMS


def _megatron_extra_states() -> Sequence[str]:
    from reshard.formats.megatron.target import choice

    return choice.EXTRA_STATES


def _megatron_impls() -> Sequence[str]:
    from reshard.formats.megatron.target import choice

    return choice.IMPLS


def _levels() -> Sequence[str]:
    from reshard.commands.resume_check import report

    return report.LEVELS


@click.group(context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="reshard")
def cli() -> None:
    """Reshard training checkpoints, without a GPU, a process group or the framework."""


_vocab_size = click.option(
    "--vocab-size", type=click.IntRange(min=1), help="Rows that are words, not padding."
)


_family = click.option(
    "--family", help="Which of Hugging Face's models it is: llama, mistral, qwen2, ..."
)


def _source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say how a source is read; the same for every command."""
    for option in (
        click.option("-v", "--verbose", is_flag=True, help="Show tracebacks."),
        click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout."),
        click.option(
            "--rules",
            type=_PATH,
            metavar="FILE",
            help="YAML: how parameters are cut that no table knows, and what others call them.",
        ),
        click.option("--wrap", help="How FSDP 1 wrapped --model: CLASS[,CLASS], size=N or none."),
        click.option("--model", help="config.json, its directory, or module:factory."),
        click.option("--key", help="State dict, where SOURCE holds several; dotted."),
        click.option("--tag", "--step", "tag", help="Checkpoint of a run directory."),
        click.option(
            "--from", "source_format", type=_OneOf(_sources_known), help="Skip detection."
        ),
    ):
        command = option(command)
    return command


_sources = click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=_PATH)


def _html_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Of every command whose report can be a page."""
    return click.option(
        "--html",
        type=_PATH,
        metavar="FILE",
        help="Also write the report as a page that needs only a browser.",
    )(command)


def _page_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same of commands that write nothing else."""
    return _html_option(
        click.option("--overwrite", is_flag=True, help="Replace the file of --html.")(command)
    )


@cli.command()
@_sources
@_page_options
@click.option("--tensors", is_flag=True, help="List the tensors, repeated layers folded.")
@_source_options
def inspect(
    sources: tuple[Path, ...],
    source_format: str | None,
    as_json: bool,
    verbose: bool,  # noqa: ARG001 - main has seen it
    **options: Any,
) -> None:
    """Say what the checkpoint SOURCE is; reads headers only.

    Give several directories where each node kept its own files.
    """
    from reshard.commands.inspect import inspect as run

    _print(run(sources, force=source_format, **options), as_json=as_json)


def _budget_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say what reading tensors may take, and trust."""
    for option in (
        click.option(
            "--max-memory",
            default="256MiB",
            show_default=True,
            help="For the buffers of all workers.",
        ),
        click.option("--workers", default=0, help="Threads; the output does not depend on it."),
        click.option(
            "--allow-pickle",
            multiple=True,
            metavar="NAME",
            help="Accept an unknown class (never run).",
        ),
    ):
        command = option(command)
    return command


def _output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say how files are written; the same for every command that writes."""
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="No progress, no report."),
        click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
        click.option("--no-verify", is_flag=True, help="Do not read the output back."),
        click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped."),
        click.option("--overwrite", is_flag=True, help="Replace DESTINATION, and --html's file."),
        _html_option,
        _budget_options,
        click.option(
            "--replicas",
            type=click.Choice(["error", "first", "mean"]),
            default="error",
            show_default=True,
            help="Ranks that hold different values of one tensor: refused, the first, their mean.",
        ),
        click.option(
            "--on-overflow",
            type=click.Choice(["error", "clamp", "allow"]),
            default="error",
            show_default=True,
            help="When a finite value would become infinite.",
        ),
        click.argument("destination", type=_PATH),
    ):
        command = option(command)
    return command


@cli.command()
@_sources
@_output_options
@click.option("--dtype", help="bf16, fp16, fp32 or keep (as stored).  [default: as trained]")
@click.option("--keep-fp32", multiple=True, metavar="REGEX", help="Weights to write as fp32.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Of a directory's files.")
@click.option("--hf-dir", type=_PATH, help="Model whose config, tokenizer... to copy.")
@click.option(
    "--names",
    type=click.Choice(["source", "hf"]),
    help="Whose.  [default: Hugging Face's, of Megatron's and Meta's models in a directory]",
)
@_family
@_vocab_size
@click.option("--keep-padding", is_flag=True, help="Keep the vocabulary's rows that are no words.")
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
@_source_options
def merge(sources: tuple[Path, ...], destination: Path, **options: Any) -> None:
    """Write the full weights of SOURCE to DESTINATION.

    Give several directories where each node kept its own files. DESTINATION is one file if it ends
    in .safetensors, .pt, .bin or .pth, else a directory in Hugging Face form.
    """
    from reshard import keys
    from reshard.commands.merge.command import MergeOptions
    from reshard.commands.merge.command import merge as run

    edits = keys.Edits(
        strip_wrappers=not options.pop("no_strip"),
        rename=[_rename(text) for text in options.pop("rename")],
        include=options.pop("include"),
        exclude=options.pop("exclude"),
    )
    shard = units.parse_bytes(options.pop("max_shard_size"), "--max-shard-size")
    _write(run, MergeOptions, sources, destination, edits=edits, max_shard_bytes=shard, **options)


def _parallel_options() -> Iterator[Callable[..., Any]]:
    for name, what in (
        ("dp", "Ranks that see different data.  [default: --world-size / (tp x pp)]"),
        ("ep", "Ranks that share a layer's experts.  [default: as is]"),
        ("pp", "Pipeline-parallel ranks.  [default: as is]"),
        ("tp", "Tensor-parallel ranks.  [default: as is]"),
    ):
        yield click.option(f"--{name}", type=click.IntRange(min=1), help=what)


def _megatron_options() -> Iterator[Callable[..., Any]]:
    yield click.option(
        "--make-vocab-size-divisible-by",
        type=click.IntRange(min=1),
        help="Times the tensor parallel size, as Megatron pads.  [default: as is, else 128]",
    )
    yield click.option(
        "--transformer-impl",
        type=_OneOf(_megatron_impls),
        help="Whose layers Megatron will have.  [default: as is, else transformer_engine]",
    )
    yield click.option(
        "--extra-state",
        type=_OneOf(_megatron_extra_states),
        help="Transformer Engine's own.  [default: keep, where they can be]",
    )
    yield click.option(
        "--adam",
        type=_OneOf(_megatron_adams),
        help="Whose state Megatron will load.  [default: as is, else fused]",
    )
    yield click.option(
        "--distributed-optimizer/--no-distributed-optimizer",
        default=None,
        help="Whether Megatron's will load it.  [default: as is]",
    )
    yield click.option(
        "--ckpt-format",
        type=_OneOf(_megatron_forms),
        help="Megatron's.  [default: as is, else torch]",
    )
    yield click.option(
        "--stage-layers", metavar="N,N,...", help="Of each pipeline stage.  [default: as many each]"
    )
    yield click.option("--vpp", type=click.IntRange(min=1), help="Model chunks of a pipeline rank.")


def _layout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say how a target is laid out, but for its name and its number of ranks."""
    for option in (
        click.option(
            "--tp-plan",
            type=_PATH,
            metavar="FILE",
            help="JSON, pattern -> colwise|rowwise|replicate|dim.  [default: the model's own plan]",
        ),
        click.option(
            "--mesh",
            metavar="NAME=SIZE,...",
            help="Of DTensor files: dp_shard=4,tp=2.  [default: one axis of all ranks]",
        ),
        click.option(
            "--names",
            type=click.Choice(["source", "hf"]),
            help="Whose.  [default: the source's; Megatron's for --to megatron]",
        ),
        _family,
        _vocab_size,
        *_megatron_options(),
        *_parallel_options(),
        click.option("--device", default="cuda", show_default=True, help="Of DTensor files' mesh."),
        click.option("--weights-only", is_flag=True, help="Leave the optimizer out."),
        click.option(
            "--init-optimizer",
            type=_OneOf(_beginnings),
            help="Where SOURCE has no optimizer: none, or an Adam of zeros at step 0.",
        ),
        click.option(
            "--param-groups",
            type=_PATH,
            metavar="FILE",
            help="JSON: param groups and hyper-parameters.  [default: as is]",
        ),
        click.option(
            "--dtype", help="Of the module's parameters: bf16, fp16 or fp32.  [default: as trained]"
        ),
        click.option(
            "--rng",
            type=_OneOf(_rng_policies),
            help="Random states of ranks.  [default: keep, where they can be]",
        ),
        click.option(
            "--zero-stage",
            type=click.IntRange(0, 3),
            help="Of DeepSpeed.  [default: as is]",
        ),
        click.option(
            "--state-dict-type",
            type=_OneOf(_state_dict_types),
            help="Of FSDP, or unsharded.  [default: as is, else sharded]",
        ),
        click.option("--rank-files", is_flag=True, help="Of FSDP: a file a rank, not DCP."),
        click.option(
            "--fsdp-version",
            type=click.IntRange(1, 2),
            default=2,
            show_default=True,
            help="Of verl's files; 1 needs --model and --wrap.",
        ),
        click.option(
            "--use-orig-params",
            metavar="DTYPE",
            help="FSDP 1 with the original parameters; DTYPE of its forward pass.",
        ),
    ):
        command = option(command)
    return command


def _split_options(command: Callable[..., Any]) -> Callable[..., Any]:
    size = click.option(
        "--world-size",
        "--num-shards",
        "world_size",
        type=click.IntRange(min=1),
        help="Ranks of the run to come.  [default: as the source]",
    )
    return size(_layout_options(command))


@cli.command()
@_sources
@_output_options
@click.option("--to", type=_OneOf(_targets_known), help="Layout.  [default: as the source]")
@_split_options
@_source_options
def split(sources: tuple[Path, ...], destination: Path, **options: Any) -> None:
    """Write the training state of SOURCE, optimizer and all, for another number of ranks."""
    from reshard.commands.split.command import split as run
    from reshard.commands.split.options import SplitOptions

    _write(run, SplitOptions, sources, destination, **options)


@cli.command()
@_sources
@_output_options
@click.option("--to", type=_OneOf(_targets_known), required=True, help="Layout.")
@_split_options
@_source_options
def convert(sources: tuple[Path, ...], destination: Path, **options: Any) -> None:
    """Write the training state of SOURCE, optimizer and all, in another layout."""
    from reshard.commands.split.command import split as run
    from reshard.commands.split.options import SplitOptions

    _write(run, SplitOptions, sources, destination, **options)


@cli.command()
@click.argument("a", type=_PATH)
@click.argument("b", type=_PATH)
@click.option("--atol", default=0.0, help="Absolute distance to allow.")
@click.option("--rtol", default=0.0, help="Distance to allow, relative to B.")
@click.option("--ulp", default=0, help="Representable numbers between A and B to allow.")
@click.option("--exact", is_flag=True, help="Only equal bits are equal.  [default]")
@click.option("--dtype", help="Compare weights as if cast to bf16, fp16 or fp32.")
@click.option("--ignore", multiple=True, metavar="REGEX", help="Names to leave out.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    help="weights, optimizer, train, or a slot such as exp_avg.  [default: all]",
)
@_budget_options
@_page_options
@click.option("-q", "--quiet", is_flag=True, help="Exit code only.")
@_source_options
def diff(a: Path, b: Path, *, exact: bool, **options: Any) -> None:
    """Say whether A and B are the same training state, in whatever layouts.

    Exit code 0 if they are, 1 if not.
    """
    if exact and any(options[name] for name in ("atol", "rtol", "ulp")):
        raise UsageError("--exact", "allows no distance: leave out --atol, --rtol and --ulp")
    from reshard.commands.diff import DiffOptions
    from reshard.commands.diff import diff as run

    _read(run, DiffOptions, a, b, **options)


@cli.command()
@_sources
@click.option("--deep/--quick", default=False, help="Read every byte.  [default: headers alone]")
@click.option(
    "--write-manifest",
    type=_PATH,
    metavar="FILE",
    help="Write what every tensor holds (SHA-256), if all checks pass.",
)
@click.option(
    "--against",
    type=_PATH,
    metavar="FILE",
    help="Compare with a manifest, made from any layout.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file of --write-manifest or --html.")
@_html_option
@click.option("--ignore", multiple=True, metavar="REGEX", help="Names whose values may be NaN ...")
@_budget_options
@click.option("-q", "--quiet", is_flag=True, help="Exit code only.")
@_source_options
def verify(sources: tuple[Path, ...], **options: Any) -> None:
    """Say whether the checkpoint SOURCE can be trusted.

    Exit code 0 if all checks pass, 1 if something is missing or different, 3 if a file is corrupt,
    5 if one is unsafe.
    """
    from reshard.commands.verify import VerifyOptions
    from reshard.commands.verify import verify as run

    _read(run, VerifyOptions, sources, **options)


@cli.command("resume-check")
@click.argument("source", type=_PATH)
@click.option(
    "--world-size",
    "--num-shards",
    "world_sizes",
    multiple=True,
    type=click.IntRange(min=1),
    help="Ranks to go on with; may be given again.  [default: as the source]",
)
@click.option(
    "--to",
    multiple=True,
    type=_OneOf(_targets_known),
    help="Layout; may be given again.  [default: as the source]",
)
@click.option("--steps", default=4, show_default=True, help="How far each run goes on.")
@click.option(
    "--command",
    metavar="WORDS",
    help="Your program, with {checkpoint}, {log}, {steps} or {until}, {world_size}, {out}."
    "  [default: python -m trainer]",
)
@click.option(
    "--require",
    type=_OneOf(_levels),
    default="trajectory",
    show_default=True,
    help="What every layout must reach for exit code 0.",
)
@click.option(
    "--rtol", default=1e-3, show_default=True, help="Of losses, for the trajectory to be the same."
)
@click.option(
    "--unbroken",
    type=_PATH,
    metavar="LOG",
    help="Log of the run that saved SOURCE and went on.  [default: go on from SOURCE now]",
)
@click.option(
    "--control", is_flag=True, help="Also show that a lost optimizer would have been noticed."
)
@click.option(
    "--timeout", "timeout_s", default=3600.0, show_default=True, help="Seconds, of each run."
)
@click.option(
    "--keep",
    type=_PATH,
    metavar="DIR",
    help="Leave the checkpoints, logs and outputs there.",
)
@_layout_options
@_page_options
@_budget_options
@click.option("-q", "--quiet", is_flag=True, help="Exit code only.")
@_source_options
def resume_check(source: Path, **options: Any) -> None:
    """Say whether training goes on the same from what split writes of SOURCE.

    A program goes on from SOURCE and from each layout; their losses are compared. Exit code 0 if
    every layout reaches what is required, 1 if not.
    """
    import dataclasses

    from reshard.commands.resume_check.command import ResumeCheckOptions
    from reshard.commands.resume_check.command import resume_check as run
    from reshard.commands.split.options import SplitOptions

    as_json, quiet, _ = (options.pop(name) for name in ("as_json", "quiet", "verbose"))
    memory = units.parse_bytes(options.pop("max_memory"), "--max-memory")
    own = {each.name for each in dataclasses.fields(ResumeCheckOptions)} & options.keys()
    chosen = {name: options.pop(name) for name in own}
    layout = SplitOptions(max_memory_bytes=memory, **options)
    watched = _is_watched(quiet=quiet)
    report = run(
        source,
        ResumeCheckOptions(layout=layout, **chosen),
        _bar if watched else None,
        _say if watched else None,
    )
    if not quiet or as_json:
        _print(report, as_json=as_json)
    raise click.exceptions.Exit(report.exit_code)


def _say(line: str) -> None:
    _show(line, err=True)


def _show(line: str, *, err: bool = False) -> None:
    from reshard.commands.lines import printable

    click.echo(printable(line), err=err)


@cli.command()
@click.option(
    "--keep",
    type=_PATH,
    metavar="DIR",
    help="Leave everything that is made there.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
def demo(keep: Path | None, verbose: bool) -> None:  # noqa: ARG001 - main has seen it
    """Train a tiny model at 4 ranks, merge it, generate, and go on at 2 ranks and under FSDP.

    Exit code 0 if the losses are those of the unbroken run, 1 if not.
    """
    from reshard.commands.demo import demo as run

    raise click.exceptions.Exit(0 if run(keep, click.echo) else 1)


def _read(run: Callable[..., Any], made: Callable[..., Any], *places: Any, **options: Any) -> None:
    """Run a command that only reads tensors, and end with the code of its report."""
    as_json, quiet, _ = (options.pop(name) for name in ("as_json", "quiet", "verbose"))
    memory = units.parse_bytes(options.pop("max_memory"), "--max-memory")
    chosen = made(max_memory_bytes=memory, **options)
    report = run(*places, chosen, _bar if _is_watched(quiet=quiet) else None)
    if not quiet or as_json:
        _print(report, as_json=as_json)
    raise click.exceptions.Exit(report.exit_code)


def _is_watched(*, quiet: bool) -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and not quiet


def _write(
    run: Callable[..., Any],
    made: Callable[..., Any],
    sources: tuple[Path, ...],
    destination: Path,
    **options: Any,
) -> None:
    """Run a command that writes, with a progress bar on a terminal, and print its report."""
    as_json, quiet, _ = (options.pop(name) for name in ("as_json", "quiet", "verbose"))
    options["verify"] = not options.pop("no_verify")
    memory = units.parse_bytes(options.pop("max_memory"), "--max-memory")
    from reshard.ranks import torchrun

    try:
        with torchrun.joined() as team:
            if not team.first:
                options["html"] = None
            chosen = made(max_memory_bytes=memory, team=team, **options)
            watched = team.first and _is_watched(quiet=quiet)
            report = run(sources, destination, chosen, _bar if watched else None)
    except torchrun.SaidByFirstError as silent:
        raise click.exceptions.Exit(silent.exit_code) from silent
    if team.first and (not quiet or as_json):
        _print(report, as_json=as_json)


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
        import json

        click.echo(json.dumps(result.to_json(), indent=2, default=str))
        return
    for line in result.lines():
        _show(line)


if __name__ == "__main__":
    main()
