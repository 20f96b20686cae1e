"""Checkpoints of ColossalAI's Booster: weights under an index, and an optimizer by number beside.

Tensor, sequence and ZeRO parallelism are gathered before anything is saved, and padding rows are
cut off: files hold whole tensors. ``save_model(shard=True)`` writes
``pytorch_model.bin.index.json`` (or ``model.safetensors.index.json``) with its shards,
``save_optimizer(shard=True)``
``pytorch_optim.bin.index.json`` (number -> shard) with ``pytorch_optim_group.bin``; with pipeline
parallelism the shards are ``...-stage-000SS-shard-000NN.bin``. Both lie in one directory or, as its
examples have it, in ``modeling/`` and ``optimizer/`` with ``lr_scheduler`` and
``running_states.json`` beside. Numbers count the parameters of the unsharded model's param groups.

Source: ColossalAI 0.5.0 ``checkpoint_io/general_checkpoint_io.py``,
``checkpoint_io/hybrid_parallel_checkpoint_io.py``, ``checkpoint_io/utils.py``,
``booster/plugin/hybrid_parallel_plugin.py`` (get_param_info); ``applications/Colossal-LLaMA``
(``ckpt_io.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard import counts
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats import huggingface, torch_file
from reshard.formats.place import Place
from reshard.formats.state_dict import assemble, tree
from reshard.formats.state_dict.found import Found
from reshard.formats.state_dict.tree import Logical
from reshard.manifest import Entry, Manifest, Origin
from reshard.model import Told
from reshard.schema import COUNT, expect, fields, mapping, sequence

NAME = "colossalai"

_INDEX = re.compile(r"(?:pytorch_optim(?:\..+)?\.bin|optimizer(?:\..+)?\.safetensors)\.index\.json")
_STAGE = re.compile(r"-stage-(\d+)-")
_SHARD = mapping(COUNT, mapping())
_GROUPS = sequence(fields(params=sequence(COUNT)))
_SCHEDULER, _RUNNING = "lr_scheduler", "running_states.json"


def detect(place: Place) -> bool:
    """Whether such an optimizer lies here or one folder below, or this is its index."""
    if place.chosen:
        return _INDEX.fullmatch(place.chosen) is not None
    return _optimizer_at(place) is not None and _weights_at(place) is not None


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
    if _weights_at(place) is None:
        place = place.above()
    weights, states = _weights_at(place), _optimizer_at(place)
    if weights is None or states is None:
        raise IncompleteError(
            place, "holds an optimizer of ColossalAI and no weights", "give the directory of both"
        )
    made = huggingface.read(weights)
    stages = {chunk.file for entry in made.entries.values() for chunk in entry.chunks}
    pipeline = len({match[1] for file in stages if (match := _STAGE.search(Path(file).name))})
    entries = sorted(made.entries.values(), key=_stage)
    root: dict[str, Any] = {
        "model": {e.fqn: Logical(e.dtype, e.shape, tuple(e.chunks)) for e in entries}
    }
    found = Found(root, str(place), dict(made.files), globals=set(made.unknown_globals))
    root["optimizer"] = _optimizer(states, found)
    scheduler = place.files.get(_SCHEDULER)
    if scheduler and torch_file.is_torch_file(scheduler):
        root[_SCHEDULER] = _opened(scheduler, found)
    read = assemble.manifest(
        found,
        Origin(format=NAME, path=str(place), mesh=_mesh(pipeline)),
        told=Told(model, wrap) if model else None,
    )
    running = place.files.get(_RUNNING)  # its step is counted from the epoch's first
    if running is None:
        return read
    client = {**read.train.client, _RUNNING: huggingface.json_object(running)}
    return replace(read, train=replace(read.train, client=client))


def _mesh(pipeline: int) -> dict[str, int]:
    """Files are whole: what they tell of the grid is how many stages there were."""
    return {"world": pipeline, "pp": pipeline} if pipeline > 1 else {"world": 1}


def _places(place: Place) -> Iterator[Place]:
    yield place
    yield from place.folders.values()


def _optimizer_at(place: Place) -> Place | None:
    return next((p for p in _places(place) if any(map(_INDEX.fullmatch, p.files))), None)


def _weights_at(place: Place) -> Place | None:
    return next((p for p in _places(place) if huggingface.index_of(p)), None)


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
    path = next(path for name, path in place.files.items() if _INDEX.fullmatch(name))
    if path.name.startswith("optimizer"):
        raise UnsupportedError(
            path,
            "is of an optimizer that was saved asynchronously, as safetensors with pickles inside",
            "save it without use_async; the weights by themselves are read from their directory",
        )
    index = huggingface.json_object(path)
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
