"""The flat tensors of a run and the order of parameters in them, as ``ds_config`` decides them.

Source: DeepSpeed 0.19.8 ``runtime/zero/stage_1_and_2.py`` (``_round_robin_reorder``),
``runtime/zero/stage3.py`` (``_create_fp16_sub_groups``), ``runtime/engine.py``
(``_do_optimizer_sanity_check``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.core import dtypes
from reshard.core.dtypes import BFLOAT16, FLOAT16, DType
from reshard.formats.deepspeed.experts.layout import find_expert_parallel_size, has_experts

if TYPE_CHECKING:
    from reshard.training.state import TrainedGroup, TrainedParameter, WritableState

_SUB_GROUP_SIZE = 10**9
# Other programs do not use this key. A reader that translates their arguments into DeepSpeed's
# always adds it.
_CLIP = "gradient_clipping"
_FP32 = ("fp32", "float32", "float")  # names that DeepSpeed's config accepts
# Sections of the configuration; "bfloat16" is the older name of "bf16".
PRECISIONS = {"bf16": BFLOAT16, "bfloat16": BFLOAT16, "fp16": FLOAT16}
T = TypeVar("T")


def get_section(config: Any, name: str) -> dict[str, Any]:
    """Return a section of a configuration; empty if either of them is absent."""
    value = config.get(name) if isinstance(config, dict) else None
    return value if isinstance(value, dict) else {}


def get_zero_section(config: Any) -> dict[str, Any]:
    """Return the section that configures ZeRO."""
    return get_section(config, "zero_optimization")


def find_16_bit_precision(config: Any) -> DType | None:
    """Return the 16-bit dtype that a configuration enables; None if it enables none."""
    enabled = (
        dtype
        for name, dtype in PRECISIONS.items()
        if get_section(config, name).get("enabled") is True
    )
    return next(enabled, None)


def uses_bf16_optimizer(config: Any, stage: int, precision: DType | None) -> bool:
    """Return whether DeepSpeed uses its BF16_Optimizer, which neither reorders nor aligns."""
    accumulated = get_section(config, "data_types").get("grad_accum_dtype")
    offloads = bool(get_section(get_zero_section(config), "offload_optimizer"))
    return precision == BFLOAT16 and stage == 1 and accumulated in _FP32 and not offloads


def requests_round_robin(config: Any) -> bool:
    """Return whether the configuration asks to distribute parameters round robin."""
    return get_zero_section(config).get("round_robin_gradients") is True


def uses_round_robin(config: Any, stage: int, precision: DType | None) -> bool:
    """Return whether the flat tensors have their parameters in round-robin order."""
    uses_bf16 = uses_bf16_optimizer(config, stage, precision)
    return requests_round_robin(config) and stage in (1, 2) and not uses_bf16


def to_round_robin(members: Sequence[T], ranks: int) -> list[T]:
    """Return every ``ranks``-th member from the first on, then from the second on, and so on.

    >>> to_round_robin("abcdefg", 3)
    ['a', 'd', 'g', 'b', 'e', 'c', 'f']
    """
    return [member for first in range(ranks) for member in members[first::ranks]]


def undo_round_robin(members: Sequence[T], ranks: int) -> list[T]:
    """Return the order before `to_round_robin`.

    >>> "".join(undo_round_robin("adgbecf", 3))
    'abcdefg'
    """
    order = to_round_robin(range(len(members)), ranks)
    return [member for _, member in sorted(zip(order, members, strict=True), key=lambda i: i[0])]


def _split_sub_groups(
    members: Sequence[TrainedParameter], config: Any, ranks: int
) -> Iterator[tuple[TrainedParameter, ...]]:
    """Yield stage 3's flat tensors: each ends where a rank holds ``sub_group_size`` elements."""
    size = get_zero_section(config).get("sub_group_size")
    limit = size if isinstance(size, (int, float)) else _SUB_GROUP_SIZE  # often written as 1e9
    sizes = [-(-prod(member.weight.shape) // ranks) for member in members]
    first, filled = 0, 0
    for index, numel in enumerate(sizes):
        filled += numel
        if filled >= limit or index == len(members) - 1:
            yield tuple(members[first : index + 1])
            first, filled = index + 1, 0


def find_engine_config(state: WritableState) -> dict[str, Any] | None:
    """Return the ``ds_config`` of the run; None if the source has none."""
    config, source = state.manifest.train.config, state.manifest.origin.format
    if not isinstance(config, dict):
        return None
    return config if source.startswith("deepspeed") or _CLIP in config else None


def iterate_user_order(state: WritableState) -> Iterator[Sequence[TrainedParameter]]:
    """Yield the members of each group in the order in which a script passes them to DeepSpeed.

    DeepSpeed finds parameters by position. Its own files have that order, except that
    ``param_shapes`` under ``round_robin_gradients`` lists the parameters in round-robin order (the
    reader has undone that for groups of experts). For other sources it is the model's order, which
    some do not keep in their groups (FSDP 1: unit after unit). A live optimizer has its own order.
    """
    origin, config = state.manifest.origin, find_engine_config(state)
    groups = [group.members for group in state.groups]
    if state.is_live:
        yield from groups
        return
    if state.regrouped or not origin.format.startswith("deepspeed"):
        position = state.positions
        yield from (sorted(members, key=lambda member: position[member.fqn]) for members in groups)
        return
    stage = find_source_stage(state)
    precision = dtypes.parse(origin.precision) if origin.precision else None
    is_round_robin = uses_round_robin(config, stage, precision)
    ranks = origin.mesh.get("dp", origin.world)
    for group in state.groups:
        reordered = is_round_robin and not has_experts(group.hyper)
        yield undo_round_robin(group.members, ranks) if reordered else group.members


def find_source_stage(state: WritableState) -> int:
    """Return the ZeRO stage of the run that was saved; 0 for a source of another program."""
    stage = get_zero_section(find_engine_config(state)).get("stage", 0)
    return stage if isinstance(stage, int) else 0


def find_shape_sorted_groups(hypers: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """Return the numbers of the param groups that Muon has sorted by shape, the largest first.

    DeepSpeed 0.19.8 ``runtime/zero/muon/original_muon.py`` (``MuonWithAuxAdam.__init__``); the sort
    is stable.
    """
    return frozenset(n for n, hyper in enumerate(hypers) if hyper.get("use_muon") is True)


def split_flat_tensors(
    group: TrainedGroup, config: Mapping[str, Any], ranks: int, stage: int, precision: DType
) -> tuple[tuple[TrainedParameter, ...], ...]:
    """Return the members of each flat tensor of a group."""
    if stage == 3:
        return tuple(_split_sub_groups(group.members, config, ranks))
    if uses_round_robin(config, stage, precision):
        return (tuple(to_round_robin(group.members, count_partitions(group, ranks))),)
    return (group.members,)


def count_partitions(group: TrainedGroup, ranks: int) -> int:
    """Return how many ranks share a group's flat tensors: all, or those with the same experts."""
    return ranks // (find_expert_parallel_size(group.hyper) or 1)
