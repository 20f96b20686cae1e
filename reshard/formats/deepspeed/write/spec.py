"""Decide once what is written: groups, flat tensors, dtypes, configuration, and what is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reshard.containers.pickles import script_values
from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from reshard.core.manifest import Entry, find_main_dtype
from reshard.core.stamps import Stamp
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.formats.deepspeed import flat_order
from reshard.formats.deepspeed.cuts import TENSOR_PARALLEL_INFO
from reshard.formats.deepspeed.experts.layout import has_experts, locate_rank
from reshard.formats.deepspeed.train_state import ENGINE_KEYS
from reshard.formats.deepspeed.write.pickled_objects import (
    UNSCALED,
    complete_scaler,
    make_initial_scaler,
)
from reshard.formats.request import Request
from reshard.layouts.model_parallel.sizes import Sizes
from reshard.state_dict.optimizers.hyper_parameters import build_tensors
from reshard.state_dict.own_values import find_scheduler
from reshard.state_dict.plain_values import is_plain
from reshard.state_dict.torch_state_dict import refuse_lost_state
from reshard.training import loss_scale, optimizers
from reshard.training.companion_files import BATCH_BEFORE
from reshard.training.state import (
    TrainedGroup,
    TrainedParameter,
    Weight,
    WritableState,
    refuse_non_elementwise_slots,
    refuse_slots_of_flat_tensors,
    refuse_without_optimizer,
)

_ADAPTED = (".base_layer.weight", ".weight")  # of a module with LoRA; the second before PEFT 0.6
_LISTED = 4


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The decisions that every file is laid out by.

    Args:
        precision: dtype in which the run trains.
        recast: dtype that the user chose for the parameters; None: each as trained.
        config: the source's configuration, adapted; only stage and precision if it is not known.
        groups: the optimizer's groups; members in the order in which they were passed to it.
        flats_of: for each group, the members of its flat tensors in flat order; at stage 0 and in a
            universal checkpoint one flat tensor for each group.
        frozen: parameters that no group holds, including empty ones, which DeepSpeed never
            optimizes.
        extra_state: values beside DeepSpeed's own in the model states.
        lost: the names of values that cannot be written.
        scaler: the loss scaler's state; a new one if the source has none.
        sizes: sizes of the model-parallel grid, of which this is the rank ``mp_rank``.
        layered: whether the module is in files of its layers.
        experts: how many experts each MoE layer of the whole model has; they have their own files.
        spans_tensor_ranks: whether expert-parallel groups have ranks of all tensor-parallel ranks.
        drops_round_robin: whether ``round_robin_gradients`` of the source is off in ``config``.
        weights_only: without optimizer, in the layout of stage 0 or 3.
    """

    state: WritableState
    world_size: int
    stage: int
    tag: str
    precision: DType
    recast: DType | None
    config: dict[str, Any]
    groups: tuple[TrainedGroup, ...]
    flats_of: tuple[tuple[tuple[TrainedParameter, ...], ...], ...]
    frozen: tuple[Weight, ...]
    buffers: tuple[Weight, ...]
    extra_state: Mapping[str, Any]
    lost: tuple[str, ...]
    scaler: Mapping[str, Any]
    scaler_is_new: bool
    weights_only: bool
    drops_round_robin: bool
    sizes: Sizes
    mp_rank: int = 0
    layered: bool = False
    experts: tuple[int, ...] = ()
    spans_tensor_ranks: bool = False

    @property
    def flats(self) -> tuple[tuple[TrainedParameter, ...], ...]:
        """The members of each flat tensor of all groups."""
        return tuple(flat for flats in self.flats_of for flat in flats)

    def stored(self, weight: Weight) -> tuple[Entry, DType]:
        """Return what fills the module's copy, and its dtype there."""
        return self.state.stored(weight, self.recast)

    def get_listed_name(self, fqn: str) -> str:
        """Return DeepSpeed's name of a parameter, that of ``named_parameters``."""
        return self.state.manifest.wrapped_names.get(fqn, fqn)

    @property
    def lacks_frozen(self) -> bool:
        """Whether frozen parameters of the model are not in the source.

        The source declares it, or it has LoRA matrices and no frozen weight that they adapt.
        """
        held = {weight.fqn for weight in self.state.weights}
        adapted = {fqn.partition(".lora_")[0] for fqn in held if ".lora_" in fqn}
        names = (f"{module}{base}" for module in adapted for base in _ADAPTED)
        return self.state.manifest.without_frozen or (bool(adapted) and held.isdisjoint(names))

    @property
    def clip(self) -> float | None:
        """The norm that gradients are clipped to; None if unknown: the new run's own stays.

        What the source's run did comes first: without ``gradient_clipping`` in the configuration
        DeepSpeed clips to a default, which has changed (0.19.8 ``runtime/constants.py``: 1.0).
        """
        saved = self.state.manifest.train.clip
        clip = self.config.get("gradient_clipping") if saved is None else saved
        return clip if isinstance(clip, (int, float)) else None

    def stamp(self, file: str, rank: int = 0) -> Stamp | None:
        """Return the stamp of a file of one data-parallel rank of this model-parallel rank.

        Ranks are numbered as in DeepSpeed's topologies: tensor-parallel ranks first, pipeline
        stages last (0.19.8 ``runtime/pipe/topology.py``, ``PipeModelDataParallelTopology``).
        """
        tensor = self.sizes.tensor
        stage, tensor_rank = divmod(self.mp_rank, tensor)
        number = (stage * self.world_size + rank) * tensor + tensor_rank
        return self.state.stamp(file, number, self.world_size * self.sizes.model)

    def count_partitions(self, group: TrainedGroup) -> int:
        """Return how many ranks share a group's flat tensors."""
        return flat_order.count_partitions(group, self.world_size * self._count_spanned(group))

    def locate_partition(self, group: TrainedGroup, rank: int) -> int:
        """Return a data-parallel rank's position among those that share a group's flat tensors."""
        spanned = self._count_spanned(group)
        world = self.world_size * spanned
        size = world // self.count_partitions(group)
        return locate_rank(world, size, self.config, rank * spanned + self.mp_rank % spanned)[1]

    def _count_spanned(self, group: TrainedGroup) -> int:
        """Return how many tensor-parallel ranks the ranks that share a group belong to."""
        return self.sizes.tensor if self.spans_tensor_ranks and has_experts(group.hyper) else 1

    def build_param_groups(self) -> list[dict[str, Any]]:
        """Return the groups as the optimizer stores them, with the indices of the flat tensors."""
        numbers = iter(range(len(self.flats)))
        return [
            {**build_tensors(group.hyper), "params": [next(numbers) for _ in flats]}
            for group, flats in zip(self.groups, self.flats_of, strict=True)
        ]


