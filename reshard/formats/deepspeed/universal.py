"""Universal checkpoints: ``zero/<fqn>/{fp32,exp_avg,...}.pt``, one whole tensor a file.

Source: DeepSpeed 0.19.8 ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``: a dict with
``param`` and how it was cut; ``step.pt`` the bare counter, a 0-d tensor, or a number where the
optimizer counts in Python as DeepSpeed's own do; ``optimizer_state.pt``). `target` writes the same,
with a step of each parameter, which ds_to_universal lacks from stage 3.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from reshard import dtypes
from reshard.box import Index, whole
from reshard.containers import torch_reader
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.containers.torch_reader import Alike
from reshard.errors import CorruptError, IncompleteError
from reshard.formats.deepspeed import order, partitioned, train
from reshard.formats.deepspeed.kinds import UNIVERSAL_OPTIMIZER
from reshard.formats.deepspeed.states import (
    BUILDERS,
    ModelStates,
    Shapes,
    open_model,
    own_name,
    under_own_names,
    whole_entry,
)
from reshard.formats.deepspeed.universal_ranks import Ranks, ranks_of
from reshard.location import Location
from reshard.manifest import (
    BUFFER,
    MASTER,
    PARAM,
    Entry,
    Key,
    Manifest,
    Origin,
    ParamGroup,
    contiguous,
    index_entries,
)
from reshard.model_parallel import shards
from reshard.pickles import trust
from reshard.schema import expect


def read(location: Location, rules: Path | None = None) -> Manifest:
    """Describe a universal directory; layout-free, so any parallel grid may have written it.

    Args:
        rules: a user's table of how tensor-parallel ranks shared parameters.

    Raises:
        IncompleteError: a trained parameter without its folder or its weights, or no model states
            beside ``zero``.
        UnsupportedError: a parameter that ds_to_universal put together wrongly.
        CorruptError: a file holds no tensor, or not its parameter's.
    """
    models = under_own_names(_model_states(location))
    model = models[0]
    module = model.module
    files: dict[str, TorchFile] = {state.file.path: state.file for state in models}
    ranks = ranks_of(models if _is_by_model_rank(models) else models[:1], str(location), rules)
    shapes = {fqn: shape for group in ranks.shapes for fqn, shape in group.items()}
    entries: list[Entry] = []
    steps: dict[str, float] = {}
    alike = Alike()
    for folder in location.folders["zero"].folders.values():
        fqn = own_name(folder.name, module)
        if fqn in module and fqn not in shapes:
            continue  # a buffer or a frozen weight, made float32 here: the module has it as it is
        for kind, file, value in _values(folder, alike):
            files[file.path] = file
            if not isinstance(value, Tensor):
                steps[fqn] = value
            elif kind == "step":
                steps[fqn] = float(file.number(value))
            else:
                entries.append(ranks.checked(_entry(file, fqn, kind, value, shapes)))
    root = _optimizer_root(location, files)
    masters = {entry.fqn: None for entry in entries if entry.kind == MASTER}  # in order
    if not steps:
        steps = _common_step(root, files, masters)
    tied = {alias: kept for alias, kept in model.aliases().items() if alias not in masters}
    _check_all(location, shapes, masters, tied)
    entries += _module_rest(models, ranks, masters, tied)
    places = {name: index for index, name in enumerate(module)}
    entries.sort(key=lambda entry: places.get(entry.fqn, len(places)))
    mesh = {"world": model.data_ranks or 1}
    return Manifest(
        origin=Origin(
            format="deepspeed-universal",
            path=str(location),
            detail="layout-free",
            versions={"deepspeed": str(model.root.get("ds_version", "unknown"))},
            mesh=mesh,
            precision=_precision(model),
        ),
        entries=index_entries(entries),
        files={path: file.source() for path, file in files.items()},
        train=train.state(
            model, groups=_groups(ranks.shapes, root), steps=steps, optimizer_root=root
        ),
        tied=tied,
        tied_copies=tuple(model.stored_again(tied)),
        frozen=frozenset(e.fqn for e in entries if e.kind == PARAM and e.numel),
        trained_dtypes={name: tensor.dtype for name, tensor in module.items()},
        wrapped_names=model.wrapped_names,
        warnings=(*_warnings(model), *ranks.notes),
        unread=model.unread,
        unknown_globals=trust.unknown(set().union(*(file.globals for file in files.values()))),
        ordered=True,  # by the module of the model states
    )


def _model_states(location: Location) -> list[ModelStates]:
    """The model states: at stages 0 to 2 of each model-parallel rank, at stage 3 of every rank.

    ds_to_universal copies those of its source; reshard writes both forms, of which the first has
    the module's weights.
    """
    found = [path for path in location.files.values() if path.match("*mp_rank_*_model_states.pt")]
    whole_ones = [path for path in found if path.name.startswith("mp_rank_")]
    if whole_ones:
        return [open_model(path) for path in sorted(whole_ones)]
    sharded = [path for path in found if path.match("zero_pp_rank_*_mp_rank_00_model_states.pt")]
    sharded.sort(key=lambda path: int(path.name.split("_")[3]))
    if not sharded:
        raise IncompleteError(
            location,
            "has zero/ but no *_model_states.pt beside it: the step and the buffers are in it",
            "copy it here from the directory that was converted",
        )
    return [open_model(name) for name in sharded]


def _is_by_model_rank(models: Sequence[ModelStates]) -> bool:
    """Whether each file is of a model-parallel rank, and not of one that holds parts at stage 3."""
    return not Path(models[0].file.path).name.startswith("zero_pp_rank_")


def _entry(
    file: TorchFile, fqn: str, kind: str, tensor: Tensor, shapes: Mapping[str, Index]
) -> Entry:
    """The tensor in its own shape: from stage 3, ds_to_universal writes it flattened."""
    shape = shapes.get(fqn, tensor.shape)
    if len(tensor.shape) != 1 or shape == tensor.shape or prod(shape) != tensor.numel:
        return whole_entry(fqn, kind, tensor)
    start = tensor.chunk.byte_offset
    chunk = contiguous(file.path, start, tensor.dtype, whole(shape), shape)
    return Entry(fqn, kind, tensor.dtype, shape, (chunk,))


def _values(folder: Location, alike: Alike) -> Iterator[tuple[str, TorchFile, Tensor | float]]:
    """(kind, file, tensor) of one parameter's folder; a counter may be a number."""
    paths = [path for path in folder.files.values() if path.suffix == ".pt"]
    if not any(path.name == "fp32.pt" for path in paths):
        raise IncompleteError(folder, "has no fp32.pt", "the conversion was interrupted: repeat it")
    for path in paths:
        file = torch_reader.read(path, builders=BUILDERS, alike=alike)
        value: Any = file.root.get("param") if isinstance(file.root, dict) else file.root
        is_count = path.stem == "step" and type(value) in (int, float)
        if not isinstance(value, Tensor) and not is_count:
            raise CorruptError(path, "holds no tensor 'param'")
        yield (MASTER if path.stem == "fp32" else path.stem), file, value


