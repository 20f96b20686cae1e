"""A training state under the names, shapes and groups of a live model of transformers."""

from __future__ import annotations

from reshard import naming
from reshard.core.manifest import Manifest
from reshard.errors import UnsupportedError, UsageError
from reshard.formats import registry
from reshard.formats.base import Source
from reshard.model import library
from reshard.naming.options import NameOptions
from reshard.naming.published import ModelConfig, choose_form, restore_memory_form


def find_live_form(manifest: Manifest) -> Manifest | None:
    """Return the training state in the form that a live model of transformers has.

    Returns:
        None if the checkpoint has that form, or if nothing states a model of transformers.
    """
    source = registry.describe_source(manifest)
    if not source.names.of_own_models:
        return restore_memory_form(manifest)
    try:
        return _rename(manifest, source)
    except (UsageError, UnsupportedError):  # no family fits, or transformers cannot build the model
        return None


def _rename(manifest: Manifest, source: Source) -> Manifest | None:
    """Return a state whose names are of the format's own models under those of transformers."""
    named = naming.choose_names(manifest, source.names, NameOptions())
    if named.config is None:
        return None
    state = named.manifest
    if library.may_be_converted(named.config):
        state = choose_form(state, ModelConfig(named.config), "module").manifest
    return state if source.translate is None else source.translate(state)[0]
