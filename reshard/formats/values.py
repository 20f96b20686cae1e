"""The values of a model's weights, where its files store codes of them."""

from __future__ import annotations

from reshard.formats import registry
from reshard.manifest import Manifest


def dequantise(manifest: Manifest) -> tuple[Manifest, list[str]]:
    """Return the manifest of a quantised model with dequantised weights, and notes.

    Training checkpoints are returned unchanged: the program that saved quantised weights in them
    expects them as they are.

    Raises:
        UnsupportedError: the method is not known, or nothing states it.
        IncompleteError, CorruptError: codes and scales do not fit.
    """
    if not registry.describe_source(manifest).weights_only:
        return manifest, []
    from reshard.quantised import dequantise as quantised

    return quantised.dequantise(manifest)
