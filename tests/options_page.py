"""Write docs/options.md from the declarations of the options: ``python -m tests.options_page``."""

from __future__ import annotations

from pathlib import Path

import click

from reshard.cli import cli
from reshard.formats.registry import list_built_in_writers_using
from reshard.options import options_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
_HEAD = """# Options

`python -m tests.options_page` writes this page from the declarations in the code; do not edit it.

Each row has the spelling on the command line, the keyword of the Python function
(`reshard.merge`, `reshard.split` for `convert` too, ...) and the commands that take the option. The
options that a run was given are in its JSON report (`--json`) under `options`, by their keywords.
All commands but `demo` also take `--json` and `-v`, and all but `inspect` take `-q`.
"""
_COMMANDS = (
    *("inspect", "merge", "average", "split", "convert", "diff", "verify", "resume-check"),
    "plan",
    "mount",
)


def options_page():
    """Return the text of the page."""
    users, found = {}, {}
    for command in _COMMANDS:
        for option in options_of(cli.commands[command].declared):
            key = id(option.declared)  # one declaration, taken by every command that inherits it
            users.setdefault(key, []).append(command)
            found.setdefault(key, (option, command))
    groups = {}
    for key, (option, command) in found.items():
        groups.setdefault(option.declared.group, []).append(_row(option, command, users[key]))
    tables = [f"\n## {group}\n\n{_COLUMNS}{''.join(rows)}" for group, rows in groups.items()]
    return _HEAD + "".join(tables)


_COLUMNS = "| Option | Python | Default | Commands | Meaning |\n|---|---|---|---|---|\n"


def _row(option, command, commands):
    keyword = f"{option.within}.{option.name}" if option.within else option.name
    keyword += "=False" if option.is_negated else ""
    taken = "all" if len(commands) == len(_COMMANDS) else ", ".join(commands)
    targets = (
        list_built_in_writers_using(option.name)
        if "split" in commands or len(commands) == 1
        else []
    )
    used = f" Used by --to {', '.join(targets)}." if targets else ""
    cells = (
        f"`{_spelling(option, command)}`",
        f"`{keyword}`",
        _default(option),
        taken,
        option.declared.help + used,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _spelling(option, command):
    """Return the option as --help shows it, without the range of a number."""
    command = cli.commands[command]
    param = next(each for each in command.params if each.opts[0] == option.flags[0].split("/")[0])
    shown, _ = param.get_help_record(click.Context(command))
    return shown.replace("INTEGER RANGE", "N").replace("INTEGER", "N").replace("FLOAT", "X")


def _default(option):
    if option.declared.unset:
        return option.declared.unset
    if option.declared.shown_default:
        return f"`{option.declared.shown_default}`"
    if option.default is None or option.default == () or option.type is bool:
        return ""
    return f"`{option.default}`"


if __name__ == "__main__":
    PAGE.write_text(options_page())
