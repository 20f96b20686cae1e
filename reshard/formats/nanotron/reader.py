"""A step's directory as one manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from reshard import counts
from reshard.errors import CorruptError
from reshard.files import SourceFiles
from reshard.formats import safetensors, torch_file
from reshard.formats.json_files import json_object
from reshard.formats.nanotron import directory, layout, optimizer, slices, stages
from reshard.formats.nanotron.directory import METADATA, MODEL_CONFIG, Census, beside
from reshard.formats.nanotron.layout import Cut, Layout
from reshard.formats.nanotron.optimizer import Optimizer
from reshard.formats.nanotron.slices import Placed
from reshard.formats.nanotron.stages import Stage
from reshard.formats.place import Place
from reshard.formats.values import plain
from reshard.manifest import (
    PARAM,
    Chunk,
    Entry,
    Manifest,
    Origin,
    ParamGroup,
    SourceFile,
    TrainState,
    index_entries,
    most_common_dtype,
)
from reshard.pickles import trust

_TENSOR = "data"
_SIZES = {"pp": "pp_size", "dp": "dp_size", "tp": "tp_size", "ep": "expert_parallel_size"}
_NUMBER = re.compile(r"(\d+)")


def read(place: Place) -> Manifest:
    """The manifest of a step's directory, or of that of a file of it.

    Raises:
        CorruptError: its files contradict one another, or are of different grids or runs.
        IncompleteError: a rank's file is missing.
        UnsupportedError: a form of which nobody has seen a file.
    """
    census = directory.census(directory.locate(place) or place)
    files: dict[str, SourceFile] = {}
    places: dict[str, dict[tuple[int, int], Placed]] = {}
    cuts: dict[str, Cut | None] = {}
    weights = {fqn: _weight(census, fqn, files, places, cuts) for fqn in census.weights}
    with SourceFiles() as pool:
        found = optimizer.read(census, places, pool)
    files |= {file.path: file.source() for file in found.files}
    about = _json(census.place, METADATA)
    train = about.get("metas") if isinstance(about.get("metas"), dict) else {}
    opened = [torch_file.read(path) for path in census.schedulers]
    held = _stages(found, [plain(file.root) for file in opened])
    whole = stages.together(held)
    order, ordered = _order(weights, held, whole)
    versions = {"checkpoint": str(about["version"])} if "version" in about else {}
    return Manifest(
        origin=Origin(
            format=directory.NAME,
            path=str(census.place),
            detail="ZeRO stage 1" if census.is_zero else "",
            versions=versions,
            mesh=_mesh(census, about),
            precision=most_common_dtype(entry.dtype for entry in weights.values()),
        ),
        entries=index_entries([*(weights[fqn] for fqn in order), *found.entries]),
        files=files,
        train=TrainState(
            step=_count(train, "last_train_step"),
            samples=_count(train, "consumed_train_samples"),
            optimizer_step=found.steps,
            non_tensor_state=found.other,
            param_groups=whole.groups,
            scheduler=whole.scheduler,
            client={METADATA: about} if about else {},
            opaque={
                layout.KEY: Layout(
                    cuts=cuts,
                    stages=held,
                    config=_json(census.place, MODEL_CONFIG) or None,
                    unnamed=found.unnamed,
                    beside=beside(census.place),
                ),
            },
        ),
        trained_dtypes={fqn: entry.dtype for fqn, entry in weights.items()},
        warnings=tuple(_notes(census, found)),
        unknown_globals=trust.unknown(
            set().union(*(file.globals for file in [*found.files, *opened]))
        ),
        ordered=ordered,
    )


def _weight(
    census: Census,
    fqn: str,
    files: dict[str, SourceFile],
    places: dict[str, dict[tuple[int, int], Placed]],
    cuts: dict[str, Cut | None],
) -> Entry:
    """A parameter of all ranks; where each has its part of it, and why, is put beside.

    Raises:
        CorruptError: a file holds something else, or ranks contradict one another.
    """
    chunks: list[Chunk] = []
    first: Entry | None = None
    headers: list[Mapping[str, str]] = []
    for rank in census.weights[fqn]:
        file = safetensors.read(rank.path)
        files[file.source.path] = file.source
        headers.append(file.metadata)
        stored = file.tensors.get(_TENSOR)
        if stored is None or len(file.tensors) > 1:
            raise CorruptError(
                rank.path, f"holds {sorted(file.tensors)}, a weight of nanotron's is {_TENSOR!r}"
            )
        place = slices.of_header(file.source.path, file.metadata, stored.box.shape)
        places.setdefault(fqn, {})[rank.rank("tp"), rank.rank("exp")] = place
        entry = Entry(fqn, PARAM, stored.dtype, place.shape, ())
        first = first or entry
        if entry != first:
            raise CorruptError(
                rank.path,
                f"{fqn!r} is {entry.dtype} {entry.shape}, {first.dtype} {first.shape} in"
                f" {census.weights[fqn][0].path.name}",
                "files of different runs are mixed: fetch the checkpoint again as a whole",
            )
        chunks += place.chunks(stored)
    if first is None:  # a census lists no parameter without a file
        raise AssertionError(fqn)
    held = census.weights[fqn]
    if held[0].sizes:
        alike = len({rank.rank("pp") for rank in held}) == 1 and "exp" not in held[0].sizes
        stage = held[0].rank("pp")
        cuts[fqn] = layout.cut(fqn, first.shape, stage, headers) if alike else None
    return Entry(fqn, PARAM, first.dtype, first.shape, tuple(chunks))


def _json(place: Place, name: str) -> dict[str, Any]:
    """A file beside the weights; nothing where a save has none."""
    path = place.files.get(name)
    return json_object(path) if path else {}


def _stages(found: Optimizer, schedulers: Sequence[Any]) -> tuple[Stage, ...]:
    """What each pipeline stage trains, and by which schedule."""
    groups: Sequence[Sequence[ParamGroup]] = found.stages or [()] * bool(schedulers)
    one = schedulers[0] if len(schedulers) == 1 else None
    every = schedulers if len(schedulers) == len(groups) else [one] * len(groups)
    return tuple(Stage(tuple(g), each) for g, each in zip(groups, every, strict=True))


def _count(held: Mapping[str, Any] | None, name: str) -> int | None:
    found = (held or {}).get(name)
    return found if type(found) is int else None


def _mesh(census: Census, about: Mapping[str, Any]) -> dict[str, int]:
    """The grid: file names have what is on disk, the two descriptions also copies that are not."""
    sizes = dict.fromkeys(("pp", "dp", "cp", "tp", "ep"), 1)
    sharded = [file for files in census.weights.values() for file in files]
    for file in (*sharded, *census.optimizer):
        sizes.update({"ep" if axis == "exp" else axis: n for axis, n in file.sizes.items()})
    sizes |= {axis: n for axis in sizes if (n := _count(about, axis))} | _sizes(census.place)
    return {"world": prod(sizes.values())} | {axis: n for axis, n in sizes.items() if n > 1}


def _sizes(place: Place) -> dict[str, int]:
    """``optimizer_config.json``, which has its numbers as text."""
    folder = place.folders.get("optimizer")
    path = folder.files.get("optimizer_config.json") if folder else None
    held = json_object(path).get("parallelism") if path else None
    if not isinstance(held, dict):
        return {}
    return {
        axis: size
        for axis, name in _SIZES.items()
        if (size := counts.natural(str(held.get(name)))) is not None
    }


def _order(
    weights: Mapping[str, Entry], held: Sequence[Stage], whole: Stage
) -> tuple[Sequence[str], bool]:
    """The weights in the model's order, and whether it is known: groups of one each keep it."""
    fqns = [fqn for group in whole.groups for fqn in group.fqns]
    in_order = len(whole.groups) == 1 or stages.is_one_each(held)
    if in_order and len(fqns) == len(weights) and set(fqns) == set(weights):
        return fqns, True
    return sorted(weights, key=_natural), False


def _natural(fqn: str) -> list[tuple[int, str]]:
    """So that layer 10 follows layer 9."""
    parts = (part.lstrip("0") if part.isdecimal() else part for part in _NUMBER.split(fqn))
    return [(len(part) if part.isdecimal() or not part else -1, part) for part in parts]


def _notes(census: Census, found: Optimizer) -> Iterator[str]:
    if found.unnamed:
        yield (
            f"{found.unnamed} parameters without state (never stepped) have no name in the"
            " optimizer: they are in no param group here"
        )
    random = census.place.folders.get("random")
    if random and random.files:
        yield f"the random states of {len(random.files)} ranks are not read (random/)"
