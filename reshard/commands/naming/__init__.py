"""Under whose names a training state is written, and the config of the model that has them.

state       what is asked of names; a state under those that it is written with
tables      other names by a model's table
traits      what a source, or a config, says of its model
padding     rows that pad the vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reshard.commands.naming.state import Asked, Naming, Whose
from reshard.errors import UsageError
from reshard.formats import megatron, meta
from reshard.formats.deepspeed import dialects
from reshard.manifest import Manifest

__all__ = ["Asked", "Naming", "Whose", "chosen", "for_target"]


def for_target(manifest: Manifest, target: str, asked: Asked, model: str | None) -> Naming:
    """The state under the names that a target's files have.

    Args:
        model: what the user says of the model of a source with Hugging Face's names.

    Raises:
        UsageError: the target has its own, or nothing says what they are.
        UnsupportedError: there is no table of the model.
    """
    if target not in (megatron.NAME, meta.NAME):
        return chosen(manifest, replace(asked, whose=asked.whose or "source"))
    if asked.whose is not None:
        raise UsageError(f"--names {asked.whose}", f"changes nothing of --to {target}")
    from reshard.commands.naming import tables

    named = tables.as_metas if target == meta.NAME else tables.as_megatrons
    return named(manifest, asked, model)


def chosen(manifest: Manifest, asked: Asked) -> Naming:
    """The state under the names that are asked for.

    Raises:
        UsageError: Hugging Face's are asked for, and nothing says what the model is.
        UnsupportedError: it is like none of the families that there are tables of.
    """
    if asked.whose != "source" and _may_be_others(manifest):
        from reshard.commands.naming import tables, traits

        said = traits.of(manifest)
        if said is not None:
            return tables.as_hf(manifest, said, asked)
    if asked.whose == "hf":
        raise UsageError(
            "--names hf",
            f"a {manifest.origin.format} checkpoint has the names that its model has: nothing says"
            " that they are others than Hugging Face's",
            "leave it out; single names change with --rename",
        )
    if asked.words is not None and asked.family is None and _may_be_others(manifest):
        from reshard.commands.naming import tables

        return tables.without_padding(manifest, asked)
    _refuse_unheeded(asked)
    return Naming(manifest)


def _may_be_others(manifest: Manifest) -> bool:
    """Whether the names may be others than Hugging Face's: then what the model is, is said."""
    return (
        manifest.origin.format in (megatron.NAME, meta.NAME)
        or isinstance(manifest.train.client.get("args"), Mapping)  # Megatron-DeepSpeed's
        or dialects.find_dialect(manifest) == dialects.NEOX
    )


def _refuse_unheeded(asked: Asked) -> None:
    given = {
        "--family": asked.family is not None,
        "--keep-padding": asked.keep_padding,
        "--vocab-size": asked.words is not None,
    }
    for option, is_given in given.items():
        if is_given:
            raise UsageError(option, "changes nothing: the names stay the source's")
