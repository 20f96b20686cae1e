"""Other names for a training state, by the table of its model's family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.core.manifest import Manifest
from reshard.errors import UnsupportedError, UsageError, understood
from reshard.layouts.model_parallel import families, names, vocabulary
from reshard.layouts.model_parallel.architecture import Architecture
from reshard.layouts.model_parallel.families import Family
from reshard.layouts.model_parallel.rules import add_user_rules, load_whole_table
from reshard.layouts.model_parallel.traits import Traits
from reshard.model import library
from reshard.naming.config import describe_config
from reshard.naming.options import ModelNames, NameOptions, Naming
from reshard.training.companion_files import find_config

# Keys of a config that may differ: values show a tie (`weights.resolve_ties`), and a router's loss
# acts in training alone.
_MAY_DIFFER = frozenset(
    """
    vocab_size max_position_embeddings n_positions tie_word_embeddings router_aux_loss_coef
    """.split()
)
_WINDOWS = {"sliding_window", "use_sliding_window"}  # they change nothing for shorter sequences
_PREDICTION = "num_nextn_predict_layers"  # transformers saves it, and not the layers


def describe_source(manifest: Manifest, own: ModelNames) -> Traits | None:
    """Return what a source states about its model, if its names are not Hugging Face's."""
    with understood(manifest.origin.path):
        return own.describe(manifest)


def _describe_model(
    manifest: Manifest, own: ModelNames, options: NameOptions, model: str | None
) -> Traits | None:
    # verl and NeMo 2 save Megatron's models without the arguments of the run. None: the names are
    # Hugging Face's, or nothing states what the model is.
    traits = describe_source(manifest, own)
    if traits is not None or not own.of_own_models or not library.is_installed():
        return traits
    if model is None and find_config(manifest) is None:
        return None
    return describe_config(manifest, options, model)[1]


def describe_or_explain(
    manifest: Manifest, own: ModelNames, options: NameOptions, model: str | None
) -> tuple[Traits | None, str]:
    """Return the result of `_describe_model`, or a note why the model is unknown.

    Raises:
        UsageError, UnsupportedError: the config is of no use, and the user asked for other names.
    """
    try:
        traits = _describe_model(manifest, own, options, model)
    except (UsageError, UnsupportedError) as error:
        if options.names or options.family:
            raise
        return None, f"the output has the names of the source: {error.where}: {error.problem}"
    if traits is not None or not own.of_own_models:
        return traits, ""
    return None, (
        "the output has the names of the source, which transformers does not load:"
        f" {manifest.origin.path} does not state a model that reshard knows; pass its config with"
        " --hf-dir DIR (merge) or --model DIR"
    )


def rename_to_hf(
    manifest: Manifest, own: ModelNames, traits: Traits, options: NameOptions
) -> Naming:
    """Return the state under Hugging Face's names.

    Args:
        traits: what the source states about its model.

    Raises:
        UnsupportedError: the model belongs to no family that has a table.
        UsageError: the given config describes another model.
    """
    try:
        family, traits = _choose_family(own, traits, options)
    except UnsupportedError as error:
        # The source's own names are a valid output, unless the user asked for other names.
        if options.names or options.family or options.config:
            raise
        return Naming(manifest, (_explain_unknown_family(error),))
    traits = replace(traits, vocab=_choose_vocab_size(traits, options))
    if options.config is None:
        config, notes = family.make_config(traits), list[str]()
    else:
        config, notes = dict(options.config), _check_config(options.config, family, traits)
    table = add_user_rules(family.table, options.rules)
    renamed = names.rename_to_hf(
        manifest,
        table,
        traits.make_architecture(),
        dialect=own.spelling(manifest),
        keep_padding=options.keep_padding,
    )
    return Naming(
        renamed.manifest,
        (*notes, *renamed.notes),
        config,
        trimmed=(table, traits.vocab) if traits.vocab and not options.keep_padding else None,
    )


