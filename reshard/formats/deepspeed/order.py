"""In which order parameters stand in flat tensors, and which flat tensors there are.

Source: DeepSpeed 0.19.8 ``runtime/zero/stage_1_and_2.py`` (``_round_robin_reorder``),
``runtime/zero/stage3.py`` (``_create_fp16_sub_groups``), ``runtime/engine.py``
(``_do_optimizer_sanity_check``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

from reshard import dtypes
from reshard.dtypes import BFLOAT16, DType
from reshard.formats.deepspeed import expert_names
from reshard.training.state import Group, Trained, Training

_SUB_GROUP_SIZE = 10**9
_FP32 = ("fp32", "float32", "float")  # names that DeepSpeed's config takes
T = TypeVar("T")


def section(config: Any, name: str) -> dict[str, Any]:
    """A section of a configuration that may lack it, or be none."""
    found = config.get(name) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def is_flat_bf16(config: Any, stage: int, precision: DType | None) -> bool:
    """Whether DeepSpeed takes its BF16_Optimizer, which knows neither turns nor alignment."""
    accumulated = section(config, "data_types").get("grad_accum_dtype")
    offloads = bool(section(section(config, "zero_optimization"), "offload_optimizer"))
    return precision == BFLOAT16 and stage == 1 and accumulated in _FP32 and not offloads


def goes_round(config: Any) -> bool:
    """Whether the run is asked to spread parameters round its ranks."""
    return section(config, "zero_optimization").get("round_robin_gradients") is True


def takes_turns(config: Any, stage: int, precision: DType | None) -> bool:
    """Whether parameters go round the ranks (``round_robin_gradients``)."""
    return goes_round(config) and stage in (1, 2) and not is_flat_bf16(config, stage, precision)


def in_turns(members: Sequence[T], ranks: int) -> list[T]:
    """Every ``ranks``-th member, from each of the first on.

    >>> in_turns("abcdefg", 3)
    ['a', 'd', 'g', 'b', 'e', 'c', 'f']
    """
    return [member for first in range(ranks) for member in members[first::ranks]]


def out_of_turns(members: Sequence[T], ranks: int) -> list[T]:
    """The order before `in_turns`.

    >>> "".join(out_of_turns("adgbecf", 3))
    'abcdefg'
    """
    order = in_turns(range(len(members)), ranks)
    return [member for _, member in sorted(zip(order, members, strict=True), key=lambda i: i[0])]


def sub_groups(
    members: Sequence[Trained], config: Any, ranks: int
) -> Iterator[tuple[Trained, ...]]:
    """Stage 3's flat tensors: closed as soon as a rank holds ``sub_group_size`` elements."""
    limit = _sub_group_size(config)
    sizes = [-(-prod(member.weight.shape) // ranks) for member in members]
    if limit >= sum(sizes):
        yield tuple(members)
        return
    first, held = 0, 0
    for index, numel in enumerate(sizes):
        held += numel
        if held >= limit or index == len(members) - 1:
            yield tuple(members[first : index + 1])
            first, held = index + 1, 0


def _sub_group_size(config: Mapping[str, Any]) -> int:
    """As configured; it may be written 1e9."""
    size = section(config, "zero_optimization").get("sub_group_size")
    return int(size) if isinstance(size, (int, float)) else _SUB_GROUP_SIZE


def config_of(state: Training) -> dict[str, Any] | None:
    """The ``ds_config`` of the run; other programs' configurations are none."""
    config = state.manifest.train.config
    of_deepspeed = state.manifest.origin.format.startswith("deepspeed")
    return config if of_deepspeed and isinstance(config, dict) else None


def users(state: Training) -> Callable[[Group], Sequence[Trained]]:
    """Puts a group into the order in which a script gives it to DeepSpeed, which goes by place.

    DeepSpeed's own files say it; but ``param_shapes`` of a run with ``round_robin_gradients`` lists
    the parameters as they go round its ranks (of groups of experts the reader has undone that). Of
    other sources it is the model's order: some have one of their own (FSDP 1: unit after unit).
    """
    origin, config = state.manifest.origin, config_of(state)
    if state.regrouped or not origin.format.startswith("deepspeed"):
        place = {weight.fqn: number for number, weight in enumerate(state.weights)}
        return lambda group: sorted(group.members, key=lambda member: place[member.fqn])
    stage = section(config, "zero_optimization").get("stage", 0)
    precision = dtypes.parse(origin.precision) if origin.precision else None
    if takes_turns(config, stage, precision):
        ranks = origin.mesh.get("dp", origin.world)
        return lambda group: (
            group.members
            if expert_names.is_of_experts(group.hyper)
            else out_of_turns(group.members, ranks)
        )
    return lambda group: group.members


def flats(
    groups: Sequence[Group], config: dict[str, Any], ranks: int, stage: int, precision: DType
) -> tuple[tuple[tuple[Trained, ...], ...], tuple[tuple[int, ...], ...]]:
    """(the members of each flat tensor, the flat tensors of each group)."""
    of_group: list[list[tuple[Trained, ...]]]
    if stage == 3:
        of_group = [list(sub_groups(group.members, config, ranks)) for group in groups]
    elif takes_turns(config, stage, precision):
        of_group = [[tuple(in_turns(group.members, sharers(group, ranks)))] for group in groups]
    else:
        of_group = [[group.members] for group in groups]
    listed = tuple(flat for held in of_group for flat in held)
    numbers = iter(range(len(listed)))
    return listed, tuple(tuple(next(numbers) for _ in held) for held in of_group)


def sharers(group: Group, ranks: int) -> int:
    """How many ranks share a group's flat tensors: all, or those that hold the same experts."""
    return ranks // (expert_names.ranks_of(group.hyper) or 1)