def resolve_spec(
    state: WritableState, target: Request, *, universal: bool = False, trained: DType | None = None
) -> OutputSpec:
    """Decide what is written.

    Args:
        universal: whether a universal checkpoint is written. It has no flat tensors, so each group
            is listed as it is; and an optimizer without hyper-parameters keeps those of its script.
        trained: the precision of the run, if the state is a part of it; None: that of the state.
    """
    world_size, stage, precision = target.data_parallel, target.zero_stage, target.dtype
    weights_only, tag = target.weights_only, target.tag
    _check_options(world_size, stage, precision)
    if weights_only:
        state, stage = _without_optimizer(state), 3 if stage == 3 else 0
    else:
        refuse_without_optimizer(state)
        refuse_lost_state(state)
    _check_source(state, needs_hyper=not (universal or weights_only))
    of_run = precision or trained or find_precision(state)
    stated = target.live.config or flat_order.find_engine_config(state)
    config = _adapt_config(stated, stage, of_run)
    # DeepSpeed loads a universal checkpoint into the wrong places under round_robin_gradients.
    drops_round_robin = universal and flat_order.requests_round_robin(config)
    if drops_round_robin:
        config["zero_optimization"]["round_robin_gradients"] = False
    if stage or of_run != FLOAT32:
        _refuse_without_master(state)
    _refuse_slots(state, stage, universal=universal)
    groups = _sort_groups(state, stage, keep_empty=stage == 0 and of_run == FLOAT32)
    owned = {member.fqn for group in groups for member in group.members}
    rest = [weight for weight in state.weights if weight.fqn not in owned]
    extra_state, lost = select_extra_state(state)
    scaler = _convert_scaler(state, config, of_run)
    return OutputSpec(
        state=state,
        world_size=world_size,
        stage=stage,
        tag=tag or f"global_step{state.step}{'_universal' if universal else ''}",
        precision=of_run,
        recast=precision,
        config=config,
        groups=groups,
        flats_of=tuple(
            # In a universal checkpoint stage 2 stands for "one flat tensor for each group".
            flat_order.split_flat_tensors(
                group, config, world_size, 2 if universal else stage, of_run
            )
            for group in groups
        ),
        frozen=tuple(weight for weight in rest if weight.is_float),
        buffers=tuple(weight for weight in rest if not weight.is_float),
        extra_state=extra_state,
        lost=tuple(lost),
        scaler=scaler or make_initial_scaler(flat_order.get_section(config, "fp16")),
        scaler_is_new=scaler is None,
        weights_only=weights_only,
        drops_round_robin=drops_round_robin,
        sizes=target.parallel,
    )


