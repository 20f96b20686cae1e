"""What is not as it was in the source, and what the run that loads it must be told."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.dtypes import FLOAT16, FLOAT32
from reshard.formats.deepspeed.write import universal
from reshard.formats.deepspeed.write.choice import Choice
from reshard.formats.deepspeed.write.flat import ALIGNMENT
from reshard.formats.deepspeed.write.objects import deepspeeds_own
from reshard.training import loss_scale
from reshard.training.state import describe_lost_state
from reshard.units import some

_LISTED = 4
_STAGE_3 = ("exp_avg", "exp_avg_sq")  # the slots that it loads of a universal checkpoint


def notes(choice: Choice) -> Iterator[str]:
    """Of a native directory; one sentence each."""
    yield from _of_the_run(choice)
    if choice.weights_only:
        yield from _of_weights(choice)
        return
    yield from _of_scaler(choice, f"one begins at {choice.scaler['cur_scale']}")
    if choice.stage:
        yield from _of_idle(choice)
    yield from _of_frozen(choice)
    if not _is_deepspeeds(choice):
        yield (
            "DeepSpeed finds parameters by their place alone: they stand in the order of the"
            " source's state dict, which must be that of model.parameters() in each of the run's"
            " param groups"
        )
        yield from _of_other_frameworks(choice)
        yield from _of_unsure(choice)


def notes_universal(choice: Choice, *, marked: bool = False) -> Iterator[str]:
    """Of a universal checkpoint; one sentence each.

    Args:
        marked: whether it says how tensor-parallel ranks share its parameters.
    """
    many = "any grid of ranks at stages 1 and 2 (a pipeline: 1)"
    grid = many if marked else "any number of ranks at stages 1 to 3"
    yield (
        f'for {grid}, with "checkpoint": {{"load_universal": true}}:'
        " --world-size and --zero-stage are said in the configuration that it keeps, no more"
    )
    yield from _of_the_run(choice)
    yield from _unrestored(choice)
    yield from _of_scaler(choice, "that of the run that loads it begins anew")
    if choice.turns_ended:
        yield (
            "the run that loads it must not have round_robin_gradients, with which DeepSpeed puts"
            " every universal checkpoint into the wrong places"
        )
    info = choice.carried.get("universal_checkpoint_info", {})
    if len(info) > 1 and not marked:
        yield "its tensors are not marked for tensor parallelism: load it at a degree of 1"
    yield from _of_idle(choice)
    if any(deepspeeds_own(group.hyper) for group in choice.groups):
        yield (
            "its steps are numbers, as DeepSpeed's own Adam counts them; torch's Adam"
            ' ("torch_adam": true) needs tensors: for it, set state["step"] ='
            ' torch.tensor(float(state["step"])) in each state of engine.basic_optimizer after'
            " load_checkpoint"
        )
    if not marked:
        yield from _of_hypers(choice)
        yield from _of_slots(choice)
    yield from _of_small_groups(choice)
    if not _is_deepspeeds(choice):
        yield from _of_other_frameworks(choice)


def _is_deepspeeds(choice: Choice) -> bool:
    return choice.state.manifest.origin.format.startswith("deepspeed")


def _of_the_run(choice: Choice) -> Iterator[str]:
    train = choice.state.manifest.train
    for name in choice.lost:
        yield f"not carried, as it is more than plain values or DeepSpeed's own name: {name}"
    if not choice.weights_only:
        yield from describe_lost_state(choice.state)
    if train.samples is None and not choice.weights_only:
        yield "the source does not count samples: DeepSpeed takes its steps times its batch"


def _of_scaler(choice: Choice, begins: str) -> Iterator[str]:
    scaler = choice.state.manifest.train.scaler
    if choice.precision != FLOAT16:
        if not loss_scale.is_idle(scaler):
            yield f"a run in {choice.precision} has no loss scaler: the source's is left out"
    elif not choice.scaler_is_new:
        if "cur_scale" not in scaler:
            yield "the GradScaler becomes DeepSpeed's loss scaler"
    elif loss_scale.is_idle(scaler):
        yield f"the source has no loss scaler: {begins}"
    else:
        yield f"the source's loss scaler has no form in DeepSpeed: {begins}"


def _unrestored(choice: Choice) -> Iterator[str]:
    """DeepSpeed's universal load never reads the module (``runtime/engine.py``, 0.19.8)."""
    left = [weight.fqn for weight in (*choice.frozen, *choice.buffers) if weight.value.numel]
    if left:
        yield (
            "DeepSpeed's universal load restores no frozen parameter and no buffer: give the model"
            " those under 'module' in mp_rank_00_model_states.pt before deepspeed.initialize"
            f" ({some(left, _LISTED)})"
        )


