"""ZenFlow updates selected columns in the 16-bit weights alone.

The model computes with them, and ``sync_fp32_param_from_gpu`` overwrites all masters with them at
each selection. Source: DeepSpeed 0.19.8 ``runtime/zenflow/zenflow_stage_1_and_2.py``.
"""

from __future__ import annotations

from reshard.core.manifest import BUFFER, MASTER, PARAM, Entry
from reshard.formats.deepspeed.flat_order import get_zero_section
from reshard.formats.deepspeed.states import ModelStates


def drop_older_masters(
    first: ModelStates, entries: list[Entry], warnings: list[str]
) -> list[Entry]:
    """Return the entries without masters that are older than the 16-bit weights."""
    if not isinstance(get_zero_section(first.config).get("zenflow"), dict):
        return entries
    module = {entry.fqn for entry in entries if entry.kind in (PARAM, BUFFER)}
    kept = [entry for entry in entries if entry.kind != MASTER or entry.fqn not in module]
    if len(kept) == len(entries):
        warnings.append(
            "trained with ZenFlow, which updates selected columns in the 16-bit weights; at stage 3"
            " the files hold fp32 masters alone, without the newest updates of those columns"
        )
    else:
        warnings.append(
            "trained with ZenFlow: the 16-bit weights are newer than their fp32 masters and are"
            " taken instead; a run that continues starts its masters from them, as DeepSpeed does"
            " at each selection of columns"
        )
    return kept
