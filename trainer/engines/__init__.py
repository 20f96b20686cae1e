"""Engines that adapt other programs, and the choice among all engines.

fsdp1              FSDP 1 with the options that Accelerate has for it
deepspeed          the real DeepSpeed
deepspeed_setup    its import, and the settings that it cannot follow
deepspeed_config   the settings as its configuration
deepspeed_files    its checkpoints

ddp, ZeRO and FSDP 2 are in ``trainer.core``.
"""

from __future__ import annotations

import importlib

from trainer.core.engine import Engine
from trainer.core.ranks import Ranks
from trainer.settings import Settings

_CLASSES = {
    "ddp": "core.ddp.DdpEngine",
    "zero1": "core.zero1.Zero1Engine",
    "zero2": "core.zero2.Zero2Engine",
    "zero3": "core.zero3.Zero3Engine",
    "fsdp": "engines.fsdp1.FsdpEngine",
    "fsdp2": "core.fsdp2.Fsdp2Engine",
}
"""Module and class by strategy; only the one that is used is imported."""


def build_engine(settings: Settings, ranks: Ranks) -> Engine:
    """Return the engine of ``settings.engine`` and ``settings.strategy``, with its model."""
    path = _CLASSES[settings.strategy]
    if settings.engine == "deepspeed":
        path = "engines.deepspeed.DeepSpeedEngine"
    module, _, name = path.rpartition(".")
    engine: Engine = getattr(importlib.import_module(f"trainer.{module}"), name)(settings, ranks)
    return engine
