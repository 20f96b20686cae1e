"""What is to be written, decided once: groups, dtypes, configuration, and what is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reshard.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.formats.deepspeed import expert_layout, order
from reshard.formats.deepspeed.write import carried, scaling
from reshard.manifest import Entry
from reshard.model_parallel.sizes import ONE, Sizes
from reshard.stamps import Stamp
from reshard.training import loss_scale
from reshard.training.state import (
    TrainedGroup,
    TrainedParameter,
    Training,
    Weight,
    find_most_common_dtype,
    refuse_non_elementwise_slots,
    refuse_without_optimizer,
)

_SECTIONS = {"bf16": BFLOAT16, "bfloat16": BFLOAT16, "fp16": FLOAT16}  # of DeepSpeed's config
_LISTED = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """What every file is made from.

    Args:
        precision: of the run.
        recast: what the user asked the parameters to become; None: each as trained.
        config: the source's, adapted; where it is not known, no more than stage and precision.
        groups: the optimizer's, members in the order in which the model was given to it.
        flats: the members of each flat tensor, in flat order; at stage 0 those of each group.
        flats_of: the flat tensors of each group, by index.
        frozen: parameters that no group holds; empty ones, as DeepSpeed never optimizes them.
        carried: plain values that stand beside DeepSpeed's own in the model states.
        lost: the names of those that are more than plain.
        scaler: the loss scaler's state; new where the source has none.
        sizes: of the model-parallel grid, of which this is the rank ``mp_rank``.
        layered: whether the module lies in files of its layers.
        experts: how many each layer of them has, in the whole model; they have files of their own.
        turns_ended: whether ``round_robin_gradients`` of the source is off in ``config``.
        weights_only: without optimizer, in the layout of stage 0 or 3.
    """

    state: Training
    world_size: int
    stage: int
    tag: str
    precision: DType
    recast: DType | None
    config: dict[str, Any]
    groups: tuple[TrainedGroup, ...]
    flats: tuple[tuple[TrainedParameter, ...], ...]
    flats_of: tuple[tuple[int, ...], ...]
    frozen: tuple[Weight, ...]
    buffers: tuple[Weight, ...]
    carried: Mapping[str, Any]
    lost: tuple[str, ...]
    scaler: Mapping[str, Any]
    scaler_is_new: bool
    weights_only: bool
    turns_ended: bool = False
    sizes: Sizes = ONE
    mp_rank: int = 0
    layered: bool = False
    experts: tuple[int, ...] = ()

    def stored(self, weight: Weight) -> tuple[Entry, DType]:
        """What fills the module's copy, and its dtype there."""
        return self.state.stored(weight, self.recast)

    def listed(self, fqn: str) -> str:
        """What DeepSpeed calls a parameter: as ``named_parameters`` does, not as the module."""
        return self.state.manifest.wrapped_names.get(fqn, fqn)

    @property
    def lacks_frozen(self) -> bool:
        """Whether frozen parameters of the model are not in the source.

        The source says so, or it has LoRA matrices and no frozen weight that they adapt.
        """
        manifest = self.state.manifest
        adapts = any(".lora_" in weight.fqn for weight in self.state.weights)
        return manifest.without_frozen or (adapts and not manifest.frozen)

    @property
    def clip(self) -> float | None:
        """The norm that gradients are clipped to; None where nothing says: the run's own stays.

        What the optimizer saved comes first: without ``gradient_clipping`` in the configuration
        DeepSpeed clips to a default, which has changed (0.19.8 ``runtime/constants.py``: 1.0).
        """
        saved = self.state.manifest.train.clip
        said = self.config.get("gradient_clipping") if saved is None else saved
        return said if isinstance(said, (int, float)) else None

    def stamp(self, file: str, rank: int = 0) -> Stamp | None:
        """Return the stamp of a file of one data-parallel rank of this model-parallel rank.

        Ranks are numbered as DeepSpeed's topologies do: tensor-parallel ranks first, pipeline
        stages last (0.19.8 ``runtime/pipe/topology.py``, ``PipeModelDataParallelTopology``).
        """
        tensor = self.sizes.tensor
        stage, place = divmod(self.mp_rank, tensor)
        number = (stage * self.world_size + rank) * tensor + place
        return self.state.stamp(file, number, self.world_size * self.sizes.model)

    def sharers(self, group: TrainedGroup) -> int:
        """How many ranks share a group's flat tensors: all that hold the same experts, or all."""
        return order.count_partitions(group, self.world_size)

    def share(self, group: TrainedGroup, rank: int) -> int:
        """A rank's place among those."""
        size = self.world_size // self.sharers(group)
        return expert_layout.locate_rank(self.world_size, size, self.config, rank)[1]

    def param_groups(self) -> list[dict[str, Any]]:
        """As the optimizer keeps them: hyper-parameters, and the indices of the flat tensors."""
        return [
            {**group.hyper, "params": list(indices)}
            for group, indices in zip(self.groups, self.flats_of, strict=True)
        ]


