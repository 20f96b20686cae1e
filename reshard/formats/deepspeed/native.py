"""A tag directory as the ranks saved it: model states and optimizer states made one manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from reshard import counts
from reshard.box import Index
from reshard.containers.torch_objects import TorchFile
from reshard.containers.torch_reader import Alike
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.files import size_of
from reshard.formats.deepspeed import flat, order, partitioned, swap, train, whole
from reshard.formats.deepspeed.directory import Census
from reshard.formats.deepspeed.expert_ranks import owners
from reshard.formats.deepspeed.states import (
    MIXED,
    ModelStates,
    OptimizerStates,
    agree,
    each,
    open_model,
    open_optimizer,
    under_own_names,
)
from reshard.location import Location
from reshard.manifest import (
    BUFFER,
    MASTER,
    PARAM,
    Claim,
    Entry,
    Manifest,
    Origin,
    SourceFile,
    TrainState,
    index_entries,
    most_common_dtype,
)
from reshard.pickles import trust


def first_of(census: Census) -> ModelStates:
    """The first rank's model states.

    Raises:
        IncompleteError: they are missing.
    """
    return open_model(_rank_zero(census))


def read(
    census: Census,
    first: ModelStates | None = None,
    layers: Iterable[TorchFile] = (),
) -> Manifest:
    """Open every data-parallel rank's files and describe the state that they hold together.

    Args:
        first: the first rank's model states, where they are open already.
        layers: the files that hold the module's own tensors, where that is not those.

    Raises:
        IncompleteError: a rank's file is missing.
        CorruptError: the files contradict each other.
        UnsupportedError: optimizer states of an unknown form.
    """
    first = first or first_of(census)
    world_size = first.data_ranks or max(len(census.optim), 1)
    parts = _shard_size(first) or world_size
    _expect_optimizer(census, first, world_size)
    census.check_ranks(parts)
    alike = Alike()
    models = [first, *(open_model(census.model[rank], alike) for rank in sorted(census.model)[1:])]
    ranks = [open_optimizer(census.optim[rank], rank) for rank in sorted(census.optim)]
    _check_models(models)
    models = under_own_names([_with_shapes(first, ranks), *models[1:]])
    first = models[0]
    _check_ranks(ranks, first, parts)
    return _assemble(census.location, models, ranks, world_size, layers)


def _with_shapes(first: ModelStates, ranks: Sequence[OptimizerStates]) -> ModelStates:
    """With ``param_shapes``, which DeepSpeed before 0.6.0 put into the optimizer's files."""
    if "param_shapes" in first.root or not ranks:
        return first
    shapes = agree(
        "param_shapes", each(ranks, lambda rank: rank.file.root.get("param_shapes")), MIXED
    )
    return replace(first, root={**first.root, "param_shapes": shapes})


def _shard_size(first: ModelStates) -> int:
    """The ranks of a MiCS group (DeepSpeed 0.9.2 to 0.17), of which the first alone saves; else 0.

    They share every parameter; those of the other groups hold the same.
    """
    zero = first.mapping("ds_config").get("zero_optimization")
    said = zero.get("mics_shard_size") if isinstance(zero, dict) else None
    is_on = type(said) is int and said > 0  # -1: off
    return counts.count(first.file.path, "mics_shard_size", said) if is_on else 0


def _rank_zero(census: Census) -> Path:
    if 0 not in census.model:
        raise IncompleteError(
            census.location, "zero_pp_rank_0_mp_rank_00_model_states.pt is missing", "copy it here"
        )
    return census.model[0]


def _expect_optimizer(census: Census, first: ModelStates, world_size: int) -> None:
    """param_shapes is written with ZeRO only; then every rank has optimizer states."""
    if first.shapes and not census.optim:
        raise IncompleteError(
            census.location,
            f"a ZeRO checkpoint of {world_size} ranks, but it holds no *_optim_states.pt:"
            " the fp32 weights are in them",
            "copy them here; or merge the 16-bit weights of stages 1 and 2 with"
            f" --from torch {first.file.path}",
        )


