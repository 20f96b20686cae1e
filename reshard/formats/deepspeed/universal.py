"""Read universal checkpoints: ``zero/<fqn>/{fp32,exp_avg,...}.pt``, one whole tensor in each file.

Source: DeepSpeed 0.19.8 ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``: a dict with
``param`` and how it was cut; ``step.pt`` the bare counter, a 0-d tensor, or a number if the
optimizer counts in Python as DeepSpeed's own do; ``optimizer_state.pt``). `write` writes the same,
with a step of each parameter, which ds_to_universal lacks from stage 3.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.pickle_cache import PickleCache
from reshard.containers.pickles import trust
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.core.box import Index, whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.location import Location
from reshard.core.manifest import (
    BUFFER,
    MASTER,
    PARAM,
    Entry,
    FrameworkFacts,
    Key,
    Manifest,
    Origin,
    index_entries,
)
from reshard.core.schema import expect
from reshard.errors import OTHER_FILE, CorruptError, IncompleteError
from reshard.formats.deepspeed import flat_order, stage3
from reshard.formats.deepspeed.directory import MODEL_FILE, SHARDED_MODEL_FILE
from reshard.formats.deepspeed.experts import autoep
from reshard.formats.deepspeed.schemas import UNIVERSAL_OPTIMIZER
from reshard.formats.deepspeed.states import (
    BUILDERS,
    ModelStates,
    make_whole_entry,
    open_model,
    unwrap_name,
    unwrap_names,
)
from reshard.formats.deepspeed.tag_directory import check_models
from reshard.formats.deepspeed.train_state import name_members, read_train_state
from reshard.formats.deepspeed.universal_ranks import SourceRanks, find_source_ranks
from reshard.layouts.model_parallel import shards
from reshard.layouts.partition import require_dense
from reshard.system.threads import map_files
from reshard.units import counted


def read(location: Location, rules: Path | None = None) -> Manifest:
    """Describe a universal directory, which a run of any parallel grid may have written.

    Args:
        rules: a user's table of how tensor-parallel ranks shared parameters.

    Raises:
        IncompleteError: a trained parameter has no directory or no weights, or there are no model
            states beside ``zero``.
        UnsupportedError: ds_to_universal joined a parameter wrongly.
        CorruptError: a file does not hold its parameter's tensor.
    """
    models = unwrap_names(_open_models(location))
    listed = models[0].module
    model = models[0] = autoep.drop_aliases(models[0])
    module = model.module
    files: dict[str, TorchFile] = {state.file.path: state.file for state in models}
    # Each file is a model-parallel rank's, or a data-parallel rank's.
    per_rank = not Path(models[0].file.path).name.startswith("zero_pp_rank_")
    if not per_rank:
        check_models(models)
    ranks = find_source_ranks(models if per_rank else models[:1], str(location), rules)
    shapes = {fqn: shape for group in ranks.shapes for fqn, shape in group.items()}
    fqns = {name: fqn for fqn, name in model.wrapped_names.items()}
    entries, steps = _read_parameters(location, listed, ranks, shapes, files, fqns)
    root = _read_optimizer(location, files)
    masters = {entry.fqn: None for entry in entries if entry.kind == MASTER}  # in order
    if not steps:
        steps = _read_common_step(root, files, masters)
    tied = {alias: kept for alias, kept in model.find_aliases().items() if alias not in masters}
    _check_folders(location, shapes, masters, tied)
    entries += _read_module(models, ranks, masters, tied, per_rank=per_rank)
    position = {name: index for index, name in enumerate(module)}
    entries.sort(key=lambda entry: position.get(entry.fqn, len(position)))
    stage = flat_order.get_zero_section(model.config).get("stage")  # of the run that was converted
    manifest = Manifest(
        origin=Origin(
            format="deepspeed-universal",
            path=str(location),
            detail="layout-free",
            versions={"deepspeed": model.version},
            mesh={"world": model.data_ranks or 1},
            precision=_find_precision(model.config).name,
            zero_stage=stage if isinstance(stage, int) and stage in range(4) else None,
            facts=FrameworkFacts(describes_model=True),
        ),
        entries=index_entries(entries),
        files={path: file.source() for path, file in files.items()},
        train=read_train_state(
            model, groups=name_members(root, ranks.shapes), steps=steps, optimizer_root=root
        ),
        tied=tied,
        tied_copies=tuple(model.find_tied_copies(tied)),
        frozen=frozenset(e.fqn for e in entries if e.kind == PARAM and e.numel),
        trained_dtypes={name: tensor.dtype for name, tensor in module.items()},
        wrapped_names=model.wrapped_names,
        may_be_ddp=False,
        warnings=(*_list_warnings(model), *ranks.notes),
        unread=model.unread,
        unknown_globals=trust.list_unknown(set().union(*(file.globals for file in files.values()))),
        ordered=True,  # by the module of the model states
    )
    return autoep.restore_names(manifest, model)


def _read_parameters(
    location: Location,
    module: Container[str],
    ranks: SourceRanks,
    shapes: Mapping[str, Index],
    files: dict[str, TorchFile],
    fqns: Mapping[str, str],
) -> tuple[list[Entry], dict[str, float]]:
    """Read all directories of parameters: return their entries and steps, and add their files."""
    entries: list[Entry] = []
    steps: dict[str, float] = {}
    cache = PickleCache()
    trained: list[tuple[str, Location]] = []
    for name, folder in location.folders["zero"].folders.items():
        fqn = fqns.get(name) or unwrap_name(name, module)
        # A buffer or a frozen weight is also there, converted to float32; the module has it as is.
        if fqn in shapes or fqn not in module:
            trained.append((fqn, folder))
    read = map_files(trained, lambda item: list(_read_folder(item[1], cache)))
    for (fqn, _), content in zip(trained, read, strict=True):
        for kind, file, value in content:
            files[file.path] = file
            if not isinstance(value, Tensor):
                steps[fqn] = value
            elif kind == "step":
                steps[fqn] = float(file.read_number(value))
            else:
                stored = file.root if isinstance(file.root, dict) else ()
                entries.append(ranks.normalize(_make_entry(file, fqn, kind, value, shapes), stored))
    return entries, steps


def _open_models(location: Location) -> list[ModelStates]:
    # At stages 0 to 2 these are of each model-parallel rank, at stage 3 of all ranks.
    # ds_to_universal copies those of its source. reshard writes both forms, of which the first has
    # the module's weights.
    paths = location.files.values()
    # Text does not order the ranks: the hundredth has three digits, those before it fewer.
    of_model_ranks = {
        int(match[1]): path for path in paths if (match := MODEL_FILE.fullmatch(path.name))
    }
    if of_model_ranks:
        return map_files([path for _, path in sorted(of_model_ranks.items())], open_model)
    sharded = {
        int(match[1]): path
        for path in paths
        if (match := SHARDED_MODEL_FILE.fullmatch(path.name)) and int(match[2]) == 0
    }
    if not sharded:
        raise IncompleteError(
            location,
            "has zero/ but no *_model_states.pt beside it, which stores the step and the buffers",
            "copy it here from the directory that was converted",
        )
    return map_files([path for _, path in sorted(sharded.items())], open_model)


def _make_entry(
    file: TorchFile, fqn: str, kind: str, tensor: Tensor, shapes: Mapping[str, Index]
) -> Entry:
    """Return a tensor in its own shape: from stage 3, ds_to_universal writes it flattened."""
    shape = shapes.get(fqn, tensor.shape)
    if len(tensor.shape) != 1 or shape == tensor.shape or prod(shape) != tensor.numel:
        return make_whole_entry(fqn, kind, tensor)
    start = require_dense(tensor.chunk).byte_offset
    chunk = contiguous(file.path, start, tensor.dtype, whole(shape))
    return Entry(fqn, kind, tensor.dtype, shape, (chunk,))


def _read_folder(
    folder: Location, cache: PickleCache
) -> Iterator[tuple[str, TorchFile, Tensor | float]]:
    """Yield (kind, file, tensor) of one parameter's directory; a counter may be a number."""
    paths = [path for path in folder.files.values() if path.suffix == ".pt"]
    if not any(path.name == "fp32.pt" for path in paths):
        raise IncompleteError(folder, "has no fp32.pt", "the conversion was interrupted: repeat it")
    for path in paths:
        file = torch_reader.read(path, builders=BUILDERS, cache=cache)
        value: Any = file.root.get("param") if isinstance(file.root, dict) else file.root
        is_count = path.stem == "step" and type(value) in (int, float)
        if not isinstance(value, Tensor) and not is_count:
            raise CorruptError(path, "does not contain the tensor 'param'", OTHER_FILE)
        yield (MASTER if path.stem == "fp32" else path.stem), file, value


