"""Edit files of checkpoints, to test that the change is detected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edit_safetensors_header(path: Path, change: Callable[[Any], None]) -> None:
    """Change the header of a safetensors file; its data stay."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
