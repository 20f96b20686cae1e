"""Restore weights that transformers published to their form in memory, which optimizers use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from reshard.core.manifest import PARAM, Entry, Manifest, Origin, index_entries
from reshard.model import ModelShapes
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import as_global


def has_published_names(names: Iterable[str], model: ModelShapes) -> bool:
    """Return whether an optimizer's parameters have names that the model has only in files."""
    published = model.find_published()
    if published is None:
        return False
    only_in_files = published.conversion.after.keys() - published.conversion.before.keys()
    return not only_in_files.isdisjoint(names)


def restore_memory_form(state: Mapping[str, Any], model: ModelShapes) -> dict[str, Any]:
    """Return a model's state dict in the form in memory, if it is in the published form.

    A state dict of another model stays as it is; so does one with tensors of unknown shape.
    """
    published = model.find_published()
    tensors = {fqn: as_global(leaf) for fqn, leaf in state.items()}
    if published is None or not all(tensors.values()):
        return dict(state)
    entries = index_entries(
        Entry(fqn, PARAM, tensor.dtype, tensor.shape, tensor.chunks)
        for fqn, tensor in tensors.items()
        if tensor is not None
    )
    manifest = Manifest(Origin("state dict", model.source), entries, {}, ordered=False)
    if not published.fits(manifest):
        return dict(state)
    restored = published.restore_memory_form(manifest).entries.values()
    return {
        entry.fqn: GlobalTensor(entry.dtype, entry.shape, tuple(entry.chunks)) for entry in restored
    }
