"""ZeRO stage 1: masters and moments are cut over the ranks."""

from __future__ import annotations

from trainer.engines.replicated import FullGradientsEngine


class Zero1Engine(FullGradientsEngine):
    """Nothing to add: whole gradients, and each rank updates its piece of the flat tensors."""
