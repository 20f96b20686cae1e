"""Render a page as one HTML file: text in the markup, data for the scripts, no links.

Every value from a checkpoint is either text that jinja escapes, or compressed data that an HTML
parser does not interpret. A content security policy adds a second barrier: only the page's own
script runs, by its hash, and the browser fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from reshard.engine.output import commit
from reshard.engine.output.destination import check_destination
from reshard.errors import ExistsError
from reshard.html.bars import Bars
from reshard.html.curves import Curves
from reshard.html.page import Maps, Page, PageTable
from reshard.system.paths import resolve
from reshard.version import __version__

_ASSETS = Path(__file__).parent / "assets"
_TEMPLATE = "page.html.jinja"
_SCRIPTS = ("base.js", "table.js", "map.js", "curves.js", "main.js")
_KINDS = {Bars: "bars", Curves: "curves", Maps: "maps", PageTable: "table"}  # names in main.js
_STYLE = "page.css"
_PLOTS, _PLOTS_STYLE = "uPlot.iife.min.js", "uPlot.min.css"  # included only with curves


def check(
    path: Path, sources: Sequence[Path], *, overwrite: bool, destination: Path | None = None
) -> None:
    """Refuse an invalid path for a page before any work is done.

    Args:
        destination: where the same command writes its output.

    Raises:
        ExistsError: the path exists (and ``overwrite`` is off), or is in a source or the output.
        UsageError: its parent directory does not exist.
    """
    check_destination(path, list(sources), is_directory=False, overwrite=overwrite)
    if destination is not None:
        real, output = resolve(path), resolve(destination)
        if real == output or output in real.parents:
            raise ExistsError(
                path, f"is inside the output {destination}", "write the page beside it"
            )


def write(page: Page, path: Path, *, overwrite: bool) -> None:
    """Write a page to a file, whole or not at all.

    Raises:
        ExistsError: the file exists, and ``overwrite`` is off.
        ReshardError: the file cannot be written.
    """
    # Bytes of a path that are not UTF-8 appear as \udcNN.
    data = render(page).encode("utf-8", "backslashreplace")
    commit.write_file(path, data, overwrite=overwrite)


def render(page: Page) -> str:
    """Return the HTML document; equal pages give equal text."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    kinds = [_KINDS[type(section)] for section in page.sections]
    scripts = (_PLOTS, *_SCRIPTS) if "curves" in kinds else _SCRIPTS
    styles = (_PLOTS_STYLE, _STYLE) if "curves" in kinds else (_STYLE,)
    script = "\n".join(map(_read_asset, scripts))
    return environment.from_string(_read_asset(_TEMPLATE)).render(
        page=page,
        sections=list(zip(kinds, page.sections, strict=True)),
        version=__version__,
        data=pack([[k, s.to_json()] for k, s in zip(kinds, page.sections, strict=True)]),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style="\n".join(map(_read_asset, styles)),
        dark=_read_asset("dark.css"),
    )


def _read_asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def pack(data: Any) -> str:
    """Return data as JSON, deflated (RFC 1950), in base64: small, and inert in any markup."""
    text = json.dumps(_make_plain(data), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _make_plain(value: Any) -> Any:
    """Return a value in which text replaces the numbers that JSON cannot express (NaN, inf)."""
    if isinstance(value, dict):
        return {key: _make_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value
