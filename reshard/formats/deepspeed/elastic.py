"""Optimizer states that ``elastic_checkpoint`` took apart, at stages 1 and 2.

``base_optimizer_state`` is then a list with the state of each flat tensor, without its step, which
is ``base_optimizer_state_step``; the hyper-parameters are not kept. Source: DeepSpeed 0.19.8
``runtime/zero/stage_1_and_2.py`` (``_get_base_optimizer_state``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.errors import MIXED, CorruptError

_STATE = "base_optimizer_state"


def restore(path: Path, root: dict[str, Any]) -> dict[str, Any]:
    """Return the content of an optimizer states file with the optimizer's state as torch has it.

    Raises:
        CorruptError: the list is too short.
    """
    states, groups = root.get(_STATE), root.get("single_partition_of_fp32_groups") or ()
    if not isinstance(states, (list, tuple)):
        return root
    if len(states) < len(groups):
        raise CorruptError(
            path,
            f"{_STATE} contains {len(states)} groups; group {len(states)} is missing",
            MIXED,
        )
    step = root.get(f"{_STATE}_step")
    counter = {} if step is None else {"step": step}
    whole = {index: {**counter, **state} if state else {} for index, state in enumerate(states)}
    return {**root, _STATE: {"state": whole, "param_groups": []}}
