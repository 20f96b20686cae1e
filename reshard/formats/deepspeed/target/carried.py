"""Plain values beside DeepSpeed's own in the model states: the client's, and samplers."""

from __future__ import annotations

from typing import Any

from reshard.formats.training import Training
from reshard.formats.values import is_plain

_RESERVED = frozenset(  # DeepSpeed's own keys in the model states
    """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params
    frozen_param_fragments lr_scheduler data_sampler random_ltd skipped_steps global_steps
    global_samples dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version
    universal_checkpoint_info num_experts ds_autoep_layers
    """.split()
)


def carried(state: Training) -> tuple[dict[str, Any], list[str]]:
    """The values that can be written back, and the names of the others.

    A tensor or an object is known by a description only, which must not pass for its value.
    """
    train = state.manifest.train
    kept: dict[str, Any] = {}
    lost: list[str] = []
    of_deepspeed = state.manifest.origin.format.startswith("deepspeed")
    for values, fits in (
        (train.client, train.client.keys() - _RESERVED),
        (train.opaque, train.opaque.keys() & _RESERVED if of_deepspeed else frozenset[str]()),
    ):
        for name, value in values.items():
            if name in fits and is_plain(value):
                kept[name] = value
            else:
                lost.append(name)
    return kept, lost
