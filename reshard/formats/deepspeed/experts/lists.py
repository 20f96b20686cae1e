"""Complete the model states of a mixture of experts that DeepSpeed before 0.19 wrote.

They have neither ``param_shapes`` nor ``ds_config``: the files of the optimizer state the
configuration, and ``param_slice_mappings``, which part of which parameter each rank's partition
holds (DeepSpeed 0.18.9 ``runtime/engine.py``, ``_save_moe_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.containers.torch_objects import Tensor
from reshard.errors import MIXED, CorruptError, UnsupportedError
from reshard.formats.deepspeed import flat_order
from reshard.formats.deepspeed.directory import RankFiles
from reshard.formats.deepspeed.experts.layout import find_expert_parallel_size
from reshard.formats.deepspeed.flat_groups import MAPPINGS
from reshard.formats.deepspeed.stage12 import divide_ranks
from reshard.formats.deepspeed.states import ModelStates, OptimizerStates, open_optimizer


def complete(first: ModelStates, files: RankFiles, module: Mapping[str, Any]) -> ModelStates:
    """Return the first rank's model states with the lists that later versions write there.

    Args:
        module: the tensors of the whole model; a rank's names of experts are those of rank 0.
    """
    ranks = [open_optimizer(files.optim[rank], rank) for rank in sorted(files.optim)]
    root = ranks[0].file.root
    config = root.get("ds_config") or {}
    groups = ranks[0].optimizer.get("param_groups", [])
    shapes = []
    for index, group in enumerate(groups):
        size = find_expert_parallel_size(group) or 1
        sharing = divide_ranks(ranks, size, config)[0]
        names = list(dict.fromkeys(name for rank in sharing for name in _list_names(rank, index)))
        if flat_order.requests_round_robin(config):  # DeepSpeed makes the lists before it reorders
            names = flat_order.to_round_robin(names, len(sharing))
        shapes.append({name: _find_tensor(module, name, ranks[0]).shape for name in names})
    lists = {
        "param_shapes": shapes,
        "frozen_param_shapes": {},  # absent, not left out on request (None)
        "ds_config": config,
        "ds_version": ranks[0].ds_version,
    }
    return replace(first, root={**first.root, **lists})


def _list_names(rank: OptimizerStates, index: int) -> Sequence[str]:
    mappings = rank.root.get(MAPPINGS)
    if not isinstance(mappings, list) or index >= len(mappings):
        raise UnsupportedError(
            rank.file.path,
            f"does not state which parameters it holds ({MAPPINGS} of group {index}): DeepSpeed"
            " before 0.19 lists the parameters of a run with experts nowhere else",
        )
    return [str(name) for name in mappings[index]]


def _find_tensor(module: Mapping[str, Any], name: str, rank: OptimizerStates) -> Tensor:
    tensor = module.get(name)
    if not isinstance(tensor, Tensor):
        raise CorruptError(
            rank.file.path,
            f"holds elements of {name!r}, but the model states have no such parameter",
            MIXED,
        )
    return tensor