def _refuse_slots(state: WritableState, stage: int, *, universal: bool) -> None:
    if universal:
        refuse_non_elementwise_slots(
            state,
            "DeepSpeed's universal loader restores only state that has a value for each element",
            f"write native rank files: --to deepspeed --zero-stage {stage}",
        )
        if optimizers.is_of_bitsandbytes(state.slots):
            raise UnsupportedError(
                state.manifest.origin.path,
                "was trained with an optimizer of bitsandbytes, which keeps codes: DeepSpeed's"
                " universal loader would copy values into them",
                f"write native rank files: --to deepspeed --zero-stage {stage}",
            )
        if any(group.hyper.get("use_muon") is True for group in state.groups):
            raise UnsupportedError(
                state.manifest.origin.path,
                "trains with Muon: DeepSpeed (0.19.8) loads a universal momentum_buffer as flat"
                " pieces, and its stages 1 and 2 then read whole matrices from them; stage 3"
                " requires exp_avg of every parameter",
                "write native rank files: --to deepspeed",
            )
    elif stage:
        refuse_non_elementwise_slots(
            state,
            "DeepSpeed's stages 1 to 3 store only state that has a value for each element",
            "stage 0 keeps it: --zero-stage 0",
            placed=state.scalars,
        )
    else:
        remedy = "write stage 1, 2 or 3 (--zero-stage), or leave out the optimizer: --weights-only"
        refuse_slots_of_flat_tensors(state, remedy)


def _refuse_without_master(state: WritableState) -> None:
    """Refuse trained parameters of which no float32 master can be made, such as complex ones."""
    for member in state.members:
        dtype = member.weight.dtype
        if dtype.family != "float":
            raise UnsupportedError(
                state.manifest.origin.path,
                f"{member.fqn!r} is trained in {dtype}, of which DeepSpeed makes no float32 master",
                "stage 0 in fp32 keeps its dtype: --to deepspeed --zero-stage 0 --dtype fp32",
            )


def _without_optimizer(state: WritableState) -> WritableState:
    # DeepSpeed finds weights by name. Stages 0 to 2 keep them in one file, which does not depend on
    # stage or ranks; only stage 3 cuts.
    members = tuple(
        TrainedParameter(weight, {}, None)
        for weight in state.weights
        if weight.is_float and weight.fqn not in state.manifest.frozen
    )
    return replace(state, groups=(TrainedGroup({}, members),))


def _check_options(world_size: int, stage: int, precision: DType | None) -> None:
    if stage not in range(4):
        raise UsageError(f"ZeRO stage {stage}", "stages are 0, 1, 2 and 3")
    if world_size < 1:
        raise UsageError(f"{world_size} ranks", "at least one is needed")
    if precision not in (None, FLOAT32, BFLOAT16, FLOAT16):
        raise UsageError(f"{precision}", "DeepSpeed trains in fp32, bf16 or fp16")


def _check_source(state: WritableState, *, needs_hyper: bool) -> None:
    manifest = state.manifest
    if manifest.absent:
        shown = ", ".join(manifest.absent[:_LISTED])
        raise IncompleteError(manifest.origin.path, f"does not contain a value of {shown}")
    for number, group in enumerate(state.groups):
        if needs_hyper and not group.hyper:
            raise IncompleteError(
                manifest.origin.path,
                f"does not keep the hyper-parameters of param group {number} (elastic_checkpoint):"
                " the optimizer that loads them would have no learning rate",
                "pass all of them with --param-groups FILE, or write --to ds-universal, with which"
                " the optimizer keeps those of its script",
            )


def find_precision(state: WritableState) -> DType:
    """Return the dtype in which the engine computes.

    Without its configuration, that is the dtype of most trained elements. LoRA stays in float32
    under stage 3: PEFT makes it so, and zero.Init tells the engine that it need not cast.
    """
    stated = flat_order.find_16_bit_precision(flat_order.find_engine_config(state))
    if stated is not None:
        return stated
    groups = state.groups or _without_optimizer(state).groups
    weights = (member.weight for group in groups for member in group.members)
    return find_main_dtype((weight.dtype, weight.value.numel) for weight in weights)


