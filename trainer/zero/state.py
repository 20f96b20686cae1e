"""What a ZeRO engine holds, as a checkpoint sees it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from trainer.optimizer import ParamGroup
from trainer.ranks import Ranks
from trainer.scaling import LossScaler
from trainer.settings import Settings
from trainer.zero.shard import OptimizerShard


class ZeroState(Protocol):
    """One rank's model and optimizer, whatever the stage."""

    settings: Settings
    ranks: Ranks
    model: nn.Module
    shard: OptimizerShard
    groups: list[ParamGroup]
    scaler: LossScaler

    def frozen_fragments(self) -> dict[str, Tensor]:
        """What this rank keeps of each frozen parameter: all of it, before stage 3."""
        ...

    def set_frozen(self, name: str, whole: Tensor) -> None:
        """Give a frozen parameter its value."""
        ...
