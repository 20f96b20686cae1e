"""Read a step's directory into one manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from reshard.containers import safetensors, torch_reader
from reshard.containers.json_files import read_json_object
from reshard.containers.pickles import trust
from reshard.containers.safetensors import SafetensorsFile
from reshard.core import counts
from reshard.core.chunks import Chunk
from reshard.core.location import Location
from reshard.core.manifest import (
    PARAM,
    Entry,
    Manifest,
    Origin,
    ParamGroup,
    TrainState,
    find_most_common_dtype,
    index_entries,
)
from reshard.errors import MIXED, OTHER_FILE, CorruptError
from reshard.state_dict.plain_values import to_plain
from reshard.system.files import SourceFiles
from reshard.system.threads import map_files
from reshard.units import counted, make_natural_key
from reshard_nanotron import directory, layout, optimizer, slices, stages
from reshard_nanotron.directory import (
    METADATA,
    MODEL_CONFIG,
    CheckpointFiles,
    list_other_files,
)
from reshard_nanotron.layout import ParameterCut, RunFacts
from reshard_nanotron.optimizer import StagedOptimizer
from reshard_nanotron.slices import TensorShard
from reshard_nanotron.stages import Stage

_TENSOR = "data"
_READ = (METADATA, MODEL_CONFIG)
_SIZES = {"pp": "pp_size", "dp": "dp_size", "tp": "tp_size", "ep": "expert_parallel_size"}


def read(location: Location) -> Manifest:
    """Read a step's directory, given by itself or by a file in it.

    Raises:
        CorruptError: its files contradict each other, or belong to different grids or runs.
        IncompleteError: a rank's file is missing.
        UnsupportedError: the checkpoint has an unknown variant of the format.
    """
    listed = directory.list_files(directory.locate(location) or location)
    paths = [rank.path for ranks in listed.weights.values() for rank in ranks]
    opened = dict(zip(paths, map_files(paths, safetensors.read), strict=True))
    parts: dict[str, dict[tuple[int, int], TensorShard]] = {}
    cuts: dict[str, ParameterCut | None] = {}
    weights = {fqn: _read_weight(listed, fqn, opened, parts, cuts) for fqn in listed.weights}
    with SourceFiles() as pool:
        states = optimizer.read(listed, parts, pool)
    files = {file.source.path: file.source for file in opened.values()}
    files |= {file.path: file.source() for file in states.files}
    about = _read_json(listed.location, METADATA)
    train = about.get("metas") if isinstance(about.get("metas"), dict) else {}
    schedulers = [torch_reader.read(path) for path in listed.schedulers]
    stage_list = _build_stages(states, [to_plain(file.root) for file in schedulers])
    whole = stages.join_stages(stage_list)
    order, ordered = _sort_weights(weights, stage_list, whole)
    versions = {"checkpoint": str(about["version"])} if "version" in about else {}
    return Manifest(
        origin=Origin(
            format=directory.NAME,
            path=str(listed.location),
            detail="ZeRO stage 1" if listed.is_zero else "",
            zero_stage=1 if listed.is_zero else None,
            versions=versions,
            mesh=_build_mesh(listed, about),
            precision=find_most_common_dtype(entry.dtype for entry in weights.values()),
        ),
        entries=index_entries([*(weights[fqn] for fqn in order), *states.entries]),
        files=files,
        train=TrainState(
            step=_get_int(train, "last_train_step"),
            samples=_get_int(train, "consumed_train_samples"),
            optimizer_step=states.steps,
            non_tensor_state=states.non_tensor_state,
            param_groups=whole.groups,
            scheduler=whole.scheduler,
            client={METADATA: about} if about else {},
            opaque={
                layout.KEY: RunFacts(
                    cuts=cuts,
                    stages=stage_list,
                    config=_read_json(listed.location, MODEL_CONFIG) or None,
                    unnamed=states.unnamed,
                    beside=list_other_files(listed.location),
                ),
            },
        ),
        trained_dtypes={fqn: entry.dtype for fqn, entry in weights.items()},
        read_files=tuple(
            str(path)
            for path in (*map(listed.location.files.get, _READ), *listed.schedulers)
            if path is not None
        ),
        warnings=tuple(_write_notes(listed, states)),
        unknown_globals=trust.list_unknown(
            set().union(*(file.globals for file in [*states.files, *schedulers]))
        ),
        ordered=ordered,
    )


def _read_weight(
    listed: CheckpointFiles,
    fqn: str,
    opened: Mapping[Path, SafetensorsFile],
    parts: dict[str, dict[tuple[int, int], TensorShard]],
    cuts: dict[str, ParameterCut | None],
) -> Entry:
    """Read a parameter of all ranks; add each rank's part to ``parts``, the cut to ``cuts``."""
    chunks: list[Chunk] = []
    first: Entry | None = None
    headers: list[Mapping[str, str]] = []
    for rank in listed.weights[fqn]:
        file = opened[rank.path]
        headers.append(file.metadata)
        stored = file.tensors.get(_TENSOR)
        if stored is None or len(file.tensors) > 1:
            raise CorruptError(
                rank.path,
                f"contains {sorted(file.tensors)}, but a nanotron weight file contains one tensor"
                f" called {_TENSOR!r}",
                OTHER_FILE,
            )
        part = slices.parse_part(file.source.path, file.metadata, stored.box.shape)
        parts.setdefault(fqn, {})[rank.rank("tp"), rank.rank("exp")] = part
        entry = Entry(fqn, PARAM, stored.dtype, part.shape, ())
        first = first or entry
        if entry != first:
            raise CorruptError(
                rank.path,
                f"{fqn!r} is {entry.dtype} {entry.shape}, but {first.dtype} {first.shape} in"
                f" {listed.weights[fqn][0].path.name}",
                MIXED,
            )
        chunks += part.list_chunks(stored)
    if first is None:  # every listed parameter has a file
        raise AssertionError(fqn)
    ranks = listed.weights[fqn]
    if ranks[0].sizes:
        is_regular = len({rank.rank("pp") for rank in ranks}) == 1 and "exp" not in ranks[0].sizes
        stage = ranks[0].rank("pp")
        cuts[fqn] = layout.derive_cut(fqn, first.shape, stage, headers) if is_regular else None
    return Entry(fqn, PARAM, first.dtype, first.shape, tuple(chunks))