def _adapt_config(config: Mapping[str, Any] | None, stage: int, precision: DType) -> dict[str, Any]:
    # MiCS is left out: every rank will have its own part.
    adapted = dict(config or {})
    section = flat_order.get_zero_section(config)
    zero = {key: value for key, value in section.items() if not str(key).startswith("mics_")}
    adapted["zero_optimization"] = {**zero, "stage": stage}
    for name, dtype in flat_order.PRECISIONS.items():
        # The older name is adapted where it is used, but never added.
        if name in adapted or (dtype == precision and name != "bfloat16"):
            adapted[name] = {**flat_order.get_section(adapted, name), "enabled": dtype == precision}
    return adapted


def _sort_groups(state: WritableState, stage: int, *, keep_empty: bool) -> tuple[TrainedGroup, ...]:
    # Stage 0 in fp32 keeps parameters without elements: its file holds the user's optimizer itself.
    by_shape = flat_order.find_shape_sorted_groups(group.hyper for group in state.groups)
    if state.is_live or stage == flat_order.find_source_stage(state) == 3:
        # Keep the order: it is by shape, or the model's if zero.Init hid the shapes.
        by_shape = frozenset()
    groups = []
    for number, members in enumerate(flat_order.iterate_user_order(state)):
        kept = [m for m in members if m.weight.value.numel or keep_empty]
        if number in by_shape:
            kept.sort(key=lambda member: member.weight.shape, reverse=True)
        groups.append(replace(state.groups[number], members=tuple(kept)))
    return tuple(groups)


def _convert_scaler(
    state: WritableState, config: dict[str, Any], precision: DType
) -> dict[str, Any] | None:
    if precision != FLOAT16:
        return UNSCALED
    if loss_scale.is_idle(state.manifest.train.scaler):
        return None
    scaler = loss_scale.convert_to_deepspeed(state.manifest.train.scaler, state.step)
    return scaler and complete_scaler(scaler, flat_order.get_section(config, "fp16"))


RANDOM_STATES = frozenset(
    "random_rng_state np_rng_state torch_rng_state cuda_rng_state rng_tracker_states".split()
)


def select_extra_state(state: WritableState) -> tuple[dict[str, Any], list[str]]:
    """Return the values beside DeepSpeed's own that can be written, and the names of the others."""
    train = state.manifest.train
    kept: dict[str, Any] = {}
    lost: list[str] = []
    of_deepspeed = state.manifest.origin.format.startswith("deepspeed")
    # Programs with Megatron's arguments save the states of one model-parallel rank in each file.
    # The manifest has those of the first rank, which would repeat its dropout on every other one.
    random = RANDOM_STATES if "args" in train.client else frozenset[str]()
    own = ENGINE_KEYS if of_deepspeed else {TENSOR_PARALLEL_INFO}  # which `grid` may have made
    for values, fits in (
        (train.client, train.client.keys() - ENGINE_KEYS - random),
        (train.opaque, train.opaque.keys() & own),
    ):
        for name, value in values.items():
            if name in fits and name in train.objects:
                kept[name] = train.objects[name]
                lost += script_values.list_left_out(name, value, kept[name])
            elif name in fits and is_plain(value):
                kept[name] = value
            elif name != BATCH_BEFORE:  # which is written beside trainer_state.json
                lost.append(name)
    if train.scheduler is not None and find_scheduler(train) is None:
        lost.append("lr_scheduler")
    return kept, lost


def adapt_args(
    extra_state: Mapping[str, Any], sizes: Sizes, data: int, rank: int
) -> dict[str, Any]:
    """Return the values with the sizes of the new grid in Megatron-DeepSpeed's ``args``.

    It compares some of them when it loads (deepspeedai Megatron-DeepSpeed 4efb479
    ``megatron/checkpointing.py``, ``check_checkpoint_args``).

    Args:
        data: number of data-parallel ranks.
        rank: number of the model-parallel rank, tensor-parallel ranks first.
    """
    args = extra_state.get("args")
    if not script_values.is_namespace(args):
        return dict(extra_state)
    stage, tensor = divmod(rank, sizes.tensor)
    number = stage * data * sizes.tensor + tensor
    changed = {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "transformer_pipeline_model_parallel_size": sizes.pipeline,
        "data_parallel_size": data,
        "world_size": sizes.model * data,
        "rank": number,
        "local_rank": number,
    }
    return {**extra_state, "args": script_values.with_attributes(args, changed)}
