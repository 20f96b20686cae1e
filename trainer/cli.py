"""The command line: each field of Settings becomes a flag.

Exit codes: 0 done; 1 training could not continue; 2 the settings or the command line are wrong; 3 a
checkpoint is missing, incomplete or has another shape; 130 and 143 interrupted and terminated.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from trainer import environment, launch
from trainer.choices import Choices
from trainer.core.errors import SettingsError, TrainerError
from trainer.resolve import resolve
from trainer.settings import AUTO, Settings

_FLAGS = {"log": ("--step-log", "--log")}
"""Flags that are not named like their setting: torchrun takes --log for its own --log-dir."""


def name_flag(setting: str) -> str:
    """Return the flag of a setting."""
    return _FLAGS.get(setting, ["--" + setting.replace("_", "-")])[0]


def _make_option(field: dataclasses.Field[Any]) -> click.Option:
    flag = name_flag(field.name)
    shared: dict[str, Any] = {"help": field.metadata["help"], "default": field.default}
    shared["show_default"] = field.default not in (None, "", ())
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool":
        return click.Option([f"{flag}/--no-{flag[2:]}"], is_flag=True, **shared)
    if kind.startswith("tuple"):
        return click.Option([flag], multiple=True, **shared)
    choices = field.metadata["choices"]
    basic = {"int": int, "float": float}.get(kind, str)
    spellings = [*_FLAGS.get(field.name, [flag]), field.name]
    return click.Option(spellings, type=click.Choice(choices) if choices else basic, **shared)


_FILE = click.Path(path_type=Path)
_ACTIONS = [
    click.Option(
        ["--deepspeed"],
        type=_FILE,
        metavar="FILE",
        help="read settings from a ds_config.json of DeepSpeed",
    ),
    click.Option(
        ["--accelerate"],
        type=_FILE,
        metavar="FILE",
        help="read settings from the YAML file of accelerate config",
    ),
    click.Option(
        ["--print-config"], is_flag=True, help="print the resolved settings as JSON, and exit"
    ),
]
_LIBRARIES = ("torch", "transformers", "yaml")  # which the core of reshard does not need


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return an exit code, after one message for a failure."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with launch.explain_permissions():
            command = make_command()
            code = command.main(arguments, prog_name="python -m trainer", standalone_mode=False)
    except click.ClickException as error:
        _print_error(f"{error.format_message()}\n  -> python -m trainer --help")
        return 2
    except TrainerError as error:
        _print_error(str(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _LIBRARIES:
            raise
        _print_error(f"{library} is not installed\n  -> pip install {library}")
        return 2
    except (KeyboardInterrupt, click.Abort):
        _print_error("interrupted")
        return 130
    return int(code or 0)


def make_command() -> click.Command:
    """Return the command, with an option for each setting."""
    return click.Command(
        "trainer",
        callback=_start,
        params=[*_ACTIONS, *map(_make_option, dataclasses.fields(Settings))],
        help=(
            "Train a causal language model on N ranks, with ZeRO or FSDP.\n\n"
            "Under torchrun or accelerate launch, this process is one of their ranks; otherwise it"
            " starts --nproc ranks itself."
        ),
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
        },
    )


@click.pass_context
def _start(
    ctx: click.Context,
    /,
    deepspeed: Path | None,
    accelerate: Path | None,
    print_config: bool,
    **flags: Any,
) -> None:
    """Resolve the settings, then train in this process or on new ranks."""
    world = environment.read_launcher_world_size()
    choices = Choices()
    for name, value in flags.items():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            choices.state(name, value, name_flag(name))
    _inherit_settings(choices)
    if deepspeed:
        from trainer.config_files import read_deepspeed

        read_deepspeed(deepspeed, choices)
    if accelerate:
        from trainer.config_files import read_accelerate

        read_accelerate(accelerate, choices, world=world)
    settings = _resolve_settings(choices, world)
    if choices.notes and environment.is_first_rank():
        click.echo(f"note: {choices.notes}", err=True)
    if print_config:
        if environment.is_first_rank():
            shown = {**dataclasses.asdict(settings), "origins": choices.origins}
            click.echo(json.dumps(shown, indent=2))
        return
    ctx.exit(launch.start(settings))


def _inherit_settings(choices: Choices) -> None:
    """Take over the settings of a resumed run, except those that are chosen now."""
    resume, tag = choices.stated("resume"), choices.stated("tag")
    run = resume and (choices.stated("save") if resume.value == AUTO else resume)
    if run:
        from trainer.checkpoint.directory import has_checkpoint
        from trainer.checkpoint.state import read_inherited

        if resume is run or has_checkpoint(Path(run.value)):
            for name, value in read_inherited(run.value, tag.value if tag else None).items():
                choices.assume(name, value, f"the run in {run.value}")


def _resolve_settings(choices: Choices, world: int | None) -> Settings:
    nproc = choices.stated("nproc")
    if nproc and world not in (None, nproc.value):
        raise SettingsError(
            f"nproc is {nproc.value} by {nproc.origin}, and the launcher started {world} ranks",
            f"leave {nproc.origin} out: the launcher sets the number of ranks",
        )
    chosen = choices.values
    return resolve(chosen, world or chosen.get("nproc", Settings.nproc))


def _print_error(message: str) -> None:
    if environment.is_first_rank():
        click.echo(f"error: {message}", err=True)
