"""Which files Meta's are, told by their names, and what their tensors are called."""

from __future__ import annotations

import re

from reshard.formats.place import Place

NAME = "meta"
PARAMS = "params.json"
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
FILE = re.compile(r"consolidated\.(\d+)\.pth")


def detect(place: Place) -> bool:
    """Whether a model of Meta's lies directly at a place."""
    return not place.chosen and any(map(FILE.fullmatch, place.files)) and PARAMS in place.files