def _read_json(location: Location, name: str) -> dict[str, Any]:
    path = location.files.get(name)
    return read_json_object(path) if path else {}


def _build_stages(found: StagedOptimizer, schedulers: Sequence[Any]) -> tuple[Stage, ...]:
    # Without an optimizer the schedulers are those of the stages.
    groups: Sequence[Sequence[ParamGroup]] = found.stages or [()] * len(schedulers)
    shared = schedulers[0] if len(schedulers) == 1 else None
    schedulers_of = schedulers if len(schedulers) == len(groups) else [shared] * len(groups)
    return tuple(Stage(tuple(group), own) for group, own in zip(groups, schedulers_of, strict=True))


def _get_int(table: Mapping[str, Any] | None, name: str) -> int | None:
    value = (table or {}).get(name)
    return value if type(value) is int else None


def _build_mesh(listed: CheckpointFiles, about: Mapping[str, Any]) -> dict[str, int]:
    """Return the grid: from file names, and from descriptions that include replicas not on disk."""
    sizes = dict.fromkeys(("pp", "dp", "cp", "tp", "ep"), 1)
    sharded = [file for files in listed.weights.values() for file in files]
    for file in (*sharded, *listed.optimizer):
        sizes.update({"ep" if axis == "exp" else axis: n for axis, n in file.sizes.items()})
    sizes |= {axis: n for axis in sizes if (n := _get_int(about, axis))} | _read_sizes(
        listed.location
    )
    return {"world": prod(sizes.values())} | {axis: n for axis, n in sizes.items() if n > 1}


def _read_sizes(location: Location) -> dict[str, int]:
    """Read the sizes in ``optimizer_config.json``, which stores numbers as text."""
    folder = location.folders.get("optimizer")
    path = folder.files.get("optimizer_config.json") if folder else None
    stored = read_json_object(path).get("parallelism") if path else None
    if not isinstance(stored, dict):
        return {}
    return {
        axis: size
        for axis, name in _SIZES.items()
        if (size := counts.parse_index(str(stored.get(name)))) is not None
    }


def _sort_weights(
    weights: Mapping[str, Entry], stage_list: Sequence[Stage], whole: Stage
) -> tuple[Sequence[str], bool]:
    fqns = [fqn for group in whole.groups for fqn in group.fqns]
    # Several groups of several parameters each (with and without decay) do not keep the order.
    in_order = len(whole.groups) == 1 or stages.is_one_each(stage_list)
    if in_order and len(fqns) == len(weights) and set(fqns) == set(weights):
        return fqns, True
    return sorted(weights, key=make_natural_key), False


def _write_notes(listed: CheckpointFiles, found: StagedOptimizer) -> Iterator[str]:
    if found.unnamed:
        yield (
            f"{found.unnamed} parameters without state (never stepped) have no name in the"
            " optimizer, and are in no param group"
        )
    random = listed.location.folders.get("random")
    if random and random.files:
        yield f"the random states of {counted(len(random.files), 'rank')} (random/) were not read"