def choose(
    state: Training,
    *,
    world_size: int,
    stage: int,
    precision: DType | None = None,
    tag: str | None = None,
    universal: bool = False,
    weights_only: bool = False,
    trained: DType | None = None,
) -> Choice:
    """Decide everything.

    Args:
        universal: for a universal checkpoint. It has no flat tensors, so each group is listed as it
            is; and an optimizer without hyper-parameters keeps those that it has when it loads.
        trained: the precision of the run, where the state is a part of it; None: that of the state.

    Raises:
        IncompleteError, UnsupportedError, UsageError: as `lay_out`.
    """
    _check_request(world_size, stage, precision, tag)
    if weights_only:
        state, stage = _without_optimizer(state), 3 if stage == 3 else 0
    else:
        refuse_without_optimizer(state)
    _check_source(state, needs_hyper=not (universal or weights_only))
    of_run = precision or trained or precision_of(state)
    config = _adapted(order.engine_config(state), stage, of_run)
    turns_ended = universal and order.requests_round_robin(config)
    if turns_ended:
        config["zero_optimization"]["round_robin_gradients"] = False
    bare = stage == 0 and of_run == FLOAT32  # the optimizer itself, with all that it was given
    _refuse_slots(state, stage, universal=universal)
    groups = _groups(state, keep_empty=bare)
    split = [
        order.split_flat_tensors(group, config, world_size, 2 if universal else stage, of_run)
        for group in groups
    ]
    numbers = iter(range(sum(map(len, split))))
    owned = {member.fqn for group in groups for member in group.members}
    rest = [weight for weight in state.weights if weight.fqn not in owned]
    kept, lost = carried.carried(state)
    scaler = _kept_scaler(state, config, of_run)
    return Choice(
        state=state,
        world_size=world_size,
        stage=stage,
        tag=tag or f"global_step{state.step()}",
        precision=of_run,
        recast=precision,
        config=config,
        groups=groups,
        flats=tuple(flat for own in split for flat in own),
        flats_of=tuple(tuple(next(numbers) for _ in own) for own in split),
        frozen=tuple(weight for weight in rest if weight.is_float),
        buffers=tuple(weight for weight in rest if not weight.is_float),
        carried=kept,
        lost=tuple(lost),
        scaler=scaler or scaling.fresh(order.section(config, "fp16")),
        scaler_is_new=scaler is None,
        weights_only=weights_only,
        turns_ended=turns_ended,
    )


def _refuse_slots(state: Training, stage: int, *, universal: bool) -> None:
    """Refuse slots that this layout has no place for; stage 0 keeps a parameter's state whole."""
    if universal:
        why = "DeepSpeed's universal loader gives a parameter state by element only"
        refuse_non_elementwise_slots(
            state, why, f"write native rank files: --to deepspeed --zero-stage {stage}"
        )
        if any(group.hyper.get("use_muon") is True for group in state.groups):
            raise UnsupportedError(
                state.manifest.origin.path,
                "trains with Muon: DeepSpeed (0.19.8) loads a universal momentum_buffer as flat"
                " pieces, and its stages 1 and 2 then read whole matrices from them; stage 3 asks"
                " for exp_avg of every parameter",
                "write native rank files: --to deepspeed",
            )
    elif stage:
        why = "DeepSpeed's stages 1 to 3 have a place for state by element only"
        refuse_non_elementwise_slots(
            state, why, "stage 0 keeps it: --zero-stage 0", placed=state.scalars
        )


