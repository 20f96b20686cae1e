"""Weights, optimizer, scheduler and running states, as one manifest."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard import counts
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats import torch_file
from reshard.formats.colossalai.directory import INDEX, NAME, optimizer_at, weights_at
from reshard.formats.huggingface import reader as of_huggingface
from reshard.formats.json_files import json_object
from reshard.formats.place import Place
from reshard.formats.state_dict import assemble, tree
from reshard.formats.state_dict.found import Found
from reshard.formats.state_dict.tree import Logical
from reshard.formats.torch_saves import is_torch_file
from reshard.manifest import Entry, Manifest, Origin
from reshard.model import ModelHint
from reshard.schema import COUNT, expect, fields, mapping, sequence

_STAGE = re.compile(r"-stage-(\d+)-")
_SHARD = mapping(COUNT, mapping())
_GROUPS = sequence(fields(params=sequence(COUNT)))
_SCHEDULER, _RUNNING = "lr_scheduler", "running_states.json"


def read(place: Place, *, model: str | None = None, wrap: str | None = None) -> Manifest:
    """Read weights, optimizer, scheduler and running states.

    Args:
        model: what the user says of the model, where order and shapes do not name every number.

    Raises:
        IncompleteError: a shard, or the weights, are missing.
        CorruptError: shards and index contradict each other.
        UnsupportedError: it was saved asynchronously.
    """
    if place.chosen:
        place = Place(place.directories)
    if weights_at(place) is None:
        place = place.above()
    weights, states = weights_at(place), optimizer_at(place)
    if weights is None or states is None:
        raise IncompleteError(
            place, "holds an optimizer of ColossalAI and no weights", "give the directory of both"
        )
    made = of_huggingface.read(weights)
    stages = {chunk.file for entry in made.entries.values() for chunk in entry.chunks}
    pipeline = len({match[1] for file in stages if (match := _STAGE.search(Path(file).name))})
    entries = sorted(made.entries.values(), key=_stage)
    root: dict[str, Any] = {
        "model": {e.fqn: Logical(e.dtype, e.shape, tuple(e.chunks)) for e in entries}
    }
    found = Found(root, str(place), dict(made.files), globals=set(made.unknown_globals))
    root["optimizer"] = _optimizer(states, found)
    scheduler = place.files.get(_SCHEDULER)
    if scheduler and is_torch_file(scheduler):
        root[_SCHEDULER] = _opened(scheduler, found)
    read = assemble.manifest(
        found,
        Origin(format=NAME, path=str(place), mesh=_mesh(pipeline)),
        model_hint=ModelHint(model, wrap) if model else None,
    )
    running = place.files.get(_RUNNING)  # its step is counted from the epoch's first
    if running is None:
        return read
    client = {**read.train.client, _RUNNING: json_object(running)}
    return replace(read, train=replace(read.train, client=client))


def _mesh(pipeline: int) -> dict[str, int]:
    """Files are whole: what they tell of the grid is how many stages there were."""
    return {"world": pipeline, "pp": pipeline} if pipeline > 1 else {"world": 1}


def _stage(entry: Entry) -> int:
    """The stage that saved it: a final index lists the stages in any order, each in the model's."""
    match = _STAGE.search(Path(entry.chunks[0].file).name) if entry.chunks else None
    return int(match[1]) if match else 0


def _optimizer(place: Place, found: Found) -> dict[str, Any]:
    """The state dict that its shards and its file of groups are.

    Raises:
        IncompleteError: one of them is missing.
        CorruptError: the index lists numbers that no shard holds.
        UnsupportedError: it was saved asynchronously.
    """
    path = next(path for name, path in place.files.items() if INDEX.fullmatch(name))
    if path.name.startswith("optimizer"):
        raise UnsupportedError(
            path,
            "is of an optimizer that was saved asynchronously, as safetensors with pickles inside",
            "save it without use_async; the weights by themselves are read from their directory",
        )
    index = json_object(path)
    listed, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(listed, dict) or not isinstance(metadata, dict):
        raise CorruptError(path, "is not an index: no weight_map, or no metadata")
    state: dict[int, dict[str, Any]] = {}
    for name in sorted({str(shard) for shard in listed.values()}):
        shard = _file(place, path, name)
        held = _opened(shard, found)
        expect(shard, held, _SHARD)
        state.update(held)
    numbers = {key: counts.natural(key) for key in listed}
    lost = [key for key, number in numbers.items() if number is not None and number not in state]
    if lost:
        raise CorruptError(path, f"lists the state of parameter {lost[0]}, which no shard holds")
    shared = _file(place, path, str(metadata.get("param_groups")))
    groups = _opened(shared, found)
    expect(shared, groups, _GROUPS)
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _file(place: Place, index: Path, name: str) -> Path:
    path = place.files.get(name)
    if path is None:
        raise IncompleteError(index, f"names {name}, which is missing", "fetch that file")
    return path


def _opened(path: Path, found: Found) -> Any:
    file = torch_file.read(path)
    found.files[file.path] = file.source()
    found.globals |= file.globals
    return tree.of_file(file)