def suggest_hf_names(own: ModelNames, traits: Traits, options: NameOptions) -> str:
    """Return a note that the output has the names of the source, and how to get Hugging Face's.

    Args:
        traits: what the source states about its model.
    """
    try:
        family, _ = _choose_family(own, traits, options)
    except UnsupportedError as error:
        return _explain_unknown_family(error)
    return (
        "the output has the names of the source, which transformers does not load; pass --names hf"
        f" for those of Hugging Face ({family.name}), or a directory as DESTINATION to get a"
        " config.json too"
    )


def _explain_unknown_family(error: UnsupportedError) -> str:
    return f"the output has the names of the source: it {error.problem}"


def remove_padding(manifest: Manifest, own: ModelNames, options: NameOptions) -> Naming:
    """Return the state under its own names, without the padding rows of the vocabulary.

    Raises:
        UsageError: no tensor is known to be a vocabulary, or it has fewer rows.
    """
    traits, vocab_size = describe_source(manifest, own), options.vocab_size or 0
    table = add_user_rules(load_whole_table(own.table), options.rules)
    constants = {"layers": traits.layers} if traits is not None and traits.layers else {}
    rows = vocabulary.find_row_counts(manifest, table, constants)
    if not rows or min(rows) < vocab_size:
        problem = f"has {min(rows)} rows" if rows else "is not in the table of its names"
        raise UsageError(
            f"--vocab-size {vocab_size}", f"the vocabulary of {manifest.origin.path} {problem}"
        )
    trimmed, removed = vocabulary.cut_rows(manifest, table, constants, vocab_size)
    last = vocab_size + removed - 1
    notes = [f"removed the padding rows {vocab_size} to {last} of the vocabulary"]
    return Naming(trimmed, tuple(notes if removed else ()), trimmed=(table, vocab_size))


def rename_to_hf_first(
    manifest: Manifest, own: ModelNames, options: NameOptions, model: str | None
) -> tuple[Manifest, Traits, Family]:
    """Return the state under Hugging Face's names, with the model's traits and family.

    Args:
        model: the user's description of the model, for a source with Hugging Face's names.
    """
    traits = _describe_model(manifest, own, options, model)
    if traits is None:
        family, traits = describe_config(manifest, options, model)
        return manifest, traits, family
    family, traits = families.choose_family(traits, options.family, options.rules)
    return (
        rename_to_hf(manifest, own, traits, options._replace(names="hf")).manifest,
        traits,
        family,
    )


def build_architecture(traits: Traits, options: NameOptions) -> Architecture:
    """Return the sizes of the model, with the vocabulary that the user gives."""
    return replace(traits, vocab=options.vocab_size or traits.vocab).make_architecture()


def _choose_vocab_size(traits: Traits, options: NameOptions) -> int | None:
    if options.vocab_size is not None:
        return options.vocab_size
    given = options.config.get("vocab_size") if options.config else None
    return given if type(given) is int else traits.vocab


def _check_config(given: Mapping[str, Any], family: Family, traits: Traits) -> list[str]:
    """Compare every setting that the family's table maps with the source's; return warnings."""
    warnings = []
    for key, value, other in family.find_differences(given, traits):
        if key in _WINDOWS:
            warnings.append(
                f"the config has {key} {other}, and the run had {value}: longer sequences give"
                " other results"
            )
        elif key == _PREDICTION and not value:
            warnings.append(
                f"the config has {key} {other}, and the checkpoint lacks these layers: transformers"
                " needs them only with use_mtp=True, other engines for speculative decoding"
            )
        elif key not in _MAY_DIFFER:
            raise UsageError(
                traits.source,
                f"belongs to another model than the config: {key} is {value}, but {other} in the"
                " config",
                "pass the model's own config with --hf-dir, or --names source",
            )
    return warnings


def _choose_family(own: ModelNames, traits: Traits, options: NameOptions) -> tuple[Family, Traits]:
    if own.family:
        if traits.unsupported and options.config is None:
            raise UnsupportedError(
                traits.source,
                f"states that the model has {traits.unsupported[0]}",
                "pass the config of this model with --hf-dir DIR, or --names source",
            )
        return own.family(traits), traits
    given = options.config.get("model_type") if options.config else None
    known = given if families.is_known(given, options.rules) else None
    return families.choose_family(traits, options.family or known, options.rules)
