"""What is not as it was in the source, and what the run that loads it must be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.dtypes import FLOAT32
from reshard.formats.deepspeed.target.choice import Choice
from reshard.formats.deepspeed.target.objects import deepspeeds_own

_LISTED = 4


def notes(choice: Choice) -> Iterator[str]:
    """One sentence each."""
    train = choice.state.manifest.train
    for name in choice.lost:
        yield f"not carried, as it is more than plain values or DeepSpeed's own name: {name}"
    if choice.weights_only:
        yield from _of_weights(choice)
        return
    if train.samples is None:
        yield "the source does not count samples: DeepSpeed takes its steps times its batch"
    if choice.scaler_is_new:
        yield f"the source has no loss scaler: one begins at {choice.scaler['cur_scale']}"
    yield from _of_groups(choice)
    if not choice.state.manifest.origin.format.startswith("deepspeed"):
        yield from _of_other_frameworks(choice)


def _of_weights(choice: Choice) -> Iterator[str]:
    """How DeepSpeed loads a module without its optimizer, and what that costs."""
    needed = ", load_optimizer_states=False" if choice.stage == 3 else ""
    yield f"load it with load_checkpoint(..., load_module_only=True{needed})"
    if choice.stage != 3:
        yield "stages 0, 1 and 2 load this one file at any number of ranks"
    if choice.precision != FLOAT32:
        yield f"DeepSpeed then begins its fp32 masters from the {choice.precision} weights"


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
