"""What DeepSpeed calls an expert's parameters (0.19.8 ``moe/layer.py``, ``moe/experts.py``)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"(.*\.deepspeed_moe\.|deepspeed_moe\.)experts\.deepspeed_experts\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class ExpertName:
    """``{layer}experts.deepspeed_experts.{number}.{rest}``; the layer ends in its dot."""

    layer: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{self.layer}experts.deepspeed_experts.{self.number}.{self.rest}"


def parse(fqn: str) -> ExpertName | None:
    """The parts of an expert's name; None of any other."""
    match = _NAME.fullmatch(fqn)
    return ExpertName(match[1], int(match[2]), match[3]) if match else None
