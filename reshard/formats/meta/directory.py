"""The names of Meta's files and of their tensors."""

from __future__ import annotations

import re

from reshard.core.location import Location

NAME = "meta"
PARAMS = "params.json"
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
FILE = re.compile(r"consolidated\.(\d+)\.pth")


def detect(location: Location) -> bool:
    """Return whether the directory itself contains a model of Meta."""
    return (
        not location.chosen
        and any(map(FILE.fullmatch, location.files))
        and PARAMS in location.files
    )
