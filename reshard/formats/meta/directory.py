"""The names of Meta's files and of their tensors."""

from __future__ import annotations

import re

from reshard.location import Place

NAME = "meta"
PARAMS = "params.json"
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
FILE = re.compile(r"consolidated\.(\d+)\.pth")


def detect(place: Place) -> bool:
    """Whether the directory itself contains a model of Meta."""
    return not place.chosen and any(map(FILE.fullmatch, place.files)) and PARAMS in place.files
