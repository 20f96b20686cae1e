"""What is not as it was in the source, and what the run that loads it must be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.dtypes import FLOAT16, FLOAT32
from reshard.formats import loss_scale
from reshard.formats.deepspeed.target.choice import Choice
from reshard.formats.deepspeed.target.objects import deepspeeds_own

_LISTED = 4


def notes(choice: Choice) -> Iterator[str]:
    """One sentence each."""
    train = choice.state.manifest.train
    for name in choice.lost:
        yield f"not carried, as it is more than plain values or DeepSpeed's own name: {name}"
    if train.rng is not None:
        yield "the random states are not carried: DeepSpeed's files have no place for them"
    if train.samples is None:
        yield "the source does not count samples: DeepSpeed takes its steps times its batch"
    yield from _of_scaler(choice)
    yield from _of_groups(choice)
    if not choice.state.manifest.origin.format.startswith("deepspeed"):
        yield from _of_other_frameworks(choice)


def _of_scaler(choice: Choice) -> Iterator[str]:
    scaler = choice.state.manifest.train.scaler
    if choice.precision != FLOAT16:
        if not loss_scale.is_idle(scaler):
            yield f"a run in {choice.precision} has no loss scaler: the source's is left out"
    elif not choice.scaler_is_new:
        if "cur_scale" not in scaler:
            yield "the GradScaler becomes DeepSpeed's loss scaler"
    elif loss_scale.is_idle(scaler):
        yield f"the source has no loss scaler: one begins at {choice.scaler['cur_scale']}"
    else:
        yield (
            "the source's loss scaler has no form in DeepSpeed: another begins at"
            f" {choice.scaler['cur_scale']}"
        )


def _of_groups(choice: Choice) -> Iterator[str]:
    idle = [
        member.fqn
        for group in choice.groups
        if any(member.slots for member in group.members)
        for member in group.members
        if not member.slots
    ]
    if choice.stage and idle:
        yield f"never stepped, and begins with zeros: {_some(idle)}"
    outside = [weight.fqn for weight in choice.frozen]
    if choice.stage == 0 and choice.precision == FLOAT32 and outside:
        yield (
            "DeepSpeed loads stage 0 in fp32 only into an optimizer of the same parameters; it"
            f" must not have been given {_some(outside)}"
        )


def _of_other_frameworks(choice: Choice) -> Iterator[str]:
    """What DeepSpeed's own checkpoints say and others do not."""
    yield (
        "DeepSpeed finds parameters by their place alone: they stand in the order of the source's"
        " state dict, which must be that of model.parameters() in each of the run's param groups"
    )
    if choice.recast is None:
        yield f"written for a run in {choice.precision}: another precision has to be asked for"
    if choice.state.manifest.train.scheduler is None:
        yield "no scheduler: where the run has one, load with load_lr_scheduler_states=False"
    if not any(deepspeeds_own(group.hyper) for group in choice.groups):
        yield 'the optimizer must be torch\'s own in DeepSpeed too (of Adam: "torch_adam": true)'
    known = choice.state.manifest.frozen
    unsure = [weight.fqn for weight in choice.frozen if weight.fqn not in known]
    if choice.stage == 3 and unsure:
        yield (
            "in no param group, and so taken for frozen parameters, which stage 3 cuts (a buffer"
            f" among them will not load): {_some(unsure)}"
        )


def _some(fqns: Sequence[str]) -> str:
    more = f" and {len(fqns) - _LISTED} more" if len(fqns) > _LISTED else ""
    return ", ".join(fqns[:_LISTED]) + more
