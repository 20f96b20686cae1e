"""Other names for a training state by its model's table: Hugging Face's, Megatron's, Meta's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.commands.naming import padding, traits
from reshard.commands.naming.state import Asked, Naming
from reshard.errors import UnsupportedError, UsageError
from reshard.formats import megatron
from reshard.formats.deepspeed import dialects
from reshard.formats.meta import directory as meta
from reshard.formats.meta import reader as of_meta
from reshard.manifest import Manifest
from reshard.model_parallel import families, names, vocabulary
from reshard.model_parallel.architecture import Architecture
from reshard.model_parallel.described import Described
from reshard.model_parallel.families import Family
from reshard.model_parallel.megatron_traits import as_megatron
from reshard.model_parallel.rules import builtin, with_users
from reshard.model_parallel.traits import Traits
from reshard.pickles import objects

# Keys of a config that may differ: values tell of a tie (`weights.resolve_ties`), a router's loss
# acts in training alone.
_FREE = frozenset(
    """
    vocab_size max_position_embeddings n_positions tie_word_embeddings router_aux_loss_coef
    """.split()
)
_WINDOWS = {"sliding_window", "use_sliding_window"}  # no change up to that many tokens


def as_hf(manifest: Manifest, said: Traits, asked: Asked) -> Naming:
    """The state under Hugging Face's names.

    Raises:
        UnsupportedError: the model is like none of the families that there are tables of.
        UsageError: the config that is given is of another model.
    """
    try:
        family = _family(manifest, said, asked)
    except UnsupportedError as error:
        if asked.whose or asked.family or asked.config:
            raise
        return Naming(manifest, (f"the names are the source's own: it {error.problem}",))
    said = replace(said, vocab=_words(said, asked))
    if asked.config is None:
        config, changes = family.config_of(said), []
    else:
        config, changes = dict(asked.config), _check_config(asked.config, family, said)
    table = with_users(family.table, asked.rules)
    done = names.to_hf(
        manifest,
        table,
        said.architecture(),
        dialect=dialects.find_dialect(manifest),
        keep_padding=asked.keep_padding,
    )
    notes = [*changes, *done.notes]
    if said.vocab and not asked.keep_padding:
        notes += padding.notes(manifest, table, said.vocab)
    return Naming(done.manifest, tuple(notes), config)


def without_padding(manifest: Manifest, asked: Asked) -> Naming:
    """Return the state under its own names, with the rows of the vocabulary that are words.

    Raises:
        UsageError: nothing says which tensors are a vocabulary's, or they have fewer rows.
    """
    said, words = traits.of(manifest), asked.words or 0
    table = with_users(
        families.meta().table if manifest.origin.format == meta.NAME else builtin("megatron"),
        asked.rules,
    )
    constants = {"layers": said.layers} if said is not None and said.layers else {}
    rows = vocabulary.rows(manifest, table, constants)
    if not rows or min(rows) < words:
        held = f"has {min(rows)} rows" if rows else "is not known to the table of its names"
        raise UsageError(
            f"--vocab-size {words}", f"the vocabulary of {manifest.origin.path} {held}"
        )
    notes = padding.notes(manifest, table, words)
    cut, taken = vocabulary.cut_to(manifest, table, constants, words)
    if taken:
        last = words + taken - 1
        notes.insert(0, f"padding rows {words} to {last} of the vocabulary taken off")
    return Naming(cut, tuple(notes))


def as_megatrons(manifest: Manifest, asked: Asked, model: str | None) -> Naming:
    """The state under Megatron's names, and the model that it is of.

    Raises:
        UsageError: nothing says what the model is.
        UnsupportedError: there is no table of it.
    """
    if manifest.origin.format == megatron.NAME:
        said, table = traits.of(manifest), with_users(builtin("megatron"), asked.rules)
        if said is None:
            raise UsageError(manifest.origin.path, "does not say what its model is")
        args = {**manifest.train.config, **objects.attributes(manifest.train.objects.get("args"))}
        return Naming(manifest, described=Described(table, _numbers(said, asked), args))
    manifest, said, family = _hf_first(manifest, asked, model)
    table = with_users(family.table, asked.rules)
    done = names.from_hf(manifest, table, said.architecture())
    notes = (*done.notes, f"named as Megatron does by the table of {family.name}")
    described = Described(table, _numbers(said, asked), as_megatron(said))
    return Naming(done.manifest, notes, described=described)


def as_metas(manifest: Manifest, asked: Asked, model: str | None) -> Naming:
    """The state under Meta's names, whose model is a Llama.

    Raises:
        UsageError: nothing says what the model is.
        UnsupportedError: it is no Llama, or one that params.json cannot describe.
    """
    table = with_users(families.meta().table, asked.rules)
    if manifest.origin.format == meta.NAME:
        numbers = _numbers(of_meta.traits(manifest), asked)
        return Naming(manifest, described=Described(table, numbers, manifest.train.config))
    manifest, said, _ = _hf_first(manifest, asked, model)
    families.need(said, "llama")
    if said.rope_scaling is not None:
        raise UnsupportedError(
            said.source, f"scales rotations ({said.rope_scaling}), which params.json cannot say"
        )
    from reshard.formats.meta import target as meta_target

    done = names.from_hf(manifest, table, said.architecture())
    head = {meta.OUTPUT: meta.EMBEDDING} if said.tied else {}
    described = Described(table, _numbers(said, asked), meta_target.params_of(said))
    named = replace(done.manifest, tied={**done.manifest.tied, **head})
    return Naming(named, (*done.notes, "named as Meta does"), described=described)


def _hf_first(
    manifest: Manifest, asked: Asked, model: str | None
) -> tuple[Manifest, Traits, Family]:
    """The state under Hugging Face's names, and the model's traits and family."""
    said = traits.of(manifest)
    if said is None:
        family, said = traits.of_config(manifest, asked, model)
        return manifest, said, family
    family = families.need(said, asked.family)
    return as_hf(manifest, said, replace(asked, whose="hf")).manifest, said, family


def _numbers(said: Traits, asked: Asked) -> Architecture:
    return replace(said, vocab=asked.words or said.vocab).architecture()


def _words(said: Traits, asked: Asked) -> int | None:
    if asked.words is not None:
        return asked.words
    given = asked.config.get("vocab_size") if asked.config else None
    return given if type(given) is int else said.vocab


def _check_config(given: Mapping[str, Any], family: Family, said: Traits) -> list[str]:
    """Compare every setting of a config that the family's table maps with the source's.

    Returns:
        Warnings of settings that may change the model for some inputs.

    Raises:
        UsageError: a setting differs that changes what the model computes.
    """
    warnings = []
    for key, value, held in family.differences(given, said):
        if key in _WINDOWS:
            warnings.append(
                f"the config says {key} {held}, and the run had {value}: longer sequences give"
                " other results"
            )
        elif key not in _FREE:
            raise UsageError(
                said.source,
                f"is of another model than the config: {key} is {value}, there {held}",
                "give the model's own config with --hf-dir, or --names source",
            )
    return warnings


def _family(manifest: Manifest, said: Traits, asked: Asked) -> Family:
    """By its name, by the config's, else by its traits."""
    if manifest.origin.format == meta.NAME:
        if said.odd and asked.config is None:
            raise UnsupportedError(
                said.source,
                f"says that the model has {said.odd[0]}: Llama 3.1 has 8, Llama 3.2 has 32",
                "give the config of this model with --hf-dir DIR, or --names source",
            )
        return families.meta()
    given = asked.config.get("model_type") if asked.config else None
    return families.need(said, asked.family or (given if families.is_known(given) else None))
