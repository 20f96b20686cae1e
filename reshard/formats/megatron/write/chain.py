"""The states of an optimizer, or of a chain: of all parameters but the experts, and theirs.

Muon's come before Adam's.

Source: Megatron-LM core_v0.16.1 ``core/optimizer/optimizer.py`` (``state_dict`` of each class),
``core/optimizer/distrib_optimizer.py`` (``state_dict``), ``core/optimizer/muon.py``.
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
        [each for each in groups if (each.is_muon, each.is_expert) == (of_muon, of_experts)]
        for of_muon in (True, False)
        for of_experts in (False, True)
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
