"""Recognize the files of a model's weights by their names."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path

from reshard.containers.safetensors import is_safetensors_file
from reshard.containers.safetensors_shards import INDEX
from reshard.core.location import Location

NAME = "huggingface"
_INDEXES = (INDEX, "pytorch_model.bin.index.json")
_INDEX = re.compile(r"[\w.-]+\.(safetensors|bin)\.index(\.\w+)?\.json")
_WEIGHTS = re.compile(r".+\.safetensors|(?!training_args).+\.(bin|pth?)")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<of>\d+)\.safetensors")


def detect(location: Location) -> bool:
    """Return whether safetensors (or indexed .bin) weights are at this file or directory."""
    if location.chosen:
        return is_index(location.chosen) or is_safetensors_file(location.path)
    return find_index(location) is not None or any(
        name.endswith(".safetensors") for name in location.files
    )


def find_index(location: Location) -> str | None:
    """Return the name of a directory's index of shards; None without one, or with several."""
    usual = next((name for name in _INDEXES if name in location.files), None)
    others = [name for name in location.files if is_index(name)]
    return usual or (others[0] if len(others) == 1 else None)


def is_index(name: str) -> bool:
    """Return whether a name is that of an index; a variant is before ``json``."""
    return _INDEX.fullmatch(name) is not None


def is_whole_set(location: Location) -> bool:
    """Return whether the names of safetensors files are all shards of one save: 1 to N of N."""
    names = [name for name in location.files if name.endswith(".safetensors")]
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    numbers = sorted(int(match["number"]) for match in shards)
    return (
        1 < len(names) == len(shards)
        and len({(match["stem"], match["of"]) for match in shards}) == 1
        and numbers == list(range(1, int(shards[0]["of"]) + 1))
    )


def suggest_parts(directory: Path) -> str:
    """Return the advice to read the parts of a model that torch has not yet consolidated.

    Source: torch 2.13 ``distributed/checkpoint/hf_storage.py``, SHARDED_DIR_NAME.
    """
    parts = directory / "sharded"
    found = any(parts.glob("*.safetensors"))
    return f"; or pass {parts}, which has what the ranks saved" if found else ""


def is_shard(name: str) -> bool:
    """Return whether a name is that of one of several safetensors files."""
    return _SHARD.fullmatch(name) is not None


def list_other_weights(location: Location, read: Container[str]) -> list[str]:
    """Return the names of the directory's other files of weights."""
    return sorted(name for name in location.files if _WEIGHTS.fullmatch(name) and name not in read)
