"""ZeRO stage 1: masters and moments are partitioned over the ranks.

::

                 parameters   gradients   master, moments
    rank 0       [========]   [========]  [====    ]
    rank 1       [========]   [========]  [    ====]

Each rank sums the gradients of its piece, updates that piece, and gathers the others' parameters.
"""

from __future__ import annotations

from trainer.core.replicated import FullGradientsEngine


class Zero1Engine(FullGradientsEngine):
    """Adds nothing: whole gradients, and each rank updates its piece of the flat tensors."""