def _check_models(models: Sequence[ModelStates]) -> None:
    for key in ("global_steps", "dp_world_size", "ds_version", "param_shapes"):
        agree(key, each(models, lambda model, k=key: model.root.get(k)), MIXED)  # type: ignore[misc]
    first = models[0]
    for model in models[1:]:
        # Equal dicts may list their names in another order, which is that of the flat tensors.
        if model.root.get("param_shapes") is not first.root.get("param_shapes"):
            lists = each((first, model), lambda m: [list(group) for group in m.shapes])
            agree("the order of the names in param_shapes", lists, MIXED)


def _check_ranks(ranks: Sequence[OptimizerStates], first: ModelStates, world_size: int) -> None:
    if not ranks:
        return
    for rank in ranks:
        said = rank.root.get("partition_count")
        listed = said if isinstance(said, (list, tuple)) else [said]
        saved = [ranks for ranks in listed if ranks is not None]
        shared = first.group_ranks or (1,) * len(saved)
        wanted = [world_size // ranks for ranks in shared]
        if saved and (set(saved) != {world_size} if not first.group_ranks else saved != wanted):
            raise CorruptError(
                rank.file.path,
                f"was saved by {sorted(set(saved))} ranks, {Path(first.file.path).name} by"
                f" {sorted(set(wanted))}",
                MIXED,
            )
    agree("ds_version", _versions(first, ranks), MIXED)
    agree("the loss scaler", each(ranks, lambda rank: train.scaler(rank.root)), MIXED)


def _versions(first: ModelStates, ranks: Sequence[OptimizerStates]) -> dict[str, str]:
    """What each file says of its DeepSpeed; old optimizer states say nothing."""
    found = {first.file.path: str(first.root.get("ds_version") or "")}
    found.update(each(ranks, lambda rank: rank.ds_version))
    return {path: version for path, version in found.items() if version} or found


def _assemble(
    location: Location,
    models: Sequence[ModelStates],
    ranks: Sequence[OptimizerStates],
    world_size: int,
    layers: Iterable[TorchFile],
) -> Manifest:
    first = models[0]
    tied = first.aliases()
    swapped = swap.find(location, first.shapes, ranks)
    stage, optimizer, state, warnings, claims = _optimizer(first, ranks, tied, swapped)
    module = _module_entries(models, tied, sharded=stage == 3)
    if _selects_columns(first):
        optimizer, told = _without_older_masters(optimizer, {entry.fqn for entry in module})
        warnings.append(told)
    entries = _in_module_order(first, [*module, *optimizer])
    opened = [*(model.file for model in models), *layers, *(rank.file for rank in ranks)]
    trained = {fqn for group in state.param_groups for fqn in group.fqns}
    trained |= {fqn for group in first.shapes for fqn in group}
    frozen = _frozen(entries, trained, first)
    absent = _absent(first, entries, tied)
    if absent and _excluded_frozen(first, stage or 0):
        warnings.append(f"without a value in this checkpoint: {', '.join(absent)}")
        absent = ()
    elif absent and "shared_params" not in first.root:
        warnings.append(
            "at stage 3 DeepSpeed before 0.9.2 does not say which names are tied, and before 0.9.1"
            " saves no frozen weights"
        )
    version = str(first.root.get("ds_version", "unknown"))
    in_16_bit = any(entry.kind == MASTER for entry in optimizer)
    made = train.made_at_start(version, stage or 0, in_16_bit=in_16_bit)
    state = replace(state, updates_at_start=made)
    return Manifest(
        origin=Origin(
            format="deepspeed",
            path=str(location),
            detail=f"ZeRO stage {stage}" if stage is not None else "",
            versions={"deepspeed": version},
            mesh={"world": world_size, "dp": world_size},
            precision=_precision(first),
        ),
        entries=index_entries(entries),
        files={file.path: _source(file, claims) for file in opened} | _swap_files(swapped),
        train=state,
        tied={alias: kept for alias, kept in tied.items() if alias != kept},
        tied_copies=tuple(first.stored_again(tied)),
        frozen=frozen,
        absent=absent,
        trained_dtypes={name: tensor.dtype for name, tensor in first.module.items()},
        wrapped_names=first.wrapped_names,
        warnings=tuple(warnings),
        unread=first.unread,
        unknown_globals=_unknown(opened),
        ordered=True,  # by the module's state dict, or by param_shapes at stage 3
        without_frozen=bool(_excluded_frozen(first, stage or 0)),
    )


def _source(file: TorchFile, claims: Claims) -> SourceFile:
    source = file.source()
    return replace(source, claims=(*source.claims, *claims.get(file.path, ())))


def _swap_files(swapped: partitioned.Swapped) -> dict[str, SourceFile]:
    paths = {piece.file for piece in swapped.values()}
    return {path: SourceFile(path, size_of(path)) for path in sorted(paths)}


def _unknown(files: Iterable[TorchFile]) -> tuple[str, ...]:
    return trust.unknown(set().union(*(file.globals for file in files)))


Claims = dict[str, tuple[Claim, ...]]  # file -> what it states of the save
Read = tuple[int | None, list[Entry], TrainState, list[str], Claims]


def _optimizer(
    first: ModelStates,
    ranks: Sequence[OptimizerStates],
    tied: dict[str, str],
    swapped: partitioned.Swapped,
) -> Read:
    """(stage, optimizer entries, train state, warnings, claims), by the form of the states."""
    if not ranks:
        entries, state, warnings = whole.state_of(first, tied)
        return 0, entries, state, warnings, {}
    root = ranks[0].root
    claims: Claims = {}
    if "fp32_flat_groups" in root:
        key = "optimizer_state_dict"
        entries = list(partitioned.read(first.shapes, ranks, swapped))
        steps = train.sharded_steps(ranks, first.shapes, partitioned.sub_group_state, key)
        groups = train.sharded_groups(ranks, first.shapes, key)
        stage = 3
    elif "single_partition_of_fp32_groups" in root:
        key = "base_optimizer_state"
        partitioned_groups = list(flat.read_groups(first.shapes, ranks, _owners(first, ranks)))
        entries = [entry for group in partitioned_groups for entry in group.entries()]
        if not _is_round_robin(first):
            claims = flat.find_partition_claims(partitioned_groups, first.wrapped_names)
        steps = train.sharded_steps(ranks, first.shapes, flat.group_state, key)
        groups = train.sharded_groups(ranks, first.shapes, key)
        stage = int(root.get("zero_stage") or 1)  # BF16_Optimizer writes none; it is stage 1
    else:
        raise UnsupportedError(
            ranks[0].file.path,
            f"optimizer states of an unknown form: {', '.join(sorted(map(str, root)))}",
        )
    state = train.state(first, groups=groups, steps=steps, optimizer_root=root)
    notes = _unread_slots(ranks, stage) + _excluded_frozen(first, stage)
    return stage, entries, state, notes, claims


def _is_round_robin(first: ModelStates) -> bool:
    """Return whether ZeRO reordered the parameters, where ``param_slice_mappings`` is wrong.

    Source: DeepSpeed 0.19.8 ``stage_1_and_2.py``: the mapping is made before the new order.
    """
    zero = order.section(first.mapping("ds_config"), "zero_optimization")
    return bool(zero.get("round_robin_gradients"))


def _owners(
    first: ModelStates, ranks: Sequence[OptimizerStates]
) -> list[list[Sequence[OptimizerStates]]]:
    """Of each group the ranks that share each of its flat tensors: one, or one an expert rank."""
    config = first.mapping("ds_config")
    return [
        [[ranks[rank] for rank in held] for held in owners(len(ranks), count, config)]
        for count in first.group_ranks or (1,) * len(first.shapes)
    ]


def _unread_slots(ranks: Sequence[OptimizerStates], stage: int) -> list[str]:
    """Slots that are neither flat nor a counter, which reshard cannot name by fqn."""
    state_of = partitioned.sub_group_state if stage == 3 else flat.group_state
    shapes = ranks[0].root.get("fp32_flat_groups" if stage == 3 else "group_paddings") or []
    odd = set()
    for index in range(len(shapes)):
        held = state_of(ranks[0], index)
        odd |= held.keys() - flat.slots_of(held).keys() - flat.scalars_of(held).keys() - {"step"}
    return flat.left_out(odd)


def _excluded_frozen(first: ModelStates, stage: int) -> list[str]:
    """Stages 2 and 3 list their frozen parameters, unless they were asked not to save them."""
    if stage >= 2 and first.root.get("frozen_param_shapes", {}) is None:
        text = "saved with exclude_frozen_parameters: frozen weights are not in this checkpoint"
        return [f"{text} (merge --fill-missing-from takes them from the base model)"]
    return []


def _module_entries(
    models: Sequence[ModelStates], tied: dict[str, str], *, sharded: bool
) -> list[Entry]:
    """What ``module`` itself holds: at stage 3 only buffers, every rank a replica."""
    if not sharded:
        return list(models[0].whole_tensors(tied))
    buffers = []
    for entry in models[0].whole_tensors(tied):
        if entry.kind == BUFFER:
            replicas = [
                model.module[entry.fqn].chunk for model in models if entry.fqn in model.module
            ]
            buffers.append(Entry(entry.fqn, BUFFER, entry.dtype, entry.shape, tuple(replicas)))
    return buffers + list(partitioned.frozen(models))


def _selects_columns(first: ModelStates) -> bool:
    """Return whether ZenFlow trained: selected columns are updated in the 16-bit weights alone."""
    zero = order.section(first.mapping("ds_config"), "zero_optimization")
    return isinstance(zero.get("zenflow"), dict)


def _without_older_masters(
    optimizer: Sequence[Entry], module: Collection[str]
) -> tuple[list[Entry], str]:
    """Leave out masters that are older than the 16-bit weights, and tell why.

    DeepSpeed 0.19.8 ``runtime/zenflow/zenflow_stage_1_and_2.py``: the model computes with the
    16-bit weights, and ``sync_fp32_param_from_gpu`` overwrites all masters with them at each
    selection.
    """
    kept = [entry for entry in optimizer if entry.kind != MASTER or entry.fqn not in module]
    if len(kept) == len(optimizer):
        return kept, (
            "trained with ZenFlow, which updates selected columns in the 16-bit weights; at stage 3"
            " the files hold fp32 masters alone, without the newest updates of those columns"
        )
    return kept, (
        "trained with ZenFlow: the 16-bit weights are newer than their fp32 masters and are taken"
        " instead; a run that goes on begins its masters from them, as DeepSpeed does at each"
        " selection of columns"
    )


def _in_module_order(first: ModelStates, entries: list[Entry]) -> list[Entry]:
    """Entries sorted by their place in ``module``; names that it lacks come last."""
    order = {name: index for index, name in enumerate(first.module)}
    return sorted(entries, key=lambda entry: order.get(entry.fqn, len(order)))


def _frozen(entries: list[Entry], trained: set[str], first: ModelStates) -> frozenset[str]:
    """Parameters that no param group holds. Empty ones are never in a group, and not frozen."""
    if not trained:
        return frozenset()
    declared: dict[str, Index] = first.mapping("frozen_param_shapes")
    return frozenset(
        entry.fqn
        for entry in entries
        if entry.kind == PARAM and entry.fqn not in trained and entry.numel
    ) | frozenset(fqn for fqn, shape in declared.items() if 0 not in shape)


def _absent(
    first: ModelStates, entries: Sequence[Entry], tied: Mapping[str, str]
) -> tuple[str, ...]:
    """Placeholders of stage 3 that nothing fills.

    DeepSpeed before 0.9 did not say which names are tied, and leaves a placeholder of each.
    """
    held = {entry.fqn for entry in entries}
    return tuple(name for name in first.module if name not in held and name not in tied)


def _precision(first: ModelStates) -> str:
    """The dtype of the trained module: the float dtype of most parameters."""
    module = first.module.items()
    return most_common_dtype(held.dtype for name, held in module if name not in first.buffers)
