"""The conformance kit: it checks a format on checkpoints that its author has.

    from reshard.testing import Example, check_format

    def test_my_format():
        check_format(FORMAT, [Example(path, weights)], tmp_path)

An example is a checkpoint that the real framework wrote, with the values that the framework itself
reports. Files that reshard wrote show nothing: an error in a reader and in its writer cancel out.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard import api, formats
from reshard.core.manifest import Manifest
from reshard.errors import NOT_UNDERSTOOD, ReshardError, UnrecognisedError
from reshard.formats import registry
from reshard.formats.base import Format
from reshard.system.paths import as_path
from reshard.units import abridge

if TYPE_CHECKING:
    from torch import Tensor

_HEAD = 4096  # bytes of a file in which its headers are altered
_CASES = 6  # altered copies per file


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A checkpoint of the format, and the values that the framework reports for it.

    Args:
        path: the checkpoint, as a user gives it.
        weights: fqn -> value of every weight, from the framework.
        slots: optimizer slot -> fqn -> value, from the framework; empty: not compared.
        world_sizes: rank counts to which the checkpoint is split, and back to its own.
        merge_options: options of ``reshard merge`` with which the weights are compared.
        split_options: options of ``reshard split`` that the splits need.
    """

    path: Path
    weights: Mapping[str, Tensor]
    slots: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    world_sizes: Sequence[int] = ()
    merge_options: Mapping[str, Any] = field(default_factory=dict)
    split_options: Mapping[str, Any] = field(default_factory=dict)


def check_format(
    candidate: Format, examples: Iterable[Example], directory: Path, *, seed: int = 0
) -> None:
    """Check a format on real checkpoints, sound and damaged.

    For each example: the format is found without ``--from``; its manifest covers every element
    once; the merged weights and the slots are the framework's, bit for bit; a split to other ranks
    and back is the same state; and a truncated, altered or missing file is refused with an error
    of `reshard.errors` that the reader itself raises, or the same tensors are read.

    Args:
        candidate: the format; it need not be registered.
        directory: an empty directory for copies.
        seed: the seed of the random damage.

    Raises:
        AssertionError: a check failed; the message names every one that did.
    """
    problems: list[str] = []
    with registry.add_format(candidate):
        for number, example in enumerate(examples):
            folder = directory / str(number)
            folder.mkdir(parents=True)
            for name, run in _CHECKS.items():
                problems += [
                    f"{example.path}: {name}: {each}" for each in run(candidate, example, folder)
                ]
            problems += [
                f"{example.path}: damage: {each}"
                for each in _check_damage(candidate, example, folder, random.Random(seed))  # noqa: S311 - reproducible damage
            ]
    if problems:
        raise AssertionError("\n".join(problems))


def _read(candidate: Format, path: Path) -> Manifest:
    manifest = formats.read(path)
    if manifest.origin.format not in candidate.sources:
        raise UnrecognisedError(path, f"is a {manifest.origin.format} checkpoint")
    return manifest


def _check_detection(candidate: Format, example: Example, _folder: Path) -> Iterator[str]:
    manifest = formats.read(example.path)
    if manifest.origin.format not in candidate.sources:
        yield f"read as {manifest.origin.format}, expected one of {', '.join(candidate.sources)}"
    for name in manifest.files:
        if not as_path(name).exists():
            yield f"the manifest lists {name}, which does not exist"


def _check_merge(_candidate: Format, example: Example, folder: Path) -> Iterator[str]:
    api.merge(example.path, folder / "merged.safetensors", **example.merge_options)
    with api.open(folder / "merged.safetensors") as merged:
        yield from _compare({name: merged[name][...] for name in merged}, example.weights)


def _check_slots(_candidate: Format, example: Example, _folder: Path) -> Iterator[str]:
    with api.open(example.path) as source:
        for slot, values in example.slots.items():
            stored = source.optimizer(slot)
            actual = {name: stored[name][...] for name in stored}
            yield from (f"{slot} of {each}" for each in _compare(actual, values))


