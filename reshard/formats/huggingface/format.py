"""Hugging Face's model directories, and safetensors files, as one format."""

from __future__ import annotations

from reshard.core.location import Location
from reshard.core.manifest import Manifest
from reshard.formats.base import Format, ReadHints, Source
from reshard.formats.huggingface.directory import NAME, detect


def _read(location: Location, hints: ReadHints) -> Manifest:
    from reshard.formats.huggingface import reader

    return reader.read(location, hints.rules)


FORMAT = Format(
    name=NAME,
    detect=detect,
    read=_read,
    ignored_hints=("key", "wrap"),
    sources={NAME: Source(), "safetensors": Source()},
    is_generic=True,
    suffixes=(".safetensors",),
)
