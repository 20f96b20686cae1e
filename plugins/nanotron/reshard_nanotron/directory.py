"""The files of a nanotron checkpoint by parameter and rank.

``model/<module>/.../model_<leaf>[_pp-rank-P-of-N_tp-rank-T-of-N[_exp-rank-E-of-N]].safetensors``,
``optimizer/optimizer_pp-P-of-N[_dp-D-of-N]_tp-T-of-N_exp-E-of-N.pt`` (with ``dp`` if ZeRO-1 cut
it), ``lr_scheduler/`` and ``random/`` with one file per rank, and ``checkpoint_metadata.json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

from reshard.core.box import index_of
from reshard.core.location import Location
from reshard.errors import FETCH_MISSING, MIXED, CorruptError, IncompleteError

NAME = "nanotron"
METADATA = "checkpoint_metadata.json"
MODEL_CONFIG = "model_config.json"
TRACKER = "latest.txt"  # in a run directory
TABLE = Path(__file__).parent / "nanotron.yaml"  # nanotron's names of a Llama and a Qwen2
AXES = ("pp", "dp", "tp", "exp")

SCHEDULER = "lr_scheduler"
_MODEL, _OPTIMIZER = "model", "optimizer"
_WEIGHTS = re.compile(
    r"model_(?P<leaf>.+?)"
    r"(?P<ranks>_pp-rank-\d+-of-\d+_tp-rank-\d+-of-\d+(?:_exp-rank-\d+-of-\d+)?)?\.safetensors"
)
_STATES = re.compile(r"optimizer(?P<ranks>_pp-\d+-of-\d+(?:_dp-\d+-of-\d+)?_tp-\d+-of-\d+.*)\.pt")
_SCHEDULERS = re.compile(
    r"lr_scheduler(?P<ranks>_pp-\d+-of-\d+(?:_dp-\d+-of-\d+)?_tp-\d+-of-\d+.*)\.pt"
)
_RANK = re.compile(r"(pp|dp|tp|exp)(?:-rank)?-(\d+)-of-(\d+)")
_DEPTH = 12  # maximum nesting of modules


@dataclass(frozen=True, slots=True)
class NamedFile:
    """One rank's file, with its rank on each axis that its name has."""

    path: Path
    ranks: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def rank(self, axis: str) -> int:
        """Return the rank on an axis; 0 if the name does not have the axis."""
        return self.ranks.get(axis, 0)


class CheckpointFiles(NamedTuple):
    """The files of a checkpoint.

    Args:
        weights: fqn -> its files; a file whose name has no rank stores the whole tensor.
        optimizer: the files of all ranks; only of the first ``dp`` rank if ZeRO-1 did not cut it.
        schedulers: one file per pipeline stage, whose ranks step together.
    """

    location: Location
    weights: Mapping[str, tuple[NamedFile, ...]]
    optimizer: tuple[NamedFile, ...]
    schedulers: tuple[Path, ...]

    @property
    def is_zero(self) -> bool:
        """Whether ZeRO-1 cut the optimizer."""
        return any("dp" in file.ranks for file in self.optimizer)


def detect(location: Location) -> bool:
    """Return whether this directory, or the one around this file, is a checkpoint of nanotron."""
    return locate(location) is not None


def is_run(location: Location) -> bool:
    """Return whether a location is a run directory of nanotron, which may have other files."""
    return TRACKER in location.files and any(map(detect, location.folders.values()))


def locate(location: Location) -> Location | None:
    """Return the step's directory: this one, or the one that contains the chosen file."""
    if location.chosen is None:
        return location if _holds_weights(location.folders.get(_MODEL), _DEPTH) else None
    if not (_WEIGHTS.fullmatch(location.chosen) or _STATES.fullmatch(location.chosen)):
        return None
    above = location
    for _ in range(_DEPTH):
        # Resolved, because the parent of the relative path "." is "." again.
        inside, above = (
            above.name,
            Location([d.resolve().parent for d in above.directories], inner=True),
        )
        # A module of the model may be called "model", too: the outermost such folder counts.
        outermost = inside in (_MODEL, _OPTIMIZER) and above.name != _MODEL
        if outermost and _holds_weights(above.folders.get(_MODEL), _DEPTH):
            return above
    return None


