"""Read weights, optimizer, scheduler and running states into one manifest."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.json_files import read_json_object
from reshard.containers.torch_detect import is_torch_file
from reshard.core import counts
from reshard.core.location import Location
from reshard.core.manifest import Entry, Manifest, Origin
from reshard.core.schema import COUNT, expect, fields, mapping, sequence
from reshard.errors import MIXED, CorruptError, IncompleteError, UnsupportedError
from reshard.formats.colossalai.directory import (
    INDEX,
    NAME,
    RUNNING,
    SCHEDULER,
    find_optimizer,
    find_weights,
)
from reshard.formats.huggingface import reader as huggingface
from reshard.model import ModelHint
from reshard.state_dict import assemble, tree
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import ParsedTree

_STAGE = re.compile(r"-stage-(\d+)-")
_SHARD = mapping(COUNT, mapping())
_GROUPS = sequence(fields(params=sequence(COUNT)))


def read(location: Location, *, model: str | None = None, wrap: str | None = None) -> Manifest:
    """Read weights, optimizer, scheduler and running states.

    Args:
        model: the user's description of the model, if order and shapes do not name every number.

    Raises:
        IncompleteError: a shard, or the weights, are missing.
        CorruptError: shards and index contradict each other.
        UnsupportedError: the checkpoint was saved asynchronously.
    """
    location = location.folder
    # The user may pass the optimizer's folder, whose sibling has the weights.
    if find_weights(location) is None:
        location = location.get_parent()
    weights, states = find_weights(location), find_optimizer(location)
    if weights is None or states is None:
        raise IncompleteError(
            location,
            "contains a ColossalAI optimizer but no weights",
            "pass the directory that contains both",
        )
    saved = huggingface.read(weights)
    stages = {chunk.file for entry in saved.entries.values() for chunk in entry.chunks}
    pipeline = len({match[1] for file in stages if (match := _STAGE.search(Path(file).name))})
    entries = sorted(saved.entries.values(), key=_find_stage)
    root: dict[str, Any] = {
        "model": {e.fqn: GlobalTensor(e.dtype, e.shape, tuple(e.chunks)) for e in entries}
    }
    parsed = ParsedTree(
        root,
        str(location),
        dict(saved.files),
        globals=set(saved.unknown_globals),
        notes=list(saved.warnings),
    )
    root["optimizer"] = _read_optimizer(states, parsed)
    scheduler = location.files.get(SCHEDULER)
    if scheduler and is_torch_file(scheduler):
        root[SCHEDULER] = _read_file(scheduler, parsed)
    manifest = assemble.build_manifest(
        parsed,
        Origin(format=NAME, path=str(location), mesh=_build_mesh(pipeline)),
        model_hint=ModelHint(model, wrap) if model else None,
    )
    running = location.files.get(RUNNING)  # its step counts from the start of the epoch
    if running is None:
        return manifest
    client = {**manifest.train.client, RUNNING: read_json_object(running)}
    return replace(manifest, train=replace(manifest.train, client=client))


def _build_mesh(pipeline: int) -> dict[str, int]:
    """Return the mesh: files are whole, so only the number of pipeline stages is known."""
    return {"world": pipeline, "pp": pipeline} if pipeline > 1 else {"world": 1}


def _find_stage(entry: Entry) -> int:
    """Return the stage that saved an entry; a final index lists the stages in any order."""
    match = _STAGE.search(Path(entry.chunks[0].file).name) if entry.chunks else None
    return int(match[1]) if match else 0


def _read_optimizer(location: Location, parsed: ParsedTree) -> dict[str, Any]:
    path = next(path for name, path in location.files.items() if INDEX.fullmatch(name))
    if path.name.startswith("optimizer"):
        raise UnsupportedError(
            path,
            "is an optimizer that was saved asynchronously: a safetensors file that contains"
            " pickles",
            "save it without use_async, or pass the weights directory to read only the weights",
        )
    index = read_json_object(path)
    listed, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(listed, dict) or not isinstance(metadata, dict):
        raise CorruptError(path, "is not an index: no weight_map, or no metadata")
    state: dict[int, dict[str, Any]] = {}
    for name in sorted({str(shard) for shard in listed.values()}):
        shard = _require_file(location, path, name)
        content = _read_file(shard, parsed)
        expect(shard, content, _SHARD)
        # Several stages may store the state of a tied parameter: the index names the one to load.
        state.update((n, own) for n, own in content.items() if listed.get(str(n), name) == name)
    numbers = {key: counts.parse_index(key) for key in listed}
    missing = [key for key, number in numbers.items() if number is not None and number not in state]
    if missing:
        raise CorruptError(
            path, f"lists the state of parameter {missing[0]}, but no shard contains it", MIXED
        )
    shared = _require_file(location, path, str(metadata.get("param_groups")))
    groups = _read_file(shared, parsed)
    expect(shared, groups, _GROUPS)
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _require_file(location: Location, index: Path, name: str) -> Path:
    path = location.files.get(name)
    if path is None:
        raise IncompleteError(index, f"names {name}, which is missing", "fetch that file")
    return path


def _read_file(path: Path, parsed: ParsedTree) -> Any:
    file = torch_reader.read(path)
    parsed.files[file.path] = file.source()
    parsed.globals |= file.globals
    return tree.convert_file(file)
