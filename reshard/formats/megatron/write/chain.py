"""The states of an optimizer, or of a chain: of all parameters but the experts, and theirs.

Those of matrices alone (Muon's) come before Adam's.

Source: Megatron-LM core_v0.16.1 ``core/optimizer/optimizer.py`` (``state_dict`` of each class),
``core/optimizer/distrib_optimizer.py`` (``state_dict``), ``core/optimizer/muon.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reshard.formats.megatron.write.groups import MegatronGroup, count_updates
from reshard.formats.megatron.write.resolved import Resolved

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
        [
            group
            for group in groups
            if (group.of_matrices, group.is_expert) == (of_matrices, of_experts)
        ]
        for of_matrices in (True, False)
        for of_experts in (False, True)
    ]
    chain = list(filter(None, chain))
    scalers = [choice.make_grad_scaler(number, len(chain)) for number in range(len(chain))]
    return [
        _make_state(choice, members, inner, {} if scaler is None else {"grad_scaler": scaler})
        for members, scaler in zip(chain, scalers, strict=True)
    ]


def _make_state(
    choice: Resolved, groups: Sequence[MegatronGroup], inner: Inner, scaler: State
) -> State:
    if choice.wanted.distributed:  # its tensors are stored apart from this state
        members = choice.groups.members
        stored = [
            {
                "step": count_updates(map(members.__getitem__, group.fqns), choice.state),
                **group.hyper,
            }
            for group in groups
        ]
        return {"optimizer": {"param_groups": stored}, **scaler}
    state, masters = inner(groups)
    return {"optimizer": state, **scaler, **masters} if choice.mixed else state