def _check_folders(
    location: Location,
    shapes: Mapping[str, Index],
    masters: Container[str],
    tied: Mapping[str, str],
) -> None:
    """Check that every trained parameter has a directory: the module's value is not its master."""
    lost = [f for f, shape in shapes.items() if prod(shape) and tied.get(f, f) not in masters]
    if lost:
        raise IncompleteError(
            location.folders["zero"],
            f"has no folder for {lost[0]!r}, which was trained"
            + (f", nor for {counted(len(lost) - 1, 'other')}" if lost[1:] else ""),
            "the conversion or a copy was interrupted: repeat it",
        )


def _read_module(
    models: Sequence[ModelStates],
    ranks: SourceRanks,
    masters: Container[str],
    tied: Mapping[str, str],
    *,
    per_rank: bool,
) -> Iterator[Entry]:
    # A tied module is on two stages of a pipeline, with its buffers: their values are replicas.
    buffers: dict[Key, Entry] = {}
    for start in range(0, ranks.tensor * ranks.pipeline, ranks.tensor):
        stage = models[start : start + ranks.tensor]
        by_rank = [{e.key: e for e in model.iterate_whole_tensors(tied)} for model in stage]
        for key, entry in by_rank[0].items():
            if entry.kind == BUFFER:
                known = buffers.get(key)
                chunks = (*known.chunks, *entry.chunks) if known else entry.chunks
                buffers[key] = replace(entry, chunks=tuple(chunks))
            elif entry.fqn not in masters and per_rank:
                split = ranks.cuts.find_split(entry.fqn, entry.shape)
                yield shards.gather([rank[key] for rank in by_rank], split)
    yield from buffers.values()
    if not per_rank:
        yield from stage3.read_frozen(models)


