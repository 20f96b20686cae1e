"""The options that commands share, and the types of their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click

from reshard.cli.sections import section, together
from reshard.paths import as_path

if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # has no type parameter before click 8.4


class OneOf(_Choice):
    """A choice between the values of a module, which is imported only when they are needed.

    Args:
        module: dotted name of the module.
        name: name of a sequence of texts in it, or of their `Literal`.
    """

    def __init__(self, module: str, name: str) -> None:
        super().__init__(())
        del self.choices
        self._home = module, name

    def __getattr__(self, name: str) -> Any:
        if name != "choices":
            raise AttributeError(name)
        from importlib import import_module

        module, name = self._home
        values = getattr(import_module(module), name)
        self.choices = get_args(values) or tuple(values)
        return self.choices


class _Where(click.Path):
    """A local path, or a URL."""

    def convert(
        self, value: Any, _param: click.Parameter | None, _context: click.Context | None
    ) -> Any:
        """Return the path object that all lower layers use."""
        return as_path(value)


PATH = _Where()
TARGET = OneOf("reshard.formats.targets", "NAMES")

_source, _reading, _writing = section("Source"), section("Reading"), section("Writing")
_report, _names = section("Report"), section("Names")

sources = click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=PATH)
destination = click.argument("destination", type=PATH)

# Names of the written tensors, for every command that writes.
vocab_size = _names(
    "--vocab-size",
    type=click.IntRange(min=1),
    help="Rows of the embedding without padding.  [default: as the source states]",
)
family = _names(
    "--family",
    help="Model family of Hugging Face: llama, qwen2, ...  [default: as the source states]",
)

# How the source is read, for every command.
source = together(
    _source(
        "--from",
        "source_format",
        type=OneOf("reshard.formats", "NAMES"),
        help="Format of SOURCE.  [default: detected]",
    ),
    _source(
        "--tag",
        "--step",
        "tag",
        help="Checkpoint of a run directory.  [default: the one that the directory points to, else"
        " the newest]",
    ),
    _source(
        "--key", help="State dict to read if a file has several, as a dotted path, e.g. ema.model."
    ),
    _source(
        "--model",
        help="Model, if files do not state it: config.json, its directory, or module:factory.",
    ),
    _source(
        "--wrap",
        help="How FSDP 1 wrapped --model: CLASS[,CLASS], size=N, none or _no_split_modules.",
    ),
    _source(
        "--rules",
        type=PATH,
        metavar="FILE",
        help="YAML rules for parameters that the built-in tables do not have: cuts and names.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."),
    click.option("-v", "--verbose", is_flag=True, help="Show tracebacks."),
)

# For every command whose report can be a page.
html = _report(
    "--html",
    type=PATH,
    metavar="FILE",
    help="Also write the report as a self-contained HTML page.",
)

# For commands that write nothing but the page.
page = together(
    html,
    _report("--overwrite", is_flag=True, help="Replace an existing file of --html."),
)

# Limits of reading tensors, and trust.
budget = together(
    _reading(
        "--allow-pickle",
        multiple=True,
        metavar="NAME",
        help="Accept a class that reshard does not know; its code never runs.",
    ),
    _reading(
        "--workers",
        default=0,
        help="Threads; the output does not depend on it.  [default: number of cores, at most 8]",
    ),
    _reading(
        "--max-memory",
        default="256MiB",
        show_default=True,
        help="Memory for the buffers of all workers together.",
    ),
)

# How files are written, for every command that writes.
output = together(
    _writing(
        "--on-overflow",
        type=click.Choice(["error", "clamp", "allow"]),
        default="error",
        show_default=True,
        help="What to do if a cast makes a finite value infinite.",
    ),
    _writing(
        "--trust",
        type=click.Choice(["full", "sampled", "none"]),
        default="sampled",
        show_default=True,
        help="Check that all files belong to one save, each to its own rank: compare what they"
        " state, and a sample (or all) of the values that are stored twice.",
    ),
    _writing(
        "--replicas",
        type=click.Choice(["error", "first", "mean"]),
        default="error",
        show_default=True,
        help="If ranks differ in a tensor that they share: fail, write the first rank's values, or"
        " write the mean.",
    ),
    _writing(
        "--overwrite", is_flag=True, help="Replace an existing DESTINATION and file of --html."
    ),
    _writing(
        "--resume",
        is_flag=True,
        help="Continue an interrupted run with the same DESTINATION.",
    ),
    _writing("--no-verify", is_flag=True, help="Do not read the output back."),
    _writing("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    budget,
    html,
    click.option("-q", "--quiet", is_flag=True, help="Print no progress and no report."),
)
