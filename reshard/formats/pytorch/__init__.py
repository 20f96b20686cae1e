"""What PyTorch-native training leaves in a directory: DCP, rank files, whole files, in any mixture.

Accelerate, HF Trainer, Lightning, verl, torchtitan, FairScale and plain scripts differ in how they
name these parts; what is in them is told by its form (`state_dict.parts`).

    names       which files are parts
    directory   whether there are any
    ranks       the files that ranks saved, as one
    reader      every part at a place as one manifest
    beside      what lies beside: the trainer's state, scheduler, random states, a model's config
    labels      what the parts' names say: who wrote them, at which step

Names: Accelerate 1.15 ``utils/constants.py`` and ``fsdp_utils.py``; transformers 5 ``trainer.py``;
Lightning 2.6 ``strategies/fsdp.py`` (``meta.pt``); verl 0.9 ``fsdp_checkpoint_manager.py``;
torchtitan 0.3 ``components/checkpoint.py``.
"""

from __future__ import annotations

from reshard.formats.place import Place
from reshard.formats.pytorch.directory import NAME, detect, detect_loosely
from reshard.manifest import Manifest

__all__ = ["NAME", "detect", "detect_loosely", "read", "with_companions"]


def read(
    place: Place,
    *,
    key: str | None = None,
    model: str | None = None,
    wrap: str | None = None,
) -> Manifest:
    """Every part at a place, as one manifest; a file that is no rank's, by itself.

    Args and errors are those of `reader.read`.

    Raises:
        ReshardError: as `reader.read`.
    """
    from reshard.formats.pytorch import reader

    return reader.read(place, key=key, model=model, wrap=wrap)


def with_companions(manifest: Manifest, place: Place) -> Manifest:
    """A DeepSpeed checkpoint with what HF Trainer or Accelerate put beside or above it.

    Raises:
        CorruptError: one of them is damaged.
    """
    from reshard.formats.pytorch import beside

    return beside.with_companions(manifest, place)
