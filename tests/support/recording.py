"""Record commands in a terminal: ``python -m tests.support.recording docs/terminal.svg``.

The text of the animated SVG is what the commands print for the checkpoint in ``examples/``.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "reshard merge run/ model/",
    "reshard split run/ run2/ --world-size 2",
    "reshard diff run/ run2/",
)
_COLUMNS = 84
_LINE, _CHARACTER, _MARGIN = 19, 8.43, 16  # pixels
_TYPING, _READING = 1.2, 3.0  # seconds for each command
_COLOURS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341"}
_STYLE = re.compile(r"\x1b\[(\d+)m(.*?)\x1b\[0m")
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">
<style>
text {{ font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #e6edf3; white-space: pre }}
.shown {{ animation: {seconds}s steps(1) infinite }}
@media (prefers-reduced-motion: reduce) {{ .shown {{ animation: none }} }}
{frames}
</style>
<rect width="100%" height="100%" rx="8" fill="#161b22"/>
"""


def run(command: str, folder: Path) -> list[str]:
    """Return what a command prints to a terminal of 84 columns."""
    ours, theirs = pty.openpty()
    size = f"stty cols {_COLUMNS} rows 50; exec {sys.executable} -m {command}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": str(_COLUMNS)}
    program = subprocess.Popen(
        ["sh", "-c", size], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    printed = b""
    while chunk := _read(ours):
        printed += chunk
    os.close(ours)
    if program.wait():
        sys.exit(f"{command}: {printed.decode()}")
    # a progress line is overwritten from its start
    lines = [
        line.rpartition("\r")[2] for line in printed.decode().replace("\r\n", "\n").split("\n")
    ]
    return [re.sub(r"\x1b\[\d*K", "", line) for line in lines if line]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # what Linux says once the other side is closed
        return b""


def draw(screens: list[tuple[str, list[str]]]) -> str:
    """Return the SVG of commands and their lines, which appear one command after the other."""
    step = _TYPING + _READING
    seconds = step * len(screens) + _READING
    frames, body, row = [], [], 0
    for number, (command, lines) in enumerate(screens):
        for part, text in enumerate([[f"$ {command}"], lines]):
            start = 100 * (step * number + _TYPING * part) / seconds + 0.1  # after the first frame
            name = f"at{number}{part}"
            shown = f"{start:.1f}%, 100% {{ opacity: 1 }}"
            frames.append(f"@keyframes {name} {{ 0% {{ opacity: 0 }} {shown} }}")
            rows = []
            for line in text:
                row += 1
                coloured = _STYLE.sub(
                    lambda found: f'<tspan fill="{_COLOURS[found[1]]}">{found[2]}</tspan>',
                    escape(line, quote=False),
                )
                rows.append(f'<text x="{_MARGIN}" y="{_MARGIN + row * _LINE}">{coloured}</text>')
            body.append(
                f'<g class="shown" style="animation-name: {name}">\n' + "\n".join(rows) + "\n</g>\n"
            )
        row += 1
    head = _HEAD.format(
        width=round(2 * _MARGIN + _COLUMNS * _CHARACTER),
        height=2 * _MARGIN + row * _LINE,
        seconds=f"{seconds:.1f}",
        frames="\n".join(frames),
    )
    return head + "".join(body) + "</svg>\n"


def main() -> None:
    """Run the commands and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples/llama-zero3-4ranks", Path(folder) / "run")
        screens = [(command, run(command, Path(folder))) for command in COMMANDS]
    Path(sys.argv[1]).write_text(draw(screens))


if __name__ == "__main__":
    main()
