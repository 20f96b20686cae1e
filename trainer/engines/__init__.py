"""How a model is trained on several ranks: one file an engine, and ``base.Engine``.

ddp, zero1, zero2, zero3
                 by our own loop (native); replicated: stages 0 to 2, zero: all of them
fsdp, fsdp2      by torch; sharded: what both share, units: what they gather at once,
                 first_weights: the model that they shard
grid             a model that is cut by tensor, stage and expert
deepspeed        the real DeepSpeed; deepspeed_setup, deepspeed_config: made ready for our settings
"""

from __future__ import annotations

import importlib

from trainer.engines.base import Engine
from trainer.ranks import Ranks
from trainer.settings import Settings

_NATIVE = {
    "ddp": "ddp.DdpEngine",
    "zero1": "zero1.Zero1Engine",
    "zero2": "zero2.Zero2Engine",
    "zero3": "zero3.Zero3Engine",
    "fsdp": "fsdp.FsdpEngine",
    "fsdp2": "fsdp2.Fsdp2Engine",
}
"""Module and class by strategy; only the one that is used is imported."""


def build(settings: Settings, ranks: Ranks) -> Engine:
    """The engine of ``settings.engine`` and ``settings.strategy``, with its model on this rank."""
    place = _NATIVE[settings.strategy]
    if settings.engine == "deepspeed":
        place = "deepspeed.DeepSpeedEngine"
    elif settings.grid.parallel:
        place = "grid.GridEngine"
    module, _, name = place.partition(".")
    engine: Engine = getattr(importlib.import_module(f"trainer.engines.{module}"), name)(
        settings, ranks
    )
    return engine
