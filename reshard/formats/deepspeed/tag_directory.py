"""Read a tag directory as the ranks saved it: model states and optimizer states as one manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.containers.pickle_cache import PickleCache
from reshard.containers.pickles import trust
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.core.location import Location, name_missing
from reshard.core.manifest import (
    BUFFER,
    MASTER,
    PARAM,
    Claim,
    Entry,
    FrameworkFacts,
    Manifest,
    Origin,
    Padding,
    SourceFile,
    UnnamedOptimizer,
    find_most_common_dtype,
    index_entries,
)
from reshard.errors import MIXED, CorruptError, IncompleteError, UnsupportedError, shown
from reshard.formats.deepspeed import (
    mics,
    optimized_linear,
    stage0,
    stage3,
    stage12,
    swap,
    zenflow,
)
from reshard.formats.deepspeed.directory import RankFiles
from reshard.formats.deepspeed.flat_order import get_zero_section
from reshard.formats.deepspeed.states import (
    ModelStates,
    OptimizerStates,
    Shapes,
    describe_lost_state,
    open_model,
    open_optimizer,
    read_by_file,
    require_equal,
    select_distinct,
    unwrap_names,
)
from reshard.formats.deepspeed.train_state import (
    OptimizerContent,
    list_possible_initial_updates,
    read_param_groups,
    read_scaler,
    read_steps,
    read_train_state,
    warn_per_rank,
)
from reshard.model.weight_decay import FindDivisions, find_no_divisions
from reshard.quantised import moments
from reshard.state_dict.plain_values import to_plain
from reshard.system.paths import as_path
from reshard.system.threads import map_files
from reshard.units import abridge

_LISTED = 4
_SECOND = "zero_pp_rank_1_mp_rank_00_model_states.pt"

_SETTINGS = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    optimizer scheduler fp16 bf16
""".split()

# What every rank states alike (DeepSpeed 0.19.8 ``engine.py``, ``stage_1_and_2.py``).
_OF_EVERY_MODEL = """
    global_steps skipped_steps global_samples dp_world_size mp_world_size ds_version param_shapes
    frozen_param_shapes buffer_names lr_scheduler
""".split()
_OF_EVERY_OPTIMIZER = ("zero_stage", "clip_grad", "dynamic_loss_scale", "overflow")

# The content of DeepSpeed's padding, as every real checkpoint that was tried shows it. Stages 1
# and 2 (0.19.8 ``stage_1_and_2.py``, ``flatten_dense_tensors_aligned``) fill it with zeros; its
# gradient is zero, so its moments and its updates are zero too. Stage 3
# (``partition_parameters.py``) allocates it with ``torch.empty``.
_PADDING: dict[int | None, Padding] = {1: "zero", 2: "zero", 3: "uninitialized"}


def open_first(files: RankFiles) -> ModelStates:
    """Open the first data-parallel rank's model states.

    Raises:
        IncompleteError: they are missing.
    """
    if 0 not in files.model:
        raise IncompleteError(
            files.location, name_missing(files.model or {1: as_path(_SECOND)}, [0]), "copy it here"
        )
    return open_model(files.model[0])


def read(
    files: RankFiles,
    first: ModelStates | None = None,
    layers: Iterable[TorchFile] = (),
    find_divisions: FindDivisions = find_no_divisions,
) -> Manifest:
    """Open every data-parallel rank's files and describe the state that they hold together.

    Args:
        first: the first rank's model states, if they are already open.
        layers: the files that hold the module's tensors, if the model states do not.
        find_divisions: returns how the training program may have divided the parameters into
            groups.

    Raises:
        IncompleteError: a rank's file is missing.
        CorruptError: the files contradict each other.
        UnsupportedError: the optimizer states have an unknown form.
    """
    first = first or open_first(files)
    world_size = first.data_ranks or max(len(files.optim), 1)
    savers = mics.count_savers(first, world_size)
    _require_optimizer(files, first, world_size)
    files.check_ranks(savers)
    # Each cache has pickles of one kind: what was checked of the first is true for equal ones.
    seen, others = PickleCache(), sorted(files.model)[1:]
    models = [first, *map_files(others, lambda rank: open_model(files.model[rank], seen))]
    cache = PickleCache()
    ranks = map_files(
        sorted(files.optim), lambda rank: open_optimizer(files.optim[rank], rank, cache)
    )
    check_models(models)
    models = unwrap_names([_with_shapes(first, ranks), *models[1:]])
    _check_ranks(ranks, models[0])
    _check_settings(models, ranks)
    return _assemble(files.location, models, ranks, world_size, layers, find_divisions)