def _holds_weights(location: Location | None, depth: int) -> bool:
    if location is None or depth == 0:
        return False
    if any(map(_WEIGHTS.fullmatch, location.files)):
        return True
    return any(_holds_weights(folder, depth - 1) for folder in location.folders.values())


def list_other_files(location: Location) -> tuple[str, ...]:
    """Return the names of other files in the step's directory: configuration, random states."""
    known = (METADATA, MODEL_CONFIG, _MODEL, _OPTIMIZER, SCHEDULER)
    return tuple(sorted(name for name in (*location.files, *location.folders) if name not in known))


def list_files(location: Location) -> CheckpointFiles:
    """Return the files of a checkpoint, after a check that none is missing."""
    weights = {
        fqn: _require_all_ranks(fqn, files, ("tp", "exp"))
        for fqn, files in sorted(
            _find_weights(location.folders[_MODEL], ()), key=lambda item: item[0]
        )
    }
    folder = location.folders.get(_OPTIMIZER)
    states = [] if folder is None else [*_find_ranked(folder, _STATES)]
    optimizer = _require_all_ranks("optimizer", states, AXES)
    return CheckpointFiles(
        location, weights, optimizer, _choose_schedulers(location.folders.get(SCHEDULER))
    )


def _choose_schedulers(folder: Location | None) -> tuple[Path, ...]:
    if folder is None:
        return ()
    ranked = _require_all_ranks("scheduler", [*_find_ranked(folder, _SCHEDULERS)], AXES)
    if not ranked:
        return tuple(folder.files.values())[:1]
    by_stage: dict[int, Path] = {}
    # Files are in rank order, so `setdefault` keeps the first rank's.
    for file in ranked:
        by_stage.setdefault(file.rank("pp"), file.path)
    return tuple(by_stage.values())


def _find_weights(
    location: Location, modules: tuple[str, ...]
) -> Iterator[tuple[str, list[NamedFile]]]:
    by_leaf: dict[str, list[NamedFile]] = {}
    for name, path in location.files.items():
        if match := _WEIGHTS.fullmatch(name):
            by_leaf.setdefault(match["leaf"], []).append(_parse_file(path, match["ranks"]))
    for leaf, files in by_leaf.items():
        yield ".".join((*modules, leaf)), files
    for name, folder in location.folders.items():
        yield from _find_weights(folder, (*modules, name))


def _find_ranked(location: Location, pattern: re.Pattern[str]) -> Iterator[NamedFile]:
    for name, path in location.files.items():
        if match := pattern.fullmatch(name):
            yield _parse_file(path, match["ranks"])


def _parse_file(path: Path, text: str | None) -> NamedFile:
    axes = [(axis, int(rank), int(size)) for axis, rank, size in _RANK.findall(text or "")]
    return NamedFile(path, {a: rank for a, rank, _ in axes}, {a: size for a, _, size in axes})


def _require_all_ranks(
    what: str, files: list[NamedFile], axes: tuple[str, ...]
) -> tuple[NamedFile, ...]:
    if not files:
        return ()
    first = files[0]
    for file in files:
        if file.sizes != first.sizes:
            raise CorruptError(
                file.path,
                f"belongs to a grid of {_describe_grid(file)}, but {first.path.name} to another",
                MIXED,
            )
    present = [axis for axis in axes if axis in first.sizes]
    existing = {tuple(file.rank(axis) for axis in present) for file in files}
    grid = [first.sizes[axis] for axis in present]
    for number in range(prod(grid)):
        if (ranks := index_of(number, grid)) not in existing:
            missing = ", ".join(f"{axis} {rank}" for axis, rank in zip(present, ranks, strict=True))
            raise IncompleteError(
                first.path.parent,
                f"has no {what} file of rank {missing}",
                FETCH_MISSING,
            )
    return tuple(sorted(files, key=lambda file: [file.rank(axis) for axis in AXES]))


def _describe_grid(file: NamedFile) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in file.sizes.items()) or "one rank"
