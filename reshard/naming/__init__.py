"""Parameter names: those of the source, Hugging Face's, or those that a writer's files need.

options     the user's options for names; a training state under the names to write
tables      renaming, by the table of the model's family
published   the names that transformers writes, and those of its models in memory
config      the model's family and traits, from a config of transformers
"""

from __future__ import annotations

from reshard.core.manifest import Manifest
from reshard.errors import UsageError
from reshard.naming.options import ModelNames, NameOptions, Naming

__all__ = [
    "ModelNames",
    "NameOptions",
    "Naming",
    "choose_names",
    "explain_source_names",
    "prefer_source",
]


def prefer_source(options: NameOptions) -> NameOptions:
    """Return the options with the source's own names, unless the user chose other names."""
    return options._replace(names=options.names or "source")


def choose_names(
    manifest: Manifest, own: ModelNames, options: NameOptions, model: str | None = None
) -> Naming:
    """Return the state under the names that the options choose.

    Args:
        own: how the names of the source may differ from Hugging Face's.
        model: config of the model, for a source that does not state what its model is; None: the
            one beside the source.

    Raises:
        UsageError: an option has no effect with the names of the source.
        UnsupportedError: there is no table of the model.
    """
    may_differ = own.may_differ(manifest)
    if may_differ and options.names != "source":
        from reshard.naming import tables

        traits, note = tables.describe_or_explain(manifest, own, options, model)
        if traits is not None:
            return tables.rename_to_hf(manifest, own, traits, options)
        if note:
            return Naming(manifest, (note,))
    # The names stay, so only the padding of the vocabulary can change.
    if may_differ and options.vocab_size is not None and not options.family:
        from reshard.naming import tables

        return tables.remove_padding(manifest, own, options)
    _refuse_unused(options)
    return Naming(manifest)


def explain_source_names(
    manifest: Manifest, own: ModelNames, options: NameOptions, model: str | None
) -> list[str]:
    """Return a note that the output has the names of the source, if those are not Hugging Face's.

    Args:
        own: how the names of the source may differ from Hugging Face's.
        model: as in `choose_names`.
    """
    if not own.may_differ(manifest):
        return []
    from reshard.naming import tables

    traits, note = tables.describe_or_explain(manifest, own, options, model)
    if traits is not None:
        note = tables.suggest_hf_names(own, traits, options)
    return [note] if note else []


def _refuse_unused(options: NameOptions) -> None:
    given = {
        "--family": options.family is not None,
        "--keep-padding": options.keep_padding,
        "--vocab-size": options.vocab_size is not None,
    }
    for option, is_given in given.items():
        if is_given:
            raise UsageError(option, "has no effect: the output keeps the names of the source")
