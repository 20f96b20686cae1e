"""Values beside DeepSpeed's own in the model states: the client's, and samplers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.model_parallel.sizes import Sizes
from reshard.pickles import objects
from reshard.state_dict.own_values import find_scheduler
from reshard.state_dict.plain_values import is_plain
from reshard.training.state import Training

_RESERVED = frozenset(  # DeepSpeed's own keys in the model states
    """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params
    frozen_param_fragments lr_scheduler data_sampler random_ltd skipped_steps global_steps
    global_samples dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version
    universal_checkpoint_info num_experts ds_autoep_layers
    """.split()
)


def carried(state: Training) -> tuple[dict[str, Any], list[str]]:
    """Return the values that can be written back, and the names of the others."""
    train = state.manifest.train
    kept: dict[str, Any] = {}
    lost: list[str] = []
    of_deepspeed = state.manifest.origin.format.startswith("deepspeed")
    for values, fits in (
        (train.client, train.client.keys() - _RESERVED),
        (train.opaque, train.opaque.keys() & _RESERVED if of_deepspeed else frozenset[str]()),
    ):
        for name, value in values.items():
            if name in fits and name in train.objects:
                kept[name] = train.objects[name]
                lost += objects.left_out(name, value, kept[name])
            elif name in fits and is_plain(value):
                kept[name] = value
            else:
                lost.append(name)
    if train.scheduler is not None and find_scheduler(train) is None:
        lost.append("lr_scheduler")
    return kept, lost


def of_grid(carried: Mapping[str, Any], sizes: Sizes, data: int, rank: int) -> dict[str, Any]:
    """Return the values with the sizes of the new grid in Megatron-DeepSpeed's ``args``.

    It compares some of them when it loads (deepspeedai Megatron-DeepSpeed 4efb479
    ``megatron/checkpointing.py``, ``check_checkpoint_args``).

    Args:
        data: number of data-parallel ranks.
        rank: number of the model-parallel rank, tensor-parallel ranks first.
    """
    args = carried.get("args")
    if not objects.is_namespace(args):
        return dict(carried)
    stage, tensor = divmod(rank, sizes.tensor)
    number = stage * data * sizes.tensor + tensor
    told = {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "transformer_pipeline_model_parallel_size": sizes.pipeline,
        "data_parallel_size": data,
        "world_size": sizes.model * data,
        "rank": number,
        "local_rank": number,
    }
    return {**carried, "args": objects.with_attributes(args, told)}
