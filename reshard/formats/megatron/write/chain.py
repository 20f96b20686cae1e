"""The states of an optimizer, or of a chain of two: of all parameters but the experts, and theirs.

Source: Megatron-LM core_v0.16.1 ``core/optimizer/optimizer.py`` (``state_dict`` of each class),
``core/optimizer/distrib_optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reshard.formats.megatron.write.choice import Resolved
from reshard.formats.megatron.write.groups import MegatronGroup

State = dict[str, Any]
Inner = Callable[[Sequence[MegatronGroup]], tuple[State, State]]


def make_states(choice: Resolved, inner: Inner, fqns: Sequence[str]) -> list[State]:
    """Return the state of each optimizer.

    Args:
        inner: make the state of an optimizer that is not distributed, and what is stored beside it
            if there are masters in fp32.
        fqns: the parameters of the rank that saves, in its order; all for a file of all ranks.
    """
    groups = choice.groups.list_for_rank(fqns)
    chain = [
        [group for group in groups if group.is_expert == of_experts] for of_experts in (False, True)
    ]
    return [_make_state(choice, members, inner) for members in chain if members]


def _make_state(choice: Resolved, groups: Sequence[MegatronGroup], inner: Inner) -> State:
    scaler = {"grad_scaler": choice.grad_scaler} if choice.grad_scaler else {}
    if choice.wanted.distributed:  # its tensors are stored apart from this state
        step = {"step": int(choice.state.step())}
        stored = [{**group.hyper, **step} for group in groups]
        return {"optimizer": {"param_groups": stored}, **scaler}
    state, masters = inner(groups)
    return {"optimizer": state, **scaler, **masters} if choice.mixed else state