def _check_all(
    location: Location,
    shapes: Mapping[str, Index],
    masters: Container[str],
    tied: Mapping[str, str],
) -> None:
    """What the module has of a trained parameter is not what the optimizer trained.

    Raises:
        IncompleteError: one has no folder.
    """
    lost = [f for f, shape in shapes.items() if prod(shape) and tied.get(f, f) not in masters]
    if lost:
        raise IncompleteError(
            location.folders["zero"],
            f"has no folder of {lost[0]!r}, which was trained"
            + (f", nor of {len(lost) - 1} others" if lost[1:] else ""),
            "the conversion or a copy was interrupted: repeat it",
        )


def _module_rest(
    models: Sequence[ModelStates], ranks: Ranks, masters: Container[str], tied: Mapping[str, str]
) -> Iterator[Entry]:
    """Buffers, and parameters that the optimizer does not hold: only the module has them.

    A tied module is on two stages of a pipeline, with its buffers: their values are replicas.
    """
    sharded = not _is_by_model_rank(models)
    buffers: dict[Key, Entry] = {}
    for start in range(0, ranks.tensor * ranks.pipeline, ranks.tensor):
        stage = models[start : start + ranks.tensor]
        held = [{e.key: e for e in model.whole_tensors(tied)} for model in stage]
        for key, entry in held[0].items():
            if entry.kind == BUFFER:
                again = buffers.get(key)
                held_by = (*again.chunks, *entry.chunks) if again else entry.chunks
                buffers[key] = replace(entry, chunks=tuple(held_by))
            elif entry.fqn not in masters and not sharded:
                split = ranks.cuts.split(entry.fqn, entry.shape)
                yield shards.gathered([rank[key] for rank in held], split)
    yield from buffers.values()
    if sharded:
        yield from partitioned.frozen(models)


def _optimizer_root(location: Location, files: dict[str, TorchFile]) -> dict[str, Any]:
    path = location.folders["zero"].files.get("optimizer_state.pt")
    if path is None:
        return {}
    file = torch_reader.read(path, builders=BUILDERS)
    files[file.path] = file
    expect(path, file.root, UNIVERSAL_OPTIMIZER)
    root: dict[str, Any] = file.root
    return root


def _common_step(
    root: Mapping[str, Any], files: Mapping[str, TorchFile], fqns: Iterable[str]
) -> dict[str, float]:
    """From stage 3, ds_to_universal writes one step, in the state of the first flat tensor."""
    state = root.get("optimizer_state_dict", root).get("state", {})
    step = state.get(0, {}).get("step")
    if isinstance(step, Tensor):
        step = files[step.storage.file].number(step)
    return dict.fromkeys(fqns, float(step)) if isinstance(step, (int, float)) else {}


def _groups(shapes: Shapes, root: dict[str, Any]) -> list[ParamGroup]:
    return [
        ParamGroup(
            train.hyper(group),
            tuple(
                f for index in group.get("params", []) if index < len(shapes) for f in shapes[index]
            ),
        )
        for group in root.get("param_groups", [])
    ]


def _precision(model: ModelStates) -> str:
    config = model.mapping("ds_config")
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        section = config.get(key)
        if isinstance(section, dict) and section.get("enabled") is True:
            return name
    return "float32"


def _warnings(model: ModelStates) -> Iterator[str]:
    if model.root.get("module") is None:
        yield "the model states hold no module (pipeline): buffers and tied names are not known"
    config, ranks = model.mapping("ds_config"), model.data_ranks or 1
    stage = order.section(config, "zero_optimization").get("stage", 0)
    if ranks > 1 and order.takes_turns(config, stage, dtypes.parse(_precision(model))):
        yield (
            "made from a run with round_robin_gradients: DeepSpeed's converter (0.12 to 0.19 at"
            " least) puts the values of most parameters under other names; take the run itself"
        )
