"""The folders of weights and optimizer, recognized by the names of their files."""

from __future__ import annotations

import re
from collections.abc import Iterator

from reshard.core.location import Location
from reshard.formats.huggingface.directory import find_index

NAME = "colossalai"
RUNNING, SCHEDULER = "running_states.json", "lr_scheduler"
INDEX = re.compile(r"(?:pytorch_optim(?:\..+)?\.bin|optimizer(?:\..+)?\.safetensors)\.index\.json")


def detect(location: Location) -> bool:
    """Return whether such an optimizer is here or one folder below, or this is its index."""
    if location.chosen:
        return INDEX.fullmatch(location.chosen) is not None
    optimizer = find_optimizer(location)
    return optimizer is location or (optimizer is not None and find_weights(location) is not None)


def _list_candidates(location: Location) -> Iterator[Location]:
    yield location
    yield from location.folders.values()


def find_optimizer(location: Location) -> Location | None:
    """Return the folder with the index of the optimizer: this one or one below."""
    return next((p for p in _list_candidates(location) if any(map(INDEX.fullmatch, p.files))), None)


def find_weights(location: Location) -> Location | None:
    """Return the folder with the index of the weights: this one or one below."""
    indexed = ((p, find_index(p)) for p in _list_candidates(location))
    return next((p for p, index in indexed if index and not INDEX.fullmatch(index)), None)