def _with_shapes(first: ModelStates, ranks: Sequence[OptimizerStates]) -> ModelStates:
    """Add ``param_shapes``, which DeepSpeed before 0.6.0 put into the optimizer's files."""
    if "param_shapes" in first.root or not ranks:
        return first
    listed = read_by_file(ranks, lambda rank: rank.file.root.get("param_shapes"))
    return replace(
        first, root={**first.root, "param_shapes": require_equal("param_shapes", listed)}
    )


def _require_optimizer(files: RankFiles, first: ModelStates, world_size: int) -> None:
    """Check that there are optimizer states: DeepSpeed writes ``param_shapes`` with ZeRO only."""
    if first.shapes and not files.optim and not _is_weights_only(first):
        advice = "copy them here"
        if first.model_ranks == 1 and not first.root.get("num_experts"):
            advice += "; or merge the 16-bit weights of stages 1 and 2 with --from torch"
            advice += f" {first.file.path}"
        raise IncompleteError(
            files.location,
            f"is a ZeRO checkpoint of {world_size} ranks, but contains no *_optim_states.pt files,"
            " which store the fp32 weights",
            advice,
        )


def _is_weights_only(first: ModelStates) -> bool:
    # Files of weights alone by reshard list parameters at stage 0 too, for a pipeline
    # (`write.model_states`). In files without its stamp, the list is a sign that the optimizer's
    # files are lost.
    return first.file.stamp is not None and get_zero_section(first.config).get("stage") == 0


def check_models(models: Sequence[ModelStates]) -> None:
    """Check that the data-parallel ranks' model states are of one save and one model."""
    # Compare what the files themselves state: `autoep` adds all ranks' experts to the first's list.
    stated = [ModelStates(model.file, model.file.root) for model in select_distinct(models)]
    for key in _OF_EVERY_MODEL:
        require_equal(key, {model.file.path: to_plain(model.root.get(key)) for model in stated})
    first = stated[0]
    for model in stated[1:]:
        # Equal dicts may list their names in another order, which is that of the flat tensors.
        lists = read_by_file((first, model), lambda m: [list(group) for group in m.shapes])
        require_equal("the order of the names in param_shapes", lists)


def _check_ranks(ranks: Sequence[OptimizerStates], first: ModelStates) -> None:
    if not ranks:
        return
    ranks = select_distinct(ranks)
    versions = {first.file.path: str(first.root.get("ds_version") or "")}
    versions |= read_by_file(ranks, lambda rank: rank.ds_version)  # empty in old optimizer states
    require_equal("ds_version", {p: v for p, v in versions.items() if v} or versions)
    require_equal("the loss scaler", read_by_file(ranks, lambda rank: read_scaler(rank.root)))
    for key in _OF_EVERY_OPTIMIZER:
        require_equal(key, {rank.file.path: rank.root.get(key) for rank in ranks})


def _check_settings(models: Sequence[ModelStates], ranks: Sequence[OptimizerStates]) -> None:
    # At stage 3 no value is in two files, so settings can be the only evidence of another run.
    # Paths, logging and communication may differ between nodes, so they are not compared.
    files = [model.file for model in select_distinct(models)]
    files += [rank.file for rank in select_distinct(ranks)]
    found = {file.path: file.root.get("ds_config") for file in files}
    configs = {path: config for path, config in found.items() if isinstance(config, dict)}
    for key in _SETTINGS:
        stated = {path: to_plain(config[key]) for path, config in configs.items() if key in config}
        if stated:
            require_equal(f"{key} of ds_config", stated)


