"""Lines as a terminal shows them: wrapped between words, with colours for verdicts."""

from __future__ import annotations

import os
import re
from typing import TextIO

import click

_COPIED = "load it"  # the label of a line that users copy as a whole
_COLOURS = {"ok": "green", "warning": "yellow", "FAILED": "red", "DIFFERENT": "red"}
_VERDICT = re.compile(r"^(warning)(?= {2})|(?<= {2})(ok)(?= {2}|$)|\b(FAILED|DIFFERENT)\b")
_TEXT = re.compile(r"( *->|\S+(?: \S+)*(?= {2,}))? *")  # what precedes the text of a line
_LEAST = 20  # columns; a text in fewer is not wrapped


def lay_out(line: str, stream: TextIO) -> str:
    """Return a line as a stream shows it; one that is not a terminal gets it unchanged.

    ``NO_COLOR`` and ``TERM=dumb`` turn colours off (https://no-color.org).
    """
    if not stream.isatty():
        return line
    import shutil  # with textwrap a tenth of the time to start, and only terminals need them

    wrapped = _wrap(line, shutil.get_terminal_size().columns)
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return wrapped
    return _VERDICT.sub(lambda found: click.style(found[0], fg=_COLOURS[found[0]]), wrapped)


def _wrap(line: str, width: int) -> str:
    start = _TEXT.match(line)
    indent = start.end() if start else 0
    is_table = "  " in line[indent:]  # its columns would no longer be aligned
    if len(line) <= width or is_table or line.startswith(_COPIED) or width - indent < _LEAST:
        return line
    import textwrap

    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
