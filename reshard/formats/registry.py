"""The registry: every format that is known, and the choice of one for a location.

A format is a package here with a module ``format`` that declares ``FORMAT``, or an entry point of
the group ``reshard.formats`` that a third party's package declares.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain, takewhile

from reshard.core.location import Location
from reshard.core.manifest import Manifest
from reshard.errors import UsageError
from reshard.formats.base import Format, ReadHints, Source, Writer
from reshard.system.paths import as_path

ENTRY_POINTS = "reshard.formats"
MODEL = "huggingface"  # the format of a model's files, which `merge` writes
# More particular formats come first: the first one that detects a checkpoint reads it.
_PACKAGES = ("deepspeed", "megatron", "meta", "colossalai", "pytorch", MODEL)
_UNKNOWN = Source()
_ADDED: list[Format] = []


@cache
def list_built_in_formats() -> tuple[Format, ...]:
    """Return the formats of this project that are installed, more particular ones first."""
    loaded = (
        importlib.import_module(f"{__package__}.{name}.format").FORMAT
        for name in _PACKAGES
        if _is_installed(name)
    )
    return tuple(candidate for candidate in loaded if all(map(_is_installed, candidate.requires)))


def _is_installed(name: str) -> bool:
    return (as_path(__file__).parent / name).is_dir()


def _list_extensions() -> tuple[Format, ...]:
    return (*_ADDED, *_load_extensions())


@contextmanager
def add_format(added: Format) -> Iterator[None]:
    """Register a format that no installed package declares, for the duration of a block."""
    is_known = added in list_formats()
    if not is_known:
        _ADDED.append(added)
    try:
        yield
    finally:  # nested blocks may add the same format: only the outermost removes it
        if not is_known:
            _ADDED.remove(added)


@cache
def _load_extensions() -> tuple[Format, ...]:
    # The metadata of packages is read here: to import importlib.metadata takes longer than to read
    # a small checkpoint.
    declared = dict.fromkeys(chain.from_iterable(map(_list_declared, sys.path)))
    return tuple(_load_extension(name, target) for name, target in declared)


def _list_declared(folder: str) -> Iterator[tuple[str, str]]:
    """Yield (name, "module:object") of the group's entry points in a folder of ``sys.path``."""
    # An empty entry of ``sys.path`` stands for the working directory.
    for path in as_path(folder or ".").glob("*-info/entry_points.txt"):
        _, _, text = path.read_bytes().partition(f"[{ENTRY_POINTS}]\n".encode())
        lines = takewhile(lambda line: not line.startswith("["), text.decode().splitlines())
        for name, is_one, target in (line.partition("=") for line in lines):
            if is_one and not name.startswith("#"):
                yield name.strip(), target.strip()


def _load_extension(name: str, target: str) -> Format:
    where = f"entry point {name!r} of {ENTRY_POINTS}"
    advice = "repair or uninstall the package that declares it"
    module, _, attribute = target.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the import of a stranger's package raises
        raise UsageError(where, f"cannot be imported: {error}", advice) from error
    if not isinstance(loaded, Format):
        raise UsageError(where, f"is a {type(loaded).__name__}, expected a Format", advice)
    return loaded


def _iterate_formats() -> Iterator[Format]:
    """Yield all formats; those of other packages, which are slow to look up, only if needed."""
    yield from list_built_in_formats()
    yield from _list_extensions()


def list_formats() -> tuple[Format, ...]:
    """Return all formats."""
    return tuple(_iterate_formats())


def list_names() -> tuple[str, ...]:
    """Return the names of all formats, sorted: the choices of ``--from``."""
    return tuple(sorted({known.name for known in list_formats()}))


def list_built_in_names() -> tuple[str, ...]:
    """Return the names of the formats of this project, sorted."""
    return tuple(sorted(known.name for known in list_built_in_formats()))


def find_format(name: str) -> Format | None:
    """Return the format with a name, or None."""
    return next((known for known in _iterate_formats() if known.name == name), None)


