"""Names of experts and of their param groups, and the ranks that hold them (to read and write).

Source: DeepSpeed 0.19.8 ``moe/layer.py``, ``moe/experts.py``, ``moe/utils.py``, ``utils/groups.py``
(``_create_expert_and_data_parallel``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_NAME = re.compile(
    r"(.*\.deepspeed_moe\.|deepspeed_moe\.)experts\.deepspeed_experts\.(\d{1,9})\.(.*)"
)
EXPERT_TENSOR = "etp"  # axis of a mesh: the ranks that share each expert
FIRST_RANK = "@0"  # ends the name of the first rank's experts in a tensor of all (AutoEP)
_GROUP = re.compile(r"ep_size_(\d{1,9})")


@dataclass(frozen=True, slots=True)
class ExpertName:
    """``{layer}experts.deepspeed_experts.{number}.{rest}``; the layer ends in its dot."""

    layer: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{self.layer}experts.deepspeed_experts.{self.number}.{self.rest}"

    def renumber(self, number: int) -> ExpertName:
        """Return the name of the same parameter of another expert of the layer."""
        return replace(self, number=number)


def parse_expert_name(fqn: str) -> ExpertName | None:
    """Parse the name of an expert's parameter; return None for any other name."""
    match = _NAME.fullmatch(fqn)
    return ExpertName(match[1], int(match[2]), match[3]) if match else None


def has_experts(hyper: Mapping[str, Any]) -> bool:
    """Return whether a param group is a group of experts."""
    return bool(hyper.get("moe"))


def find_expert_parallel_size(hyper: Mapping[str, Any]) -> int | None:
    """Return how many expert-parallel ranks share the members of a group of experts.

    Return None for any other group, and if the group's name does not have DeepSpeed's form.
    """
    name = hyper.get("name")
    match = _GROUP.fullmatch(name) if isinstance(name, str) and has_experts(hyper) else None
    return int(match[1]) if match else None


def name_expert_group(ranks: int) -> str:
    """Return the name of a group whose members are shared by a number of ranks."""
    return f"ep_size_{ranks}"


def are_experts_cut(mesh: Mapping[str, int]) -> bool:
    """Return whether tensor-parallel ranks of a source share each expert, by its mesh."""
    return mesh.get(EXPERT_TENSOR, 1) > 1


def list_expert_data_ranks(world: int, size: int, config: Mapping[str, Any]) -> list[range]:
    """Return for each expert-parallel rank the ranks that hold its experts, in partition order.

    Expert-parallel ranks are neighbours, unless ``use_data_before_expert_parallelism``.

    Args:
        size: number of expert-parallel ranks.

    >>> list_expert_data_ranks(4, 2, {})
    [range(0, 4, 2), range(1, 4, 2)]
    >>> list_expert_data_ranks(4, 2, {"use_data_before_expert_parallelism": True})
    [range(0, 2), range(2, 4)]
    """
    share = world // size
    if config.get("use_data_before_expert_parallelism"):
        return [range(at * share, (at + 1) * share) for at in range(size)]
    return [range(at, world, size) for at in range(size)]


def locate_rank(world: int, size: int, config: Mapping[str, Any], rank: int) -> tuple[int, int]:
    """Return a rank's expert-parallel rank, and its position among those with the same experts.

    >>> locate_rank(4, 2, {}, 3)
    (1, 1)
    """
    for number, ranks in enumerate(list_expert_data_ranks(world, size, config)):
        if rank in ranks:
            return number, ranks.index(rank)
    raise ValueError(f"rank {rank} of {world}")