def _of_hypers(choice: Choice) -> Iterator[str]:
    if not all(group.hyper for group in choice.groups):
        yield (
            "the source keeps no hyper-parameters (elastic_checkpoint does not): the optimizer goes"
            " on with those of its script"
        )
        if choice.state.manifest.train.scheduler is not None:
            yield (
                "the script's scheduler has set its first learning rate by then (WarmupLR: 0):"
                " after load_checkpoint, give each group of engine.optimizer.param_groups the"
                ' "lr" that engine.lr_scheduler.get_lr() returns for it'
            )
        return
    common = universal.common_hyper(choice)
    differing = dict.fromkeys(key for g in choice.groups for key in g.hyper if key not in common)
    if differing:
        yield (
            "stage 3 would give the first group's hyper-parameters to all: there, of"
            f" {', '.join(differing)}, each group keeps what its script gives it"
        )


def _of_slots(choice: Choice) -> Iterator[str]:
    """What stage 3 asks for, and takes."""
    counts = universal.steps(choice)
    if len(seen := {count or 0 for count in counts}) > 1:
        shown = some([f"{count:g}" for count in sorted(seen)], _LISTED)
        yield f"groups were updated {shown} times: stage 3 takes the first's number for all"
    if any(counts) and not any(deepspeeds_own(group.hyper) for group in choice.groups):
        yield (
            "at stage 3 with several param groups or sub-groups, give each its own counter after"
            ' loading (state["step"] = state["step"].clone() for each state of'
            " engine.basic_optimizer): DeepSpeed lets them share one, which torch counts up for"
            " each"
        )
    held = choice.state.slots
    if missing := [name for name in _STAGE_3 if name not in held]:
        asked = some(missing, _LISTED)
        yield f"does not load at stage 3, which asks for {asked} of every parameter"
    elif others := [name for name in held if name not in _STAGE_3]:
        yield f"stage 3 does not load {some(others, _LISTED)}"


def _of_small_groups(choice: Choice) -> Iterator[str]:
    """Stages 1 and 2 fail on a rank that has nothing of a group (``steps[0]`` of an empty list)."""
    for number, group in enumerate(choice.groups):
        numel = sum(member.weight.value.numel for member in group.members)
        share = -(-numel // (ALIGNMENT * choice.world_size)) * ALIGNMENT
        if share * (choice.world_size - 1) >= numel:
            yield (
                f"param group {number} has {numel} elements, not one for every rank of"
                f" {choice.world_size}: stages 1 and 2 load it at fewer ranks only"
            )


def _of_weights(choice: Choice) -> Iterator[str]:
    """How DeepSpeed loads a module without its optimizer, and what that costs."""
    needed = ", load_optimizer_states=False" if choice.stage == 3 else ""
    yield f"load it with load_checkpoint(..., load_module_only=True{needed})"
    if choice.stage != 3:
        yield "stages 0, 1 and 2 load it at any number of ranks"
    if choice.precision != FLOAT32:
        yield f"DeepSpeed then begins its fp32 masters from the {choice.precision} weights"


def _of_idle(choice: Choice) -> Iterator[str]:
    idle = [
        member.fqn
        for group in choice.groups
        if any(member.slots for member in group.members)
        for member in group.members
        if not member.slots
    ]
    if idle:
        yield f"never stepped, and begins with zeros: {some(idle, _LISTED)}"


def _of_frozen(choice: Choice) -> Iterator[str]:
    outside = [weight.fqn for weight in choice.frozen]
    if choice.stage == 0 and choice.precision == FLOAT32 and outside:
        yield (
            "DeepSpeed loads stage 0 in fp32 only into an optimizer of the same parameters; it"
            f" must not have been given {some(outside, _LISTED)}"
        )


def _of_other_frameworks(choice: Choice) -> Iterator[str]:
    """What DeepSpeed's own checkpoints say and others do not."""
    if choice.recast is None:
        yield f"written for a run in {choice.precision}: another precision has to be asked for"
    if choice.state.manifest.train.scheduler is None:
        yield "no scheduler: where the run has one, load with load_lr_scheduler_states=False"
    if not any(deepspeeds_own(group.hyper) for group in choice.groups):
        yield 'the optimizer must be torch\'s own in DeepSpeed too (of Adam: "torch_adam": true)'


def _of_unsure(choice: Choice) -> Iterator[str]:
    known = choice.state.manifest.frozen
    unsure = [weight.fqn for weight in choice.frozen if weight.fqn not in known]
    if choice.stage == 3 and unsure:
        yield (
            "in no param group, and so taken for frozen parameters, which stage 3 cuts (a buffer"
            f" among them will not load): {some(unsure, _LISTED)}"
        )
