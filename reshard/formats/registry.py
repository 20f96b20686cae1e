"""The registry: by which names each format is known, and its reader, imported when it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.formats import colossalai, deepspeed, huggingface, megatron, meta, nanotron, pytorch
from reshard.location import Location, directory_of
from reshard.manifest import Manifest

if TYPE_CHECKING:
    from reshard.model_parallel.rules import Table


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user said of a source beside its path, as in `formats.read`."""

    tag: str | None = None
    key: str | None = None
    model: str | None = None
    wrap: str | None = None
    rules: Path | None = None


def _deepspeed(location: Location, choice: Choice) -> Manifest:
    from reshard.formats import beside
    from reshard.formats.deepspeed import reader

    found = beside.with_companions(reader.read(location, choice.tag, choice.rules), location)
    return beside.with_run(found, Location([directory_of(found.origin.path)]))


def _megatron(location: Location, choice: Choice) -> Manifest:
    from reshard.formats import beside
    from reshard.formats.megatron import reader

    return beside.with_run(reader.read(location, _table(megatron.NAME, choice)), location)


def _meta(location: Location, choice: Choice) -> Manifest:
    from reshard.formats.meta import reader

    return reader.read(location, _table(meta.NAME, choice))


def _table(name: str, choice: Choice) -> Table:
    from reshard.model_parallel.rules import builtin, with_users

    return with_users(builtin(name), choice.rules)


def _nanotron(location: Location, _choice: Choice) -> Manifest:
    from reshard.formats.nanotron import reader

    return reader.read(location)


def _colossalai(location: Location, choice: Choice) -> Manifest:
    from reshard.formats.colossalai import reader

    return reader.read(location, model=choice.model, wrap=choice.wrap)


def _pytorch(location: Location, choice: Choice) -> Manifest:
    from reshard.formats.pytorch import reader

    return reader.read(location, key=choice.key, model=choice.model, wrap=choice.wrap)


def _huggingface(location: Location, _choice: Choice) -> Manifest:
    from reshard.formats.huggingface import reader

    return reader.read(location)


def _is_pytorch(location: Location) -> bool:
    """What a trainer puts beside Megatron's iterations is no checkpoint of PyTorch's."""
    return not megatron.holds(location) and pytorch.detect(location)


def _is_loose(location: Location) -> bool:
    return not megatron.holds(location) and pytorch.detect_loosely(location)


_Reader = Callable[[Location, Choice], Manifest]
_FORMATS: tuple[
    tuple[str, Callable[[Location], bool], _Reader], ...
] = (  # more particular ones first
    (deepspeed.NAME, deepspeed.detect, _deepspeed),
    (megatron.NAME, megatron.detect, _megatron),
    (meta.NAME, meta.detect, _meta),
    (nanotron.NAME, nanotron.detect, _nanotron),
    (colossalai.NAME, colossalai.detect, _colossalai),
    (pytorch.NAME, _is_pytorch, _pytorch),
    (huggingface.NAME, huggingface.detect, _huggingface),
    (pytorch.NAME, _is_loose, _pytorch),
)
NAMES = tuple(sorted({name for name, _, _ in _FORMATS}))


def is_of(name: str, location: Location) -> bool:
    """Whether a checkpoint of the format of this name lies directly at a place."""
    return any(detect(location) for known, detect, _ in _FORMATS if known == name)


def is_stray(location: Location) -> bool:
    """Return whether nothing but some file of ``torch.save`` makes a place a checkpoint."""
    known = (detect for _, detect, _ in _FORMATS if detect is not _is_loose)
    return not any(detect(location) for detect in known) and _is_loose(location)


def detected(location: Location) -> str | None:
    """The format of what lies directly at a place."""
    return next((name for name, detect, _ in _FORMATS if detect(location)), None)


def read(location: Location, name: str, choice: Choice) -> Manifest:
    """What lies directly at a place, as a format of this name.

    Raises:
        ReshardError: whatever the format finds wrong.
    """
    reader = next(reader for known, _, reader in _FORMATS if known == name)
    return reader(location, choice)
