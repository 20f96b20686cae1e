"""Where weights and optimizer lie, told by their names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from reshard.formats.huggingface.directory import index_of
from reshard.formats.place import Place

NAME = "colossalai"
INDEX = re.compile(r"(?:pytorch_optim(?:\..+)?\.bin|optimizer(?:\..+)?\.safetensors)\.index\.json")


def detect(place: Place) -> bool:
    """Whether such an optimizer lies here or one folder below, or this is its index."""
    if place.chosen:
        return INDEX.fullmatch(place.chosen) is not None
    return optimizer_at(place) is not None and weights_at(place) is not None


def _places(place: Place) -> Iterator[Place]:
    yield place
    yield from place.folders.values()


def optimizer_at(place: Place) -> Place | None:
    """Where the index of the optimizer lies: here or one folder below."""
    return next((p for p in _places(place) if any(map(INDEX.fullmatch, p.files))), None)


def weights_at(place: Place) -> Place | None:
    """Where the index of the weights lies: here or one folder below."""
    return next((p for p in _places(place) if index_of(p)), None)