def _compare(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[str]:
    import torch

    if actual.keys() != expected.keys():
        yield (
            f"names: only found {abridge(sorted(actual.keys() - expected.keys()))},"
            f" only expected {abridge(sorted(expected.keys() - actual.keys()))}"
        )
    for name in actual.keys() & expected.keys():
        ours, theirs = actual[name], expected[name]
        if ours.dtype != theirs.dtype:
            yield f"{name} is {ours.dtype}, expected {theirs.dtype}"
        elif not torch.equal(ours, theirs):
            yield f"{name} has other values"


def _check_round_trips(_candidate: Format, example: Example, folder: Path) -> Iterator[str]:
    """Yield the states that differ after a split to other ranks, or after the way back."""
    manifest = api.inspect(example.path).manifest
    ranks = manifest.origin.world
    # `split` writes no files that the reader does not use, and its report lists them.
    unread = {re.escape(name.partition("/")[0]) for name in manifest.unread_files}
    for world_size in example.world_sizes:
        there, back = folder / f"to_{world_size}", folder / f"from_{world_size}"
        api.split(example.path, there, world_size=world_size, **example.split_options)
        api.split(there, back, world_size=ranks, **example.split_options)
        for path in (there, back):
            report = api.diff(example.path, path, ignore=sorted(unread))
            if not report.same:
                yield f"{ranks} -> {world_size}: {'; '.join(report.lines())}"


_Check = Callable[[Format, Example, Path], Iterator[str]]
_CHECKS: dict[str, _Check] = {
    "detection": _check_detection,
    "merge": _check_merge,
    "optimizer": _check_slots,
    "round trip": _check_round_trips,
}


def _check_damage(
    candidate: Format, example: Example, folder: Path, rng: random.Random
) -> Iterator[str]:
    """Yield the damage that leads neither to an error of reshard nor to an equal manifest."""
    sound = _summarize(_read(candidate, example.path))
    # Sorted, so that a seed gives the same damage on every file system.
    files = [example.path] if example.path.is_file() else sorted(_list_files(example.path))
    copy = folder / "damaged" / example.path.name
    for file in files:
        name = file.relative_to(example.path)  # "." of a checkpoint that is one file
        for damage in _list_damage(file, rng):
            _copy(example.path, copy)
            damage.apply(copy / name if copy.is_dir() else copy)
            try:
                read = _summarize(_read(candidate, copy))
                # An altered byte can be a name or a shape that is as valid as the old one.
                if damage.at is None and read != sound:
                    yield f"{file.name} {damage}: read as another state, without an error"
            except ReshardError as error:
                if error.problem.startswith(NOT_UNDERSTOOD):
                    yield f"{file.name} {damage}: the reader did not check a value: {error}"
            finally:
                shutil.rmtree(copy.parent)


def _list_files(path: Path) -> Iterator[Path]:
    yield from (each for each in path.rglob("*") if each.is_file())


@dataclass(frozen=True, slots=True)
class _Damage:
    """One way to damage a file: remove it, cut it off at ``size``, or alter the byte ``at``."""

    size: int | None = None
    at: int | None = None

    def __str__(self) -> str:
        if self.at is not None:
            return f"altered at byte {self.at}"
        return "missing" if self.size is None else f"cut off at {self.size} bytes"

    def apply(self, path: Path) -> None:
        if self.at is not None:
            data = bytearray(path.read_bytes())
            data[self.at] ^= 0xFF
            path.write_bytes(data)
        elif self.size is None:
            path.unlink()
        else:
            os.truncate(path, self.size)


def _list_damage(file: Path, rng: random.Random) -> Iterator[_Damage]:
    size = file.stat().st_size
    yield _Damage()
    yield _Damage(size=0)
    for _ in range(_CASES if size else 0):
        yield _Damage(size=rng.randrange(size))
        yield _Damage(at=rng.randrange(min(size, _HEAD)))


def _copy(source: Path, destination: Path) -> None:
    destination.parent.mkdir()
    if source.is_file():
        shutil.copyfile(source, destination)
    else:
        shutil.copytree(source, destination)


def _summarize(manifest: Manifest) -> object:
    return {key: (entry.shape, entry.dtype.name) for key, entry in manifest.entries.items()}