def get_format(name: str) -> Format:
    """Return the format with a name.

    Raises:
        UsageError: there is none.
    """
    known = find_format(name)
    if known is None:
        raise UsageError(f"--from {name}", f"formats are {', '.join(list_names())}")
    return known


def list_writers() -> dict[str, Writer]:
    """Return all writers by name: the choices of ``--to``."""
    return {writer.name: writer for known in list_formats() for writer in known.writers}


def list_built_in_writers() -> dict[str, Writer]:
    """Return the writers of this project by name."""
    return {writer.name: writer for known in list_built_in_formats() for writer in known.writers}


def list_writers_using(option: str) -> list[str]:
    """Return the layouts that use an option; empty for one that all of them use."""
    return [writer.name for writer in list_writers().values() if option in writer.options]


def list_built_in_writers_using(option: str) -> list[str]:
    """Return those of this project that use an option."""
    return [writer.name for writer in list_built_in_writers().values() if option in writer.options]


def find_writer(name: str) -> Writer:
    """Return the writer with a name.

    Raises:
        UsageError: there is none.
    """
    writers = (writer for known in _iterate_formats() for writer in known.writers)
    writer = next((writer for writer in writers if writer.name == name), None)
    if writer is None:
        raise UsageError(f"--to {name}", f"layouts are {', '.join(list_writers())}")
    return writer


def describe_source(manifest: Manifest) -> Source:
    """Return what is known about checkpoints of a manifest's format."""
    name = manifest.origin.format
    sources = (candidate.sources for candidate in _iterate_formats())
    source = next((known[name] for known in sources if name in known), _UNKNOWN)
    if source.choose_writer is None:
        return source
    return replace(source, writer=source.choose_writer(manifest))


def detects(name: str, location: Location) -> bool:
    """Return whether the named format, if it is known, detects a checkpoint at a location."""
    known = find_format(name)
    return known is not None and (_detects(known, location) or _detects_loosely(known, location))


def _detects(candidate: Format, location: Location) -> bool:
    return not _is_claimed(candidate, location) and candidate.detect(location)


def _detects_loosely(candidate: Format, location: Location) -> bool:
    detect = candidate.detect_loosely
    return detect is not None and not _is_claimed(candidate, location) and detect(location)


def _is_claimed(candidate: Format, location: Location) -> bool:
    """Return whether a format is not looked for, since a run of another format is there."""
    return candidate.yields_to_runs and any(
        other.claims is not None and other.claims(location) for other in _iterate_formats()
    )


def _find_strictly(location: Location) -> Iterator[Format]:
    built_in = list_built_in_formats()
    yield from (known for known in built_in if not known.is_generic and _detects(known, location))
    yield from (known for known in _list_extensions() if _detects(known, location))
    yield from (known for known in built_in if known.is_generic and _detects(known, location))


def _find_loosely(location: Location) -> Iterator[Format]:
    yield from (known for known in _iterate_formats() if _detects_loosely(known, location))


def detects_extension(location: Location) -> bool:
    """Return whether a format of another package detects a checkpoint at a location."""
    return any(_detects(extension, location) for extension in _list_extensions())


def is_loose(location: Location) -> bool:
    """Return whether only ``detect_loosely`` of some format finds a checkpoint at a location."""
    strictly = next(_find_strictly(location), None)
    return strictly is None and next(_find_loosely(location), None) is not None


def detect(location: Location) -> str | None:
    """Return the name of the format of the checkpoint directly at a location, or None."""
    found = next(chain(_find_strictly(location), _find_loosely(location)), None)
    return found.name if found else None


def read(location: Location, name: str, hints: ReadHints) -> Manifest:
    """Read the checkpoint directly at a location, as the named format.

    Raises:
        UsageError: there is no such format.
        ReshardError: the checkpoint cannot be read; see `errors`.
    """
    manifest = get_format(name).read(location, hints)
    return replace(manifest, may_be_ddp=manifest.may_be_ddp and manifest.origin.facts.wraps_ddp)
