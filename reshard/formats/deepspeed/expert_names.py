"""What DeepSpeed calls an expert's parameters, and the param groups that they are in.

Source: DeepSpeed 0.19.8 ``moe/layer.py``, ``moe/experts.py``, ``moe/utils.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_NAME = re.compile(
    r"(.*\.deepspeed_moe\.|deepspeed_moe\.)experts\.deepspeed_experts\.(\d{1,9})\.(.*)"
)
_GROUP = re.compile(r"ep_size_(\d{1,9})")


@dataclass(frozen=True, slots=True)
class ExpertName:
    """``{layer}experts.deepspeed_experts.{number}.{rest}``; the layer ends in its dot."""

    layer: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{self.layer}experts.deepspeed_experts.{self.number}.{self.rest}"

    def numbered(self, number: int) -> ExpertName:
        """The same parameter of another expert of the layer."""
        return replace(self, number=number)


def parse(fqn: str) -> ExpertName | None:
    """The parts of an expert's name; None of any other."""
    match = _NAME.fullmatch(fqn)
    return ExpertName(match[1], int(match[2]), match[3]) if match else None


def is_of_experts(hyper: Mapping[str, Any]) -> bool:
    """Whether a param group is of experts."""
    return bool(hyper.get("moe"))


def ranks_of(hyper: Mapping[str, Any]) -> int | None:
    """The expert-parallel ranks among which the members of a group of experts are shared.

    None of any other group, and where its name does not tell.
    """
    name = hyper.get("name")
    match = _GROUP.fullmatch(name) if isinstance(name, str) and is_of_experts(hyper) else None
    return int(match[1]) if match else None


def group_name(ranks: int) -> str:
    """The name of a group whose members so many ranks share."""
    return f"ep_size_{ranks}"
