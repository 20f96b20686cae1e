"""A page as one file: text in the markup, all that scripts draw as data, nothing from elsewhere.

Whatever comes from a checkpoint is either text that jinja escapes, or data that no parser of HTML
looks into. A content security policy stands behind both: only the page's own script runs, by its
hash, and nothing is ever fetched.
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

from reshard.errors import ExistsError
from reshard.html.curves import Curves
from reshard.html.page import Maps, Page, Table
from reshard.output import commit
from reshard.output.destination import check_destination
from reshard.version import __version__

_ASSETS = Path(__file__).parent / "assets"
_TEMPLATE = "page.html.jinja"
_SCRIPTS = ("base.js", "table.js", "map.js", "curves.js", "main.js")
_KINDS = {Curves: "curves", Maps: "maps", Table: "table"}  # as the script calls them
_STYLE = "page.css"
_PLOTS, _PLOTS_STYLE = "uPlot.iife.min.js", "uPlot.min.css"  # only where there are curves


def check(
    path: Path, sources: Sequence[Path], *, overwrite: bool, destination: Path | None = None
) -> None:
    """Refuse a place for a page before any work is done.

    Args:
        destination: where the same command writes its output.

    Raises:
        ExistsError: it exists (and ``overwrite`` is off), or lies inside a source or the output.
        UsageError: its parent directory does not exist.
    """
    check_destination(path, list(sources), is_directory=False, overwrite=overwrite)
    if destination is not None:
        real, output = path.resolve(), destination.resolve()
        if real == output or output in real.parents:
            raise ExistsError(path, f"lies inside the output {destination}", "put it beside it")


def write(page: Page, path: Path, *, overwrite: bool) -> None:
    """Write a page to a file, whole or not at all.

    Raises:
        ExistsError: it exists, and ``overwrite`` is off.
        ReshardError: it cannot be written.
    """
    text = render(page)
    with commit.stage_output(path, is_directory=False, overwrite=overwrite) as staging:
        # a path that is no UTF-8 shows its bytes as \udcNN
        (staging / path.name).write_bytes(text.encode("utf-8", "backslashreplace"))


def render(page: Page) -> str:
    """The document; the same page gives the same text."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    kinds = [_KINDS[type(section)] for section in page.sections]
    scripts = (_PLOTS, *_SCRIPTS) if "curves" in kinds else _SCRIPTS
    styles = (_PLOTS_STYLE, _STYLE) if "curves" in kinds else (_STYLE,)
    script = "\n".join(map(_asset, scripts))
    return environment.from_string(_asset(_TEMPLATE)).render(
        page=page,
        sections=list(zip(kinds, page.sections, strict=True)),
        version=__version__,
        data=packed([[k, s.to_json()] for k, s in zip(kinds, page.sections, strict=True)]),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style="\n".join(map(_asset, styles)),
        dark=_asset("dark.css"),
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def packed(data: Any) -> str:
    """JSON, deflated (RFC 1950), in base64: small, and inert in any markup."""
    text = json.dumps(_plain(data), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _plain(value: Any) -> Any:
    """With words for the numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value