def _assemble(
    location: Location,
    models: Sequence[ModelStates],
    ranks: Sequence[OptimizerStates],
    world_size: int,
    layers: Iterable[TorchFile],
    find_divisions: FindDivisions,
) -> Manifest:
    first = models[0]
    tied = first.find_aliases()
    ranks, swap_files = swap.fill(location, first.shapes, ranks)
    optimizer = _read_optimizer(first, ranks) if ranks else stage0.read(first, tied, find_divisions)
    stage, warnings = optimizer.stage, optimizer.warnings
    in_16_bit = any(entry.kind == MASTER for entry in optimizer.entries)
    module = _read_module(models, tied, sharded=stage == 3)
    order = {name: index for index, name in enumerate(first.module)}
    # sorted() is stable: of one parameter, the module's copy precedes its master and its slots.
    entries = sorted(
        [*module, *optimizer.entries], key=lambda entry: order.get(entry.fqn, len(order))
    )
    for drop in (zenflow.drop_older_masters, optimized_linear.drop_base_shards):
        entries = drop(first, entries, warnings)
    if stage == 3:
        warnings += _warn_of_quantised(first)
    opened = [*(model.file for model in models), *layers, *(rank.file for rank in ranks)]
    without_frozen = _excludes_frozen(first, stage)
    # TRL's model with a value head over PEFT saves the head alone, a view of all that are trained.
    is_part = bool(module) and not {e.fqn for e in optimizer.entries} <= {e.fqn for e in module}
    return Manifest(
        origin=Origin(
            format="deepspeed",
            path=str(location),
            detail=f"ZeRO stage {stage}",
            versions={"deepspeed": first.version},
            mesh={"world": world_size, "dp": world_size},
            precision=find_most_common_dtype(
                tensor.dtype for name, tensor in first.module.items() if name not in first.buffers
            ),
            zero_stage=stage,
            padding="unknown" if is_part and stage != 3 else _PADDING.get(stage, "unknown"),
            facts=FrameworkFacts(describes_model=True),
        ),
        entries=index_entries(entries),
        files={file.path: _describe_source(file, optimizer) for file in opened} | swap_files,
        train=replace(
            optimizer.train,
            updates_at_start=list_possible_initial_updates(
                first.version, stage, in_16_bit=in_16_bit
            ),
        ),
        tied={alias: kept for alias, kept in tied.items() if alias != kept},
        tied_copies=tuple(first.find_tied_copies(tied)),
        frozen=_find_frozen(entries, first, optimizer),
        absent=_find_absent(first, entries, tied, warnings, without_frozen=without_frozen),
        trained_dtypes={name: tensor.dtype for name, tensor in first.module.items()},
        wrapped_names=first.wrapped_names,
        # Lightning 1 wraps the model as for DDP (1.7 ``overrides/base.py``).
        may_be_ddp=str(first.root.get("pytorch-lightning_version", "")).startswith("1."),
        warnings=tuple(warnings),
        unread=first.unread,
        unnamed=optimizer.unnamed,
        unknown_globals=trust.list_unknown(set().union(*(file.globals for file in opened))),
        ordered=True,  # by the module's state dict, or by param_shapes at stage 3
        without_frozen=without_frozen,
    )


def _describe_source(file: TorchFile, optimizer: OptimizerContent) -> SourceFile:
    source, claims = file.source(), optimizer.claims.get(file.path)
    return replace(source, claims=(*source.claims, *claims)) if claims else source


