"""Recognize files of ``torch.save`` by their names and first bytes; `torch_reader` reads them.

Source: torch 2.13 ``torch/serialization.py`` (MAGIC_NUMBER).
"""

from __future__ import annotations

from pathlib import Path

SUFFIXES = (".pt", ".bin", ".pth", ".ckpt", ".pkl", ".tar")  # of files by torch.save
PLAIN_SUFFIXES = (".pt", ".bin", ".pth")  # of files with weights alone
ZIP = b"PK\x03\x04"
# A pickle of protocol 2 that begins with a LONG1 of 10 bytes, the magic number.
LEGACY = b"\x80\x02\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little")


def is_torch_file(path: Path) -> bool:
    """Return whether the first bytes are those of ``torch.save`` (zip, or the old stream)."""
    with path.open("rb") as file:
        head = file.read(16)
    return head.startswith((ZIP, LEGACY))
