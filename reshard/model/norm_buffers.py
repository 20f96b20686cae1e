"""The buffers that torch's batch norms keep, known by their names alone.

Source: torch 2.13 ``nn/modules/batchnorm.py`` (``_NormBase``): a batch or instance norm that tracks
statistics registers ``running_mean``, ``running_var`` and ``num_batches_tracked`` as buffers.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.core.manifest import Entry

_COUNTER = "num_batches_tracked"
_STATISTICS = ("running_mean", "running_var")


def find_norm_buffers(weights: Mapping[str, Entry]) -> set[str]:
    """Return the names of the buffers of batch norms: a 0-d counter beside two equal vectors."""
    found: set[str] = set()
    for fqn, weight in weights.items():
        module, _, name = fqn.rpartition(".")
        if name != _COUNTER or weight.shape or weight.dtype.family != "int":
            continue
        beside = [f"{module}.{statistic}" if module else statistic for statistic in _STATISTICS]
        shapes = {weights[other].shape if other in weights else None for other in beside}
        if len(shapes) == 1 and len(shapes.pop() or ()) == 1:
            found |= {fqn, *beside}
    return found
