"""The folders of weights and optimizer, recognized by the names of their files."""

from __future__ import annotations

import re
from collections.abc import Iterator

from reshard.formats.huggingface.directory import index_of
from reshard.location import Place

NAME = "colossalai"
INDEX = re.compile(r"(?:pytorch_optim(?:\..+)?\.bin|optimizer(?:\..+)?\.safetensors)\.index\.json")


def detect(place: Place) -> bool:
    """Return whether such an optimizer is here or one folder below, or this is its index."""
    if place.chosen:
        return INDEX.fullmatch(place.chosen) is not None
    return find_optimizer(place) is not None and find_weights(place) is not None


def _candidates(place: Place) -> Iterator[Place]:
    yield place
    yield from place.folders.values()


def find_optimizer(place: Place) -> Place | None:
    """Return the folder with the index of the optimizer: this one or one below."""
    return next((p for p in _candidates(place) if any(map(INDEX.fullmatch, p.files))), None)


def find_weights(place: Place) -> Place | None:
    """Return the folder with the index of the weights: this one or one below."""
    return next((p for p in _candidates(place) if index_of(p)), None)