def _read_optimizer(first: ModelStates, ranks: Sequence[OptimizerStates]) -> OptimizerContent:
    root, shapes = ranks[0].root, first.shapes
    claims = {}
    if ranks[0].is_stage_3:
        stage = 3
        entries = list(stage3.read(shapes, _list_sharing_ranks(first, ranks)))
    elif "single_partition_of_fp32_groups" in root:
        stage = int(root.get("zero_stage") or 1)  # BF16_Optimizer, which is stage 1, writes none
        owners = _list_sharing_ranks(first, ranks)
        groups = list(stage12.read_groups(shapes, ranks, owners, first.wrapped_names))
        entries = [entry for group in groups for entry in group.read_entries()]
        is_round_robin = bool(get_zero_section(first.config).get("round_robin_gradients"))
        claims = stage12.find_claims(groups, round_robin=is_round_robin)
    else:
        raise UnsupportedError(
            ranks[0].file.path,
            f"optimizer states of an unknown structure: {', '.join(sorted(map(str, root)))}",
        )
    for rank in select_distinct(ranks):
        other = tuple(_find_other_settings(rank, first, len(ranks)))
        claims[rank.file.path] = (*claims.get(rank.file.path, ()), *other)
    param_groups, steps = read_param_groups(ranks, shapes), read_steps(ranks, shapes)
    train = read_train_state(first, groups=param_groups, steps=steps, optimizer_root=root)
    unread = list(_iterate_unread(ranks, shapes, entries))
    train = replace(train, non_tensor_state=describe_lost_state(unread))
    warnings = stage0.warn_unread({name for _, _, names in unread for name in names})
    warnings += warn_per_rank(param_groups)
    if any(_has_codes(rank, len(shapes)) for rank in select_distinct(ranks)):
        warnings.append(moments.describe_decoded("the optimizer's state", "bitsandbytes"))
    if _excludes_frozen(first, stage):
        warnings.append(
            "saved with exclude_frozen_parameters: frozen weights are not in this checkpoint (merge"
            " --fill-missing-from and --merge-lora take them from the base model)"
        )
    unnamed = None
    if any(shapes) and param_groups and not any(group.fqns for group in param_groups):
        reason = (
            "its param groups refer to flat tensors that it does not have, as DeepSpeed saves"
            " Adagrad at stage 3 before the first update"
        )
        unnamed = UnnamedOptimizer(reason, advice="save after the first update")
    return OptimizerContent(stage, entries, train, warnings, claims, unnamed)


def _find_other_settings(rank: OptimizerStates, first: ModelStates, ranks: int) -> Iterator[Claim]:
    # ``ds_config`` and the loss scaler state the same; a script may set another clipping at run
    # time.
    config, by_config = first.config, f" (ds_config of {as_path(first.file.path).name})"
    expected = {
        "partition_count": (ranks if rank.is_stage_3 else None, ""),  # of a group: `stage12`
        "zero_stage": (get_zero_section(config).get("stage"), by_config),
        "clip_grad": (config.get("gradient_clipping"), by_config),
        "dynamic_loss_scale": ((read_scaler(rank.root) or {}).get("dynamic"), ""),
    }
    for key, (value, source) in expected.items():
        stated = rank.root.get(key)
        if isinstance(value, (int, float)) and stated is not None and stated != value:
            yield Claim(key, shown(stated), "the optimizer", f"{shown(value)}{source}")


def _has_codes(rank: OptimizerStates, groups: int) -> bool:
    states = (rank.get_group_state(index) for index in range(groups))
    return moments.has_codes(
        value.chunk for state in states for value in state.values() if isinstance(value, Tensor)
    )


def _list_sharing_ranks(
    first: ModelStates, ranks: Sequence[OptimizerStates]
) -> list[list[Sequence[OptimizerStates]]]:
    sizes = first.expert_ranks or (1,) * len(first.shapes)
    return [stage12.divide_ranks(ranks, size, first.config) if size else [] for size in sizes]


def _iterate_unread(
    ranks: Sequence[OptimizerStates], shapes: Shapes, entries: Iterable[Entry]
) -> Iterator[tuple[Iterable[str], Mapping[str, Any], set[str]]]:
    read: dict[str, set[str]] = {}
    for entry in entries:
        read.setdefault(entry.fqn, {"step"}).add(entry.kind)
    for index, members in enumerate(shapes):
        known = set[str]().union(*(read.get(fqn, ()) for fqn in members))
        # The ranks have the same slots, but one that has only padding may have no state.
        states = (rank.get_group_state(index) for rank in ranks)
        state = next(filter(None, states), {})
        if members and (unread := state.keys() - known):
            yield members, state, unread
    if common := ranks[0].common_state:
        yield [fqn for members in shapes for fqn in members], common, set(common)