def _read_optimizer(location: Location, files: dict[str, TorchFile]) -> dict[str, Any]:
    path = location.folders["zero"].files.get("optimizer_state.pt")
    if path is None:
        return {}
    file = torch_reader.read(path, builders=BUILDERS)
    files[file.path] = file
    expect(path, file.root, UNIVERSAL_OPTIMIZER)
    root: dict[str, Any] = file.root
    return root


def _read_common_step(
    root: Mapping[str, Any], files: Mapping[str, TorchFile], fqns: Iterable[str]
) -> dict[str, float]:
    # From stage 3, ds_to_universal writes one step, in the state of the first flat tensor.
    state = root.get("optimizer_state_dict", root).get("state", {})
    step = state.get(0, {}).get("step")
    if isinstance(step, Tensor):
        step = files[step.storage.file].read_number(step)
    return dict.fromkeys(fqns, float(step)) if isinstance(step, (int, float)) else {}


def _find_precision(config: Any) -> DType:
    return flat_order.find_16_bit_precision(config) or FLOAT32


def _list_warnings(model: ModelStates) -> Iterator[str]:
    if model.root.get("module") is None:
        yield "the model states contain no module (pipeline): buffers and tied names are not known"
    config, ranks = model.config, model.data_ranks or 1
    stage = flat_order.get_zero_section(config).get("stage", 0)
    if ranks > 1 and flat_order.uses_round_robin(config, stage, _find_precision(config)):
        yield (
            "converted from a run with round_robin_gradients: DeepSpeed's converter (0.12 to 0.19"
            " at least) stores the values of most parameters under wrong names; read the run"
            " itself"
        )
