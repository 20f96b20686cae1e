"""Declare the values that the readers take out of DeepSpeed's files (see `reshard.core.schema`).

Source: DeepSpeed 0.3 to 0.19 ``runtime/engine.py``, ``runtime/zero/`` and
``runtime/bf16_optimizer.py`` (``state_dict`` of each); ``checkpoint/affine.py``
(``ParamAffineMap.to_dict``).
"""

from __future__ import annotations

from reshard.containers.torch_objects import Tensor
from reshard.core.counts import parse_index
from reshard.core.schema import (
    COUNT,
    INTEGER,
    SHAPE,
    TEXT,
    WHOLE,
    either,
    fields,
    make_kind,
    mapping,
    maybe,
    numbered,
    record,
    row,
    sequence,
)

_TENSOR = make_kind("a tensor", lambda value: isinstance(value, Tensor))
_RANK = make_kind(
    "the number of a rank",
    lambda value: isinstance(value, (int, str)) and parse_index(str(value)) is not None,
)
_SHAPES = mapping(TEXT, SHAPE)
_PATTERNS = maybe(sequence(TEXT))
_TORCH = {
    # MADGRAD and D-Adaptation's have a counter ``k`` beside the states of the parameters.
    "state": numbered(mapping()),
    "param_groups": sequence(fields(params=sequence(COUNT))),
}

OPTIMIZER = fields(  # stage 0, also of an expert-parallel rank
    **_TORCH,
    optimizer_state_dict=fields(**_TORCH),
    fp32_groups=maybe(sequence(sequence(_TENSOR))),
    fp32_groups_flat=maybe(sequence(_TENSOR)),
)
_VIEW = row(COUNT, sequence(COUNT))
_PIECE = record(shape=SHAPE, source=_VIEW, dest=_VIEW)
_MAP = record(
    logical_shape=SHAPE,
    ranks=mapping(_RANK, record(shard_shape=SHAPE, pieces=sequence(_PIECE))),
)
_FUSED = record(
    patterns=sequence(TEXT),
    partition_dim=COUNT,
    shape=sequence(either(INTEGER, sequence(COUNT))),  # -1: the whole dim
)
_UNIVERSAL = fields(
    tp_replicated_parameter_patterns=_PATTERNS,
    parameter_to_average_patterns=_PATTERNS,
    vocabulary_parameter_patterns=_PATTERNS,
    parameter_with_row_parallelism_patterns=_PATTERNS,
    parameter_with_2_sub_params_cat_dim_0=_PATTERNS,
    pipeline_replicated_parameter_patterns=_PATTERNS,
    autotp_unsupported_parameter_patterns=maybe(mapping(TEXT)),
    parameter_with_sub_params=maybe(sequence(_FUSED)),
    sub_param_shard_widths=maybe(mapping(TEXT, maybe(sequence(sequence(COUNT))))),
    affine_map=maybe(fields(params=maybe(mapping(TEXT, _MAP)))),
)
MODEL_KEYS = {
    "module": maybe(mapping(TEXT)),
    "buffer_names": maybe(sequence(TEXT)),
    "param_shapes": maybe(either(_SHAPES, sequence(_SHAPES))),
    "frozen_param_shapes": maybe(_SHAPES),
    "frozen_param_fragments": maybe(mapping()),
    "shared_params": maybe(mapping(TEXT, TEXT)),
    "optimizer": maybe(OPTIMIZER),
    "ds_config": maybe(mapping()),
    "checkpoint_parallel_dimensions": maybe(mapping()),
    "universal_checkpoint_info": maybe(_UNIVERSAL),
    "ds_version": maybe(TEXT),
    "num_experts": maybe(either(COUNT, sequence(COUNT))),  # one number before 0.6
    "global_steps": maybe(INTEGER),
    "skipped_steps": maybe(INTEGER),
    "global_samples": maybe(WHOLE),  # a float if the program's mpu has sequence-parallel ranks
}
MODEL_STATES = fields(**MODEL_KEYS)
OTHER_MODEL_STATES = fields(  # ranks after the first: only what is used of them
    module=maybe(mapping()), frozen_param_fragments=maybe(mapping())
)
VERSIONED = fields(ds_version=maybe(TEXT))
OPTIMIZER_STATES = fields(
    partition_count=maybe(either(INTEGER, sequence(maybe(INTEGER)))),
    zero_stage=maybe(INTEGER),
    ds_version=maybe(TEXT),
    group_paddings=maybe(sequence(COUNT)),
    param_alignment_paddings=maybe(sequence(sequence(COUNT))),
    param_slice_mappings=maybe(sequence(mapping(TEXT))),
    single_partition_of_fp32_groups=sequence(_TENSOR),
    fp32_flat_groups=sequence(_TENSOR),
    base_optimizer_state=maybe(either(sequence(mapping()), fields(**_TORCH))),
    optimizer_state_dict=maybe(fields(**_TORCH)),
)
UNIVERSAL_OPTIMIZER = fields(**_TORCH, optimizer_state_dict=fields(**_TORCH))
