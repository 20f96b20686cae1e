"""The choice of the engine: a class for each strategy."""

from __future__ import annotations

import importlib

from trainer.core.engine import Engine
from trainer.core.ranks import Ranks
from trainer.core.settings import CoreSettings

_CLASSES = {
    "ddp": "ddp.DdpEngine",
    "zero1": "zero1.Zero1Engine",
    "zero2": "zero2.Zero2Engine",
    "zero3": "zero3.Zero3Engine",
    "fsdp": "fsdp1.Fsdp1Engine",
    "fsdp2": "fsdp2.Fsdp2Engine",
}
"""Module and class by strategy; only the one that is used is imported."""


def build_engine(settings: CoreSettings, ranks: Ranks) -> Engine:
    """Return the engine of ``settings.strategy``, with its model."""
    module, _, name = _CLASSES[settings.strategy].partition(".")
    found = importlib.import_module(f"trainer.core.{module}")
    engine: Engine = getattr(found, name)(settings, ranks)
    return engine
