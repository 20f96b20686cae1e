"""Weights of shape [0]: what ZeRO 3 leaves in a module whose parameters nobody gathered."""

from __future__ import annotations

from dataclasses import replace

from reshard.errors import IncompleteError
from reshard.formats.place import directory
from reshard.manifest import Manifest
from reshard.units import counted, some


def looked_for(manifest: Manifest) -> Manifest:
    """The checkpoint with a warning of its placeholders; where most weights are such, none.

    Raises:
        IncompleteError: more than half of the weights are placeholders.
    """
    hollow = manifest.placeholders
    if not hollow:
        return manifest
    where = manifest.origin.path
    weights = {entry.fqn for entry in manifest.entries.values()}
    place = directory(where)
    near = [p for p in (place, *place.glob("global_step*")) if p.is_dir()]
    real = [str(p) for p in near if any(p.glob("*_optim_states.pt"))]
    if 2 * len(hollow) > len(weights):
        raise IncompleteError(
            where,
            f"{len(hollow)} of {len(weights)} weights have size 0 (e.g. {hollow[0]!r}): ZeRO-3"
            " placeholders, the real weights are in the ranks' *_optim_states.pt",
            f"merge {real[0]}" if real else "merge the checkpoint directory that holds those files",
        )
    text = (
        f"{counted(len(hollow), 'weight')} of size 0 ({some(hollow)}): ZeRO-3 placeholders, the"
        " real weights are in the ranks' *_optim_states.pt" + (f" in {real[0]}" if real else "")
    )
    return replace(manifest, warnings=(*manifest.warnings, text))