def _without_optimizer(state: Training) -> Training:
    """The weights as one group of what could be trained: DeepSpeed then finds them by name.

    Stages 0 to 2 keep them in one file, which does not depend on stage or ranks; only stage 3 cuts.
    """
    members = tuple(
        TrainedParameter(weight, {}, None)
        for weight in state.weights
        if weight.is_float and weight.fqn not in state.manifest.frozen
    )
    return replace(state, groups=(TrainedGroup({}, members),))


def _check_request(world_size: int, stage: int, precision: DType | None, tag: str | None) -> None:
    if stage not in range(4):
        raise UsageError(f"ZeRO stage {stage}", "stages are 0, 1, 2 and 3")
    if world_size < 1:
        raise UsageError(f"{world_size} ranks", "at least one is needed")
    if precision not in (None, FLOAT32, BFLOAT16, FLOAT16):
        raise UsageError(f"{precision}", "DeepSpeed trains in fp32, bf16 or fp16")
    if tag is not None and (not tag or "/" in tag or tag in (".", "..")):
        raise UsageError(f"tag {tag!r}", "is not the name of a directory")


def _check_source(state: Training, *, needs_hyper: bool) -> None:
    manifest = state.manifest
    if manifest.absent:
        shown = ", ".join(manifest.absent[:_LISTED])
        raise IncompleteError(manifest.origin.path, f"holds no value of {shown}")
    for number, group in enumerate(state.groups):
        if needs_hyper and not group.hyper:
            raise IncompleteError(
                manifest.origin.path,
                f"keeps no hyper-parameters of param group {number} (elastic_checkpoint does not):"
                " the optimizer that loads them would have no learning rate",
                "give them with --param-groups FILE, or write --to ds-universal, with which the"
                " optimizer keeps those of its script",
            )


def precision_of(state: Training) -> DType:
    """The dtype of most trained elements; without an optimizer, of those that could be trained."""
    groups = state.groups or _without_optimizer(state).groups
    return find_most_common_dtype(member.weight for group in groups for member in group.members)


def _adapted(config: dict[str, Any] | None, stage: int, precision: DType) -> dict[str, Any]:
    """The configuration with the stage and the precision that the files will have.

    Without MiCS: every rank will have a part of its own.
    """
    adapted = dict(config or {})
    zero = order.section(config, "zero_optimization").items()
    adapted["zero_optimization"] = {k: v for k, v in zero if not k.startswith("mics_")}
    adapted["zero_optimization"]["stage"] = stage
    for name, dtype in _SECTIONS.items():
        if name in adapted or (dtype == precision and name != "bfloat16"):
            adapted[name] = {**order.section(adapted, name), "enabled": dtype == precision}
    return adapted


def _groups(state: Training, *, keep_empty: bool) -> tuple[TrainedGroup, ...]:
    """The groups in the user's order, without the parameters that DeepSpeed never optimizes."""
    groups = []
    for group, ordered in zip(state.groups, order.user_order(state), strict=True):
        members = [m for m in ordered if m.weight.value.numel or keep_empty]
        groups.append(replace(group, members=tuple(members)))
    return tuple(groups)


def _kept_scaler(
    state: Training, config: dict[str, Any], precision: DType
) -> dict[str, Any] | None:
    """The source's loss scaler; None where its training was not scaled."""
    if precision != FLOAT16:
        return scaling.none()
    if loss_scale.is_idle(state.manifest.train.scaler):
        return None
    found = loss_scale.convert_to_deepspeed(state.manifest.train.scaler, state.step())
    return found and scaling.kept(found, order.section(config, "fp16"))