def _excludes_frozen(first: ModelStates, stage: int) -> bool:
    """Return whether the save left frozen parameters out; otherwise stages 2 and 3 list them."""
    return stage >= 2 and first.root.get("frozen_param_shapes", {}) is None


def _read_module(
    models: Sequence[ModelStates], tied: Mapping[str, str], *, sharded: bool
) -> list[Entry]:
    # At stage 3: the buffers, with each rank's copy as a replica, and the frozen parameters. A
    # module may save tensors that are neither, as bitsandbytes saves its scales: they are whole, as
    # buffers are.
    entries = list(models[0].iterate_whole_tensors(tied))
    if not sharded:
        return [_add_frozen_copy(models[0], entry) for entry in entries]
    buffers, declared = [], models[0].declared_names
    for stored in entries:
        is_other = stored.fqn not in declared and stored.numel > 0
        entry = replace(stored, kind=BUFFER) if is_other else stored
        if entry.kind == BUFFER:
            copies = (model.find_tensor(entry.fqn) for model in models)
            chunks = tuple(tensor.chunk for tensor in copies if tensor is not None)
            buffers.append(replace(entry, chunks=chunks))
    return buffers + list(stage3.read_frozen(models))


def _add_frozen_copy(model: ModelStates, entry: Entry) -> Entry:
    # Stage 2 stores frozen parameters a second time, usually in one storage (DeepSpeed 0.19.8
    # ``engine.py``, ``_get_zero_frozen_param_attributes``).
    fragment = model.get_section("frozen_param_fragments").get(entry.fqn)
    shape = model.get_section("frozen_param_shapes").get(entry.fqn, entry.shape)
    held = model.find_tensor(entry.fqn)
    stated = {"frozen_param_shapes": tuple(shape)}
    if isinstance(fragment, Tensor) and held is not None and fragment.place != held.place:
        entry = replace(entry, chunks=(*entry.chunks, fragment.chunk))
        stated["frozen_param_fragments"] = fragment.shape
    for key, other in stated.items():
        if other != entry.shape:
            raise CorruptError(
                model.file.path,
                f"{key} has {list(other)} for {entry.fqn!r}, but the module {list(entry.shape)}",
                MIXED,
            )
    return entry


def _warn_of_quantised(first: ModelStates) -> list[str]:
    names = [
        fqn for fqn in first.get_section("frozen_param_shapes") if stage3.is_quantised(first, fqn)
    ]
    text = (
        "zero_quantized_nontrainable_weights: DeepSpeed saves frozen weights as integers without"
        f" their scales, so they are missing: {abridge(names, _LISTED)}"
    )
    return [text] if names else []


def _find_frozen(
    entries: Iterable[Entry], first: ModelStates, optimizer: OptimizerContent
) -> frozenset[str]:
    # Empty parameters are never in a group, and are not frozen.
    trained = optimizer.train.group_of.keys() | {fqn for group in first.shapes for fqn in group}
    if not trained:
        return frozenset()
    declared = first.get_section("frozen_param_shapes").items()
    return frozenset(
        entry.fqn
        for entry in entries
        if entry.kind == PARAM and entry.fqn not in trained and entry.numel
    ) | frozenset(fqn for fqn, shape in declared if 0 not in shape)


def _find_absent(
    first: ModelStates,
    entries: Sequence[Entry],
    tied: Mapping[str, str],
    warnings: list[str],
    *,
    without_frozen: bool,
) -> tuple[str, ...]:
    filled = {entry.fqn for entry in entries}
    absent = tuple(name for name in first.module if name not in filled and name not in tied)
    if absent and without_frozen:
        warnings.append(f"without a value in this checkpoint: {', '.join(absent)}")
        return ()
    if absent and "shared_params" not in first.root:
        warnings.append("DeepSpeed before 0.9.1 does not save frozen weights at stage 3")
    return absent
