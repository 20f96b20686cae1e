"""The choice among the engines. FSDP 1 is here; ddp, ZeRO and FSDP 2 are in ``trainer.core``."""

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
    """Return the engine of ``settings.strategy``, with its model."""
    module, _, name = _CLASSES[settings.strategy].rpartition(".")
    engine: Engine = getattr(importlib.import_module(f"trainer.{module}"), name)(settings, ranks)
    return engine
