"""The registry: by which names each format is known, and its reader, imported when it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.formats import colossalai, deepspeed, huggingface, megatron, meta, nanotron, pytorch
from reshard.location import Place, directory
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


def _deepspeed(place: Place, choice: Choice) -> Manifest:
    from reshard.formats.deepspeed import reader
    from reshard.formats.pytorch import beside

    found = beside.with_companions(reader.read(place, choice.tag, choice.rules), place)
    return beside.with_run(found, Place([directory(found.origin.path)]))


def _megatron(place: Place, choice: Choice) -> Manifest:
    from reshard.formats.megatron import reader
    from reshard.formats.pytorch import beside

    return beside.with_run(reader.read(place, _table(megatron.NAME, choice)), place)


def _meta(place: Place, choice: Choice) -> Manifest:
    from reshard.formats.meta import reader

    return reader.read(place, _table(meta.NAME, choice))


def _table(name: str, choice: Choice) -> Table:
    from reshard.model_parallel.rules import builtin, with_users

    return with_users(builtin(name), choice.rules)


def _nanotron(place: Place, _choice: Choice) -> Manifest:
    from reshard.formats.nanotron import reader

    return reader.read(place)


def _colossalai(place: Place, choice: Choice) -> Manifest:
    from reshard.formats.colossalai import reader

    return reader.read(place, model=choice.model, wrap=choice.wrap)


def _pytorch(place: Place, choice: Choice) -> Manifest:
    from reshard.formats.pytorch import reader

    return reader.read(place, key=choice.key, model=choice.model, wrap=choice.wrap)


def _huggingface(place: Place, _choice: Choice) -> Manifest:
    from reshard.formats.huggingface import reader

    return reader.read(place)


def _is_pytorch(place: Place) -> bool:
    """What a trainer puts beside Megatron's iterations is no checkpoint of PyTorch's."""
    return not megatron.holds(place) and pytorch.detect(place)


def _is_loose(place: Place) -> bool:
    return not megatron.holds(place) and pytorch.detect_loosely(place)


_Reader = Callable[[Place, Choice], Manifest]
_FORMATS: tuple[tuple[str, Callable[[Place], bool], _Reader], ...] = (  # more particular ones first
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


def is_of(name: str, place: Place) -> bool:
    """Whether a checkpoint of the format of this name lies directly at a place."""
    return any(detect(place) for known, detect, _ in _FORMATS if known == name)


def is_stray(place: Place) -> bool:
    """Return whether nothing but some file of ``torch.save`` makes a place a checkpoint."""
    known = (detect for _, detect, _ in _FORMATS if detect is not _is_loose)
    return not any(detect(place) for detect in known) and _is_loose(place)


def detected(place: Place) -> str | None:
    """The format of what lies directly at a place."""
    return next((name for name, detect, _ in _FORMATS if detect(place)), None)


def read(place: Place, name: str, choice: Choice) -> Manifest:
    """What lies directly at a place, as a format of this name.

    Raises:
        ReshardError: whatever the format finds wrong.
    """
    reader = next(reader for known, _, reader in _FORMATS if known == name)
    return reader(place, choice)
