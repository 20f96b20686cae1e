"""Write docs/options.md from the declarations of the options: ``python -m tests.options_page``.

Do not edit the page: a test compares it with what this program writes.
"""

from __future__ import annotations

import html
from pathlib import Path

import click

from reshard.cli import cli
from reshard.formats.registry import list_built_in_writers_using
from reshard.options import options_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
_HEAD = """# Options

This page lists every option, what it means, and the commands that take it. In Python, an option is
a keyword of the command's function (`reshard.merge`, `reshard.split` for `convert` too, ...):
`--dry-run` is `dry_run`, unless its row states another keyword. The JSON report of a run (`--json`)
has its options under `options`, by their keywords. All commands but `demo` and `mount` also take
`--json`, and `-v`; all of these but `inspect` take `-q`.
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
        tables = groups.setdefault(option.declared.group, {})
        tables.setdefault(tuple(users[key]), []).append(_row(option, command, users[key]))
    text = [_HEAD]
    for group, tables in groups.items():
        text.append(f"\n## {group}\n")
        for commands, rows in tables.items():
            taken = "All commands" if len(commands) == len(_COMMANDS) else ", ".join(commands)
            text.append(f"\n**{taken}**\n\n{_COLUMNS}{''.join(rows)}")
    return "".join(text)


_COLUMNS = "| Option | Meaning |\n|---|---|\n"


def _row(option, command, commands):
    targets = list_built_in_writers_using(option.name) if "split" in commands else []
    meaning = [option.declared.help]
    if default := _default(option):
        meaning.append(f"Default: {default}.")
    if targets:
        meaning.append(f"Used by --to {', '.join(targets)}.")
    keyword = f"{option.within}.{option.name}" if option.within else option.name
    keyword += "=False" if option.is_negated else ""
    if keyword != option.flags[0].split("/")[0].lstrip("-").replace("-", "_"):
        meaning.append(f"In Python: `{keyword}`.")
    cells = (_quote(_spelling(option, command)), " ".join(meaning).replace("|", "&#124;"))
    return f"| {' | '.join(cells)} |\n"


def _quote(text):
    """Return code for a cell; Markdown renderers disagree about a bar in backticks."""
    if "|" not in text:
        return f"`{text}`"
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


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
