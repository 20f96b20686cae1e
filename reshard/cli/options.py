"""The options that commands share, and the types of their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click

from reshard.cli.sections import section, together
from reshard.paths import as_path

if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # which takes no parameter before click 8.4


class OneOf(_Choice):
    """One of the words of a module, which is imported no sooner than they are needed.

    Args:
        module: its dotted name.
        name: what is there: a sequence of words, or the `Literal` of them.
    """

    def __init__(self, module: str, name: str) -> None:
        super().__init__(())
        del self.choices
        self._home = module, name

    def __getattr__(self, name: str) -> Any:
        if name != "choices":
            raise AttributeError(name)
        from importlib import import_module

        module, words = self._home
        found = getattr(import_module(module), words)
        self.choices = get_args(found) or tuple(found)
        return self.choices


class _Where(click.Path):
    """A path of this machine, or a URL."""

    def convert(
        self, value: Any, _param: click.Parameter | None, _context: click.Context | None
    ) -> Any:
        """As every layer below takes it."""
        return as_path(value)


PATH = _Where()
TARGET = OneOf("reshard.formats.targets", "NAMES")

_source, _reading, _writing = section("Source"), section("Reading"), section("Writing")
_report, _names = section("Report"), section("Names")

sources = click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=PATH)
destination = click.argument("destination", type=PATH)

# Under whose names tensors are written; the same for every command that writes.
vocab_size = _names(
    "--vocab-size",
    type=click.IntRange(min=1),
    help="Rows of the embedding that are words; more are padding.  [default: as the source says]",
)
family = _names(
    "--family",
    help="Which of Hugging Face's models it is: llama, qwen2, ...  [default: as the source says]",
)

# How a source is read; the same for every command.
source = together(
    _source(
        "--from",
        "source_format",
        type=OneOf("reshard.formats", "NAMES"),
        help="Its format.  [default: detected]",
    ),
    _source(
        "--tag",
        "--step",
        "tag",
        help="Which checkpoint of a run directory.  [default: the one that it points to, else the"
        " newest]",
    ),
    _source("--key", help="Which state dict, where a file holds several: dotted, e.g. ema.model."),
    _source(
        "--model",
        help="Its model, where files do not say: config.json, its directory, or module:factory.",
    ),
    _source("--wrap", help="How FSDP 1 wrapped --model: CLASS[,CLASS], size=N or none."),
    _source(
        "--rules",
        type=PATH,
        metavar="FILE",
        help="YAML: how parameters are cut that no table knows, and what others call them.",
    ),
    click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout."),
    click.option("-v", "--verbose", is_flag=True, help="Show tracebacks."),
)

# Of every command whose report can be a page.
html = _report(
    "--html",
    type=PATH,
    metavar="FILE",
    help="Also write the report as a page that needs only a browser.",
)

# The same of commands that write nothing else.
page = together(
    html,
    _report("--overwrite", is_flag=True, help="Replace the file of --html."),
)

# What reading tensors may take, and trust.
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
        help="Threads; the output does not depend on it.  [default: one a core, at most 8]",
    ),
    _reading(
        "--max-memory",
        default="256MiB",
        show_default=True,
        help="For the buffers of all workers together.",
    ),
)

# How files are written; the same for every command that writes.
output = together(
    _writing(
        "--on-overflow",
        type=click.Choice(["error", "clamp", "allow"]),
        default="error",
        show_default=True,
        help="When a cast would make a finite value infinite.",
    ),
    _writing(
        "--trust",
        type=click.Choice(["full", "sampled", "none"]),
        default="sampled",
        show_default=True,
        help="How to check that all files are of one save, each of its own rank: compare what they"
        " state and a sample (or all) of the values that are stored twice.",
    ),
    _writing(
        "--replicas",
        type=click.Choice(["error", "first", "mean"]),
        default="error",
        show_default=True,
        help="Where ranks differ in a tensor that they share: refuse it, or write the first"
        " rank's, or the mean.",
    ),
    _writing("--overwrite", is_flag=True, help="Replace DESTINATION, and --html's file."),
    _writing(
        "--resume",
        is_flag=True,
        help="Go on where an interrupted run with this DESTINATION stopped.",
    ),
    _writing("--no-verify", is_flag=True, help="Do not read the output back."),
    _writing("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    budget,
    html,
    click.option("-q", "--quiet", is_flag=True, help="No progress, no report."),
)
