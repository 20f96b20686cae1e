"""Lay out one file as a script without sharding saves it: whole tensors, the optimizer by index."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from reshard.containers import torch_writer
from reshard.dtypes import DType
from reshard.manifest import Skeleton
from reshard.model import ModelShapes
from reshard.state_dict import torch_state_dict
from reshard.state_dict.slots import WholeSlots
from reshard.training.state import WritableState


def lay_out(
    state: WritableState,
    *,
    name: str = "checkpoint.pt",
    weights_only: bool = False,
    model: ModelShapes | None = None,
    dtype: DType | None = None,
) -> Skeleton:
    """Lay out one file as a script without sharding saves it, with ``torch.optim``'s own state."""
    root: dict[str, Any] = {
        "model": OrderedDict(torch_state_dict.build_weights(state, dtype=dtype))
    }
    if not weights_only:
        several = len(state.groups) > 1  # numbers of like parameters in two groups tell nothing
        root["optimizer"] = torch_state_dict.build_optimizer(state, "index", model, named=several)
        beside = torch_state_dict.collect_extra_state(state.manifest.train)
        root.update((key, value) for key, value in beside.items() if key not in root)
    stamp = state.stamp(name, 0, 1)
    return torch_writer.lay_out_object(name, root, slot_of=WholeSlots(), stamp=stamp)
