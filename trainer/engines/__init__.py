"""How a model is trained on several ranks: one file an engine, and ``base.Engine``."""

from __future__ import annotations

from trainer.engines.base import Engine
from trainer.ranks import Ranks
from trainer.settings import Settings


def build(settings: Settings, ranks: Ranks) -> Engine:
    """The engine of ``settings.engine`` and ``settings.strategy``, with its model on this rank."""
    if settings.engine == "deepspeed":
        from trainer.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(settings, ranks)
    return _NATIVE[settings.strategy](settings, ranks)


def _ddp(settings: Settings, ranks: Ranks) -> Engine:
    from trainer.engines.ddp import DdpEngine

    return DdpEngine(settings, ranks)


def _zero1(settings: Settings, ranks: Ranks) -> Engine:
    from trainer.engines.zero1 import Zero1Engine

    return Zero1Engine(settings, ranks)


def _zero2(settings: Settings, ranks: Ranks) -> Engine:
    from trainer.engines.zero2 import Zero2Engine

    return Zero2Engine(settings, ranks)


def _zero3(settings: Settings, ranks: Ranks) -> Engine:
    from trainer.engines.zero3 import Zero3Engine

    return Zero3Engine(settings, ranks)


def _fsdp(settings: Settings, ranks: Ranks) -> Engine:
    from trainer.engines.fsdp import FsdpEngine

    return FsdpEngine(settings, ranks)


def _fsdp2(settings: Settings, ranks: Ranks) -> Engine:
    from trainer.engines.fsdp2 import Fsdp2Engine

    return Fsdp2Engine(settings, ranks)


_NATIVE = {
    "ddp": _ddp,
    "zero1": _zero1,
    "zero2": _zero2,
    "zero3": _zero3,
    "fsdp": _fsdp,
    "fsdp2": _fsdp2,
}
