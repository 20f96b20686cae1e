"""Options that several commands share: the source, its reading and its report.

They are apart from `output_options`, so that a command that reads no tensor imports nothing that
moves tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.formats import registry
from reshard.options import Options, option


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    """Options that choose the checkpoint to read, and state what its files do not."""

    source_format: str | None = option(
        None,
        "Format of SOURCE.",
        group="Source",
        flags=("--from",),
        choices=registry.list_built_in_names(),
        find_choices=registry.list_names,
        unset="detected",
    )
    tag: str | None = option(
        None,
        "Which checkpoint of a run directory to read.",
        group="Source",
        flags=("--tag", "--step"),
        unset="the one that the directory points to, else the newest",
        is_common=True,
    )
    key: str | None = option(
        None,
        "State dict to read if a file has several, as a dotted path, e.g. ema.model.",
        group="Source",
    )
    model: str | None = option(
        None,
        "Model, if files do not state it: config.json, its directory, or module:factory.",
        group="Source",
        is_common=True,
    )
    wrap: str | None = option(
        None,
        "How FSDP 1 wrapped --model: CLASS[,CLASS], size=N, none or _no_split_modules.",
        group="Source",
    )
    rules: Path | None = option(
        None,
        "YAML file with the cuts and names of parameters that the built-in tables lack.",
        group="Source",
        metavar="FILE",
    )

    def reader_arguments(self) -> dict[str, Any]:
        """Return the keywords of `formats.read`."""
        return {
            "force": self.source_format,
            "tag": self.tag,
            "key": self.key,
            "model": self.model,
            "wrap": self.wrap,
            "rules": self.rules,
        }


@dataclass(frozen=True, kw_only=True)
class ReportOptions(SourceOptions):
    """Options of a command whose report can be a page."""

    html: str | Path | None = option(
        None,
        "Also write the report as a self-contained HTML page.",
        group="Output",
        metavar="FILE",
        shapes_output=False,
    )
    overwrite: bool = option(
        False,
        "Replace output that exists, a file of --html included.",
        group="Output",
        shapes_output=False,
        is_common=True,
    )
