"""The command line: every setting is a flag, made from its field.

Exit codes: 0 done; 1 training could not go on; 2 the settings or the command line are wrong; 3 a
checkpoint is missing, incomplete or of another shape; 130 and 143 interrupted and terminated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from trainer import environment, launch
from trainer.config.choices import Choices
from trainer.errors import SettingsError, TrainerError
from trainer.resolve import resolve, without_effect
from trainer.settings import Settings

# Where a heading of the help begins: the first field under it, in the order of the fields
_HEADINGS = {
    "steps": "The run",
    "model": "The model and its data",
    "micro_batch": "Batches (global batch = micro batch x accumulation x data-parallel ranks)",
    "lr": "The optimizer",
    "precision": "Numbers",
    "strategy": "How the model is spread over the ranks",
    "fsdp_sharding_strategy": "FSDP, in Accelerate's words",
    "save": "Checkpoints",
    "log": "What is told",
}
_OTHER_SOURCES = "Configuration files, and what to do with them"


def _whole(value: Any) -> int:
    """A whole number; 5e8 is one."""
    for read in (int, float):
        with contextlib.suppress(ValueError, OverflowError):
            if read(value) == int(read(value)):
                return int(read(value))
    raise click.BadParameter(f"{value!r} is not a whole number")


class _Choice(click.Choice[str]):
    """A value is what it is; only the names of options may be spelt with underscores."""

    def normalize_choice(self, choice: object, ctx: click.Context | None) -> str:
        """As it is written."""
        del ctx
        return str(choice)


class _Command(click.Command):
    """Help under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        heading = _OTHER_SOURCES
        for param in self.get_params(ctx):
            heading = _HEADINGS.get(param.name or "", heading)
            heading = _OTHER_SOURCES if param.name in _NO_SETTINGS else heading
            record = param.get_help_record(ctx)
            if record:
                groups.setdefault(heading, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _option(field: dataclasses.Field[Any]) -> click.Option:
    """The flag of a setting."""
    flag = "--" + field.name.replace("_", "-")
    shared: dict[str, Any] = {"help": field.metadata["help"], "default": field.default}
    shared["show_default"] = field.default not in (None, "", ())
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool":
        return click.Option([f"{flag}/--no-{flag[2:]}"], is_flag=True, **shared)
    if kind.startswith("tuple"):
        return click.Option([flag], multiple=True, **shared)
    if kind == "int":
        return click.Option([flag], type=_whole, metavar="INTEGER", **shared)
    choices = field.metadata["choices"]
    plain = float if kind == "float" else str
    return click.Option([flag], type=_Choice(choices) if choices else plain, **shared)


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    from importlib import metadata

    try:
        click.echo(f"trainer {metadata.version('reshard')}")
    except metadata.PackageNotFoundError:
        click.echo("trainer, not installed")
    ctx.exit()


_FILE = click.Path(path_type=Path)
_OURS = [
    click.Option(["--deepspeed"], type=_FILE, metavar="FILE", help="a ds_config.json of DeepSpeed"),
    click.Option(["--accelerate"], type=_FILE, metavar="FILE", help="a YAML of accelerate config"),
    click.Option(["--ignore-unknown"], is_flag=True, help="go on without fields that are unknown"),
    click.Option(["--print-config"], is_flag=True, help="print the settings as JSON, and end"),
    click.Option(["--report-memory"], is_flag=True, help="print what a rank holds, and end"),
    click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_version,
        help="print the version, and end",
    ),
]
_NO_SETTINGS = {*(option.name for option in _OURS), "help"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; every failure is one message and a documented exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = command().main(
            arguments, prog_name="python -m trainer", standalone_mode=False, obj=arguments
        )
    except click.ClickException as error:
        _say(f"{error.format_message()}\n  -> python -m trainer --help")
        return 2
    except TrainerError as error:
        _say(str(error))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        return 130
    return int(code or 0)


def command() -> click.Command:
    """The command with an option a setting."""
    return _Command(
        "trainer",
        callback=_start,
        params=[*_OURS, *map(_option, dataclasses.fields(Settings))],
        help=(
            "Train a causal language model on N ranks, with ZeRO or FSDP.\n\n"
            "Started by torchrun or accelerate launch, this is one of their ranks; started plainly"
            " with --nproc N, it starts N ranks itself."
        ),
        context_settings={
            "help_option_names": ["-h", "--help"],
            "token_normalize_func": lambda token: token.replace("_", "-"),
            "max_content_width": 100,
        },
    )


@click.pass_context
def _start(
    ctx: click.Context,
    /,
    deepspeed: Path | None,
    accelerate: Path | None,
    ignore_unknown: bool,
    print_config: bool,
    report_memory: bool,
    **flags: Any,
) -> None:
    """Understand the choices, then train here or on new ranks."""
    world = environment.world_size_of_launcher()
    choices = Choices()
    for name, value in flags.items():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            choices.state(name, value, "--" + name.replace("_", "-"))
    _inherit(choices)
    if deepspeed:
        from trainer.config.deepspeed import read as read_deepspeed

        read_deepspeed(deepspeed, choices, ignore_unknown=ignore_unknown)
    if accelerate:
        from trainer.config.accelerate import read as read_accelerate

        read_accelerate(accelerate, choices, world=world, ignore_unknown=ignore_unknown)
    if report_memory:  # the textbook's setting: gradients as wide as the parameters
        precision = choices.values.get("precision", Settings.precision)
        choices.assume("grad_dtype", precision, "--report-memory")
    settings = _settle(choices, world)
    _note_idle(choices, settings)
    if choices.notes and environment.speaks():
        click.echo(f"note: {choices.notes}", err=True)
    if print_config:
        if environment.speaks():
            shown = {**dataclasses.asdict(settings), "origins": choices.origins}
            click.echo(json.dumps(shown, indent=2))
        return
    ctx.exit(launch.start(settings, ctx.obj, "memory.report" if report_memory else "loop.run"))


def _note_idle(choices: Choices, settings: Settings) -> None:
    """Nothing that was chosen is without effect unsaid."""
    for name, why in without_effect(settings).items():
        stated = choices.stated(name)
        if stated:
            choices.note(f"no effect, as the {why}", stated.origin)


def _inherit(choices: Choices) -> None:
    """A resumed run goes on as it was, but for what is chosen now."""
    resume, tag = choices.stated("resume"), choices.stated("tag")
    if resume:
        from trainer.checkpoint.state import inherited

        for name, value in inherited(resume.value, tag.value if tag else None).items():
            choices.assume(name, value, f"the run in {resume.value}")


def _settle(choices: Choices, world: int | None) -> Settings:
    """The settings of this many ranks."""
    asked = choices.stated("nproc")
    if asked and world not in (None, asked.value):
        raise SettingsError(
            f"nproc is {asked.value} by {asked.origin}, and the launcher started {world} ranks",
            f"leave {asked.origin} out: the launcher decides",
        )
    chosen = choices.values
    return resolve(chosen, world or chosen.get("nproc", Settings.nproc))


def _say(message: str) -> None:
    """An error that all ranks find, said once."""
    if environment.is_first():
        click.echo(f"error: {message}", err=True)
