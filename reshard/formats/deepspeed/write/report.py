"""Tell the user what differs from the source, and what the run that loads the output needs."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.core.dtypes import FLOAT16, FLOAT32
from reshard.formats.deepspeed import flat_order
from reshard.formats.deepspeed.flat_groups import FlatGroup
from reshard.formats.deepspeed.train_state import is_older
from reshard.formats.deepspeed.write.pickled_objects import is_deepspeed_optimizer
from reshard.formats.deepspeed.write.spec import OutputSpec
from reshard.formats.deepspeed.write.split_metadata import NOT_DESCRIBED
from reshard.formats.deepspeed.write.universal import (
    count_steps,
    find_common_hyper,
    find_new_slots,
)
from reshard.formats.parameter_kinds import marks_buffers
from reshard.training import loss_scale, optimizers
from reshard.training.state import WritableState, collect_slot_names, describe_lost_state
from reshard.units import abridge, counted

_LISTED = 4
_NATIVE = "for stage 3, write --to deepspeed --zero-stage 3"
_STAGE_3 = optimizers.MOMENTS  # the slots that stage 3 loads from a universal checkpoint


def describe_output(spec: OutputSpec) -> Iterator[str]:
    """Yield the notes on a native directory."""
    yield from _note_lost(spec)
    if spec.weights_only:
        yield from _note_weights_only(spec)
        return
    if spec.lacks_frozen and spec.stage != 3:
        yield (
            "frozen parameters are not in the source: without load_module_strict=False,"
            " load_checkpoint fails on them"
        )
    yield from _note_scaler(spec, f"one starts at {spec.scaler['cur_scale']}")
    if spec.stage:
        yield from _note_never_stepped(spec)
        yield from note_recomputed(spec.state, "all ranks get the first rank's")
    yield from _note_muon(spec)
    outside = [weight.fqn for weight in spec.frozen]
    if spec.stage == 0 and spec.precision == FLOAT32 and outside:
        yield (
            "DeepSpeed loads stage 0 in fp32 only into an optimizer of the same parameters; these"
            f" must not be in it: {abridge(outside, _LISTED)}"
        )
    if not _is_from_deepspeed(spec):
        by_model = spec.state.manifest.ordered_by_model
        order_known = "the model" if by_model else "the source's state dict"
        yield (
            f"DeepSpeed identifies parameters by position: they are in the order of {order_known},"
            " which must be the order of model.parameters() in each of the run's param groups"
        )
        yield from _note_other_framework(spec)
        yield from _note_clipping(spec)
        known = spec.state.manifest.frozen
        unsure = [weight.fqn for weight in spec.frozen if weight.fqn not in known]
        if spec.stage == 3 and unsure and not marks_buffers(spec.state):
            yield (
                "in no param group, so treated as frozen parameters, which stage 3 cuts (if one is"
                f" a buffer, it will not load): {abridge(unsure, _LISTED)}"
            )


def describe_universal(spec: OutputSpec, *, described: bool = False) -> Iterator[str]:
    """Yield the notes on a universal checkpoint.

    Args:
        described: whether it describes how tensor-parallel ranks share its parameters.
    """
    many = "any grid of ranks at stages 1 and 2 (a pipeline: 1)"
    grid = many if described else "any number of ranks at stages 1 to 3"
    yield (
        f'for {grid}, with "checkpoint": {{"load_universal": true}}: --world-size and'
        " --zero-stage only set values in the stored configuration"
    )
    version = spec.state.manifest.origin.versions.get("deepspeed", "")
    if spec.stage == 3 and is_older(version, (0, 19, 0)):
        yield (
            "DeepSpeed before 0.19, which saved the source, cannot load it at stage 3 (\"'dict'"
            " object has no attribute 'view'\"): load it with a later version, or write --to"
            " deepspeed"
        )
    yield from _note_lost(spec)
    yield from _note_not_restored(spec)
    yield from _note_scaler(spec, "the run that loads it starts its own")
    if spec.drops_round_robin:
        yield (
            "the run that loads it must not have round_robin_gradients, with which DeepSpeed puts"
            " every universal checkpoint into the wrong places"
        )
    # Every such dict states its version. Further keys describe tensor parallelism.
    info = spec.extra_state.get("universal_checkpoint_info", {})
    if len(info) > 1 and not described:
        yield NOT_DESCRIBED
    yield from _note_never_stepped(spec)
    if _uses_deepspeed_optimizer(spec):
        yield (
            "its steps are numbers, as DeepSpeed's own Adam counts them; torch's Adam"
            ' ("torch_adam": true) needs tensors: for it, set state["step"] ='
            ' torch.tensor(float(state["step"])) in each state of engine.basic_optimizer after'
            " load_checkpoint"
        )
    if not described:
        yield from _note_hyper(spec)
        yield from _note_stage_3(spec)
    yield from _note_small_groups(spec)
    if not _is_from_deepspeed(spec):
        yield from _note_other_framework(spec)
        yield from _note_clipping(spec)


def _note_clipping(spec: OutputSpec) -> Iterator[str]:
    # Source: DeepSpeed ``runtime/constants.py``, GRADIENT_CLIPPING_DEFAULT: 0 until 0.19.2, then
    # 1.0.
    if spec.clip is None:
        yield (
            "the source states no gradient clipping, and DeepSpeed 0.19.3 and later clips gradients"
            " to a norm of 1.0 by default: set gradient_clipping in its configuration to the norm"
            " of the run, or to 0 for none"
        )


def _is_from_deepspeed(spec: OutputSpec) -> bool:
    return spec.state.manifest.origin.format.startswith("deepspeed")


def _uses_deepspeed_optimizer(spec: OutputSpec) -> bool:
    return any(is_deepspeed_optimizer(group.hyper) for group in spec.groups)


def _note_muon(spec: OutputSpec) -> Iterator[str]:
    # zero.Init makes every parameter 1-d and empty, so that Muon's sort by shape changes nothing
    # (DeepSpeed 0.19.8 ``partition_parameters.py``, ``free_param``).
    if spec.stage != 3 or flat_order.find_source_stage(spec.state) == 3:
        return
    position = {weight.fqn: number for number, weight in enumerate(spec.state.weights)}
    muon = flat_order.find_shape_sorted_groups(group.hyper for group in spec.groups)
    places = [[position[fqn] for fqn in spec.groups[number].fqns] for number in muon]
    if any(found != sorted(found) for found in places):
        yield (
            "Muon's parameters are in the order of their shapes, as stage 3 has them in a model"
            " that is built without deepspeed.zero.Init; under zero.Init (from_pretrained of HF"
            " Trainer uses it at stage 3) the same files would be loaded into other parameters"
        )


def _note_lost(spec: OutputSpec) -> Iterator[str]:
    for name in spec.lost:
        yield f"not copied: {name} (not a plain value, or a name of DeepSpeed's own)"
    if not spec.weights_only:
        yield from describe_lost_state(spec.state)
    if spec.state.manifest.train.samples is None and not spec.weights_only:
        yield "the source does not count samples: DeepSpeed uses steps x batch size"


def _note_scaler(spec: OutputSpec, begins: str) -> Iterator[str]:
    scaler = spec.state.manifest.train.scaler
    if spec.precision != FLOAT16:
        if not loss_scale.is_idle(scaler):
            yield f"a run in {spec.precision} has no loss scaler: the source's was not copied"
    elif not spec.scaler_is_new:
        if "cur_scale" not in scaler:
            yield "the GradScaler becomes DeepSpeed's loss scaler"
    elif loss_scale.is_idle(scaler):
        yield f"the source has no loss scaler: {begins}"
    else:
        yield f"DeepSpeed cannot represent the source's loss scaler: {begins}"


def _note_not_restored(spec: OutputSpec) -> Iterator[str]:
    """Name what is lost: a universal load never reads the module (0.19.8 ``runtime/engine.py``)."""
    left = [weight.fqn for weight in (*spec.frozen, *spec.buffers) if weight.value.numel]
    if left:
        yield (
            "DeepSpeed's universal load restores no frozen parameter and no buffer: load those"
            " under 'module' in mp_rank_00_model_states.pt into the model before"
            f" deepspeed.initialize ({abridge(left, _LISTED)})"
        )


def _note_hyper(spec: OutputSpec) -> Iterator[str]:
    if not all(group.hyper for group in spec.groups):
        yield (
            "the source does not keep hyper-parameters (elastic_checkpoint): the optimizer keeps"
            " those of its script"
        )
        if spec.state.manifest.train.scheduler is not None:
            yield (
                "the script's scheduler has set its first learning rate by then (WarmupLR: 0):"
                " after load_checkpoint, give each group of engine.optimizer.param_groups the"
                ' "lr" that engine.lr_scheduler.get_lr() returns for it'
            )
        return
    common = find_common_hyper(spec)
    differing = dict.fromkeys(key for g in spec.groups for key in g.hyper if key not in common)
    if differing:
        yield (
            "stage 3 would use the first group's hyper-parameters for all: there, each group keeps"
            f" its script's {', '.join(differing)}"
        )


def _note_stage_3(spec: OutputSpec) -> Iterator[str]:
    counts = count_steps(spec)
    if len(seen := {count or 0 for count in counts}) > 1:
        shown = abridge([f"{count:g}" for count in sorted(seen)], _LISTED)
        yield f"groups were updated {shown} times: stage 3 uses the first group's number for all"
    if any(counts) and not _uses_deepspeed_optimizer(spec):
        yield (
            "at stage 3 with several param groups or sub-groups, give each its own counter after"
            ' loading (state["step"] = state["step"].clone() for each state of'
            " engine.basic_optimizer): DeepSpeed lets them share one, which torch then increments"
            " once for each"
        )
    new = find_new_slots(spec)
    if new:
        yield (
            f"the Adam has made no step, so {abridge(new, _LISTED)} are zeros at step 0, without"
            " which stage 3 loads no optimizer"
        )
    slots = spec.state.slots or new
    if missing := [name for name in _STAGE_3 if name not in slots]:
        needed = abridge(missing, _LISTED)
        yield f"does not load at stage 3, which needs {needed} of every parameter; {_NATIVE}"
    elif others := [name for name in slots if name not in _STAGE_3]:
        lost = abridge(others, _LISTED)
        yield f"stage 3 does not load {lost}, without which the optimizer fails; {_NATIVE}"


def _note_small_groups(spec: OutputSpec) -> Iterator[str]:
    """Name groups of which a rank has no element: stages 1 and 2 then fail at ``steps[0]``."""
    for number, group in enumerate(spec.groups):
        numel = sum(member.weight.value.numel for member in group.members)
        if not FlatGroup({"": (numel,)}, spec.world_size, (0,)).count_stored(spec.world_size - 1):
            yield (
                f"param group {number} has {numel} elements, of which the last of"
                f" {counted(spec.world_size, 'rank')} gets none: stages 1 and 2 load it only at"
                " fewer ranks"
            )


def _note_weights_only(spec: OutputSpec) -> Iterator[str]:
    if spec.stage != 3:
        yield "stages 0, 1 and 2 load it at any number of ranks"
    if spec.precision != FLOAT32:
        yield f"DeepSpeed then creates its fp32 masters from the {spec.precision} weights"


def note_recomputed(state: WritableState, what: str) -> Iterator[str]:
    """Yield a note on the slots that each rank computes from its own piece of a flat tensor.

    Args:
        what: what the output does with them.
    """
    names = [n for n in collect_slot_names(state.members) if n in optimizers.RECOMPUTED]
    if names:
        yield f"{what}: {abridge(names, _LISTED)}, which the next update computes again"


def _note_never_stepped(spec: OutputSpec) -> Iterator[str]:
    idle = [
        member.fqn
        for group in spec.groups
        if any(member.slots for member in group.members)
        for member in group.members
        if not member.slots
    ]
    if idle:
        yield f"never stepped, so its state starts at zero: {abridge(idle, _LISTED)}"


def _note_other_framework(spec: OutputSpec) -> Iterator[str]:
    if spec.recast is None:
        yield f"written for a run in {spec.precision}: for another precision, set it with --dtype"
    if spec.state.manifest.train.scheduler is None:
        yield (
            "there is no scheduler state: if the run has a scheduler, load with"
            " load_lr_scheduler_states=False"
        )
    if not _uses_deepspeed_optimizer(spec) and not optimizers.is_of_bitsandbytes(spec.state.slots):
        yield 'the optimizer must be torch\'s own in DeepSpeed too (for Adam: "torch_adam": true)'
