"""Under whose names a training state is written, and the config of the model that has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from reshard.box import Box
from reshard.commands.companions import config_beside
from reshard.errors import UnsupportedError, UsageError, understood
from reshard.files import SourceFiles
from reshard.formats import deepspeed, huggingface, megatron, meta
from reshard.formats.deepspeed import neox
from reshard.formats.deepspeed.cuts import dialect_of
from reshard.manifest import WEIGHT_KINDS, Entry, Manifest
from reshard.model_parallel import families, names
from reshard.model_parallel.architecture import Architecture
from reshard.model_parallel.described import Described
from reshard.model_parallel.families import Family
from reshard.model_parallel.megatron_traits import as_megatron, of_megatron
from reshard.model_parallel.rules import Table, builtin, with_users
from reshard.model_parallel.traits import Traits
from reshard.paths import as_path
from reshard.tensors import read_block

Whose = Literal["source", "hf"]

_OF_MEGATRON = {"num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"}
_FREE = {"vocab_size", "max_position_embeddings", "n_positions"}  # of a config: may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a user says of names.

    Args:
        whose: None: Hugging Face's where they are known.
        config: of Hugging Face's model, where one is given or lies beside the source.
        words: rows of the vocabulary; None: as the config or the source says.
    """

    whose: Whose | None = None
    family: str | None = None
    rules: Path | None = None
    words: int | None = None
    keep_padding: bool = False
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Naming:
    """A training state under the names that it is written with.

    Args:
        config: of the model, where the names are Hugging Face's now; made from what the source
            says unless it was given.
        described: the model, where the names are Megatron's.
    """

    manifest: Manifest
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    described: Described | None = None

    def own(self, fqn: str) -> str:
        """What the model's table calls a parameter that a file has in a dialect's words."""
        found = self.described.table.find(fqn, {}) if self.described else None
        return found.name if found else fqn


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
    if target == meta.NAME:
        return _for_meta(manifest, asked, model)
    return _for_megatron(manifest, asked, model)


def chosen(manifest: Manifest, asked: Asked) -> Naming:
    """The state under the names that are asked for.

    Raises:
        UsageError: Hugging Face's are asked for, and nothing says what the model is.
        UnsupportedError: it is like none of the families that there are tables of.
    """
    traits = traits_of(manifest)
    if asked.whose == "source" or (traits is None and asked.whose is None):
        _refuse_unheeded(asked)
        return Naming(manifest)
    if traits is None:
        raise UsageError(
            "--names hf",
            f"a {manifest.origin.format} checkpoint has the names that its model has: nothing says"
            " that they are others than Hugging Face's",
            "leave it out; single names change with --rename",
        )
    try:
        family = _family(manifest, traits, asked)
    except UnsupportedError as error:
        if asked.whose or asked.family or asked.config:
            raise
        return Naming(manifest, (f"the names are the source's own: it {error.problem}",))
    traits = replace(traits, vocab=_words(traits, asked))
    made = family.config_of(traits)
    if asked.config is not None:
        _check_config(asked.config, made, traits)
    table = with_users(family.table, asked.rules)
    done = names.to_hf(
        manifest,
        table,
        traits.architecture(),
        dialect=_dialect(manifest),
        keep_padding=asked.keep_padding,
    )
    notes = list(done.notes)
    if traits.vocab and not asked.keep_padding:
        notes += _padding(manifest, table, traits.vocab)
    return Naming(done.manifest, tuple(notes), asked.config or made)


def _for_megatron(manifest: Manifest, asked: Asked, model: str | None) -> Naming:
    """The state under Megatron's names, and the model that it is of."""
    if manifest.origin.format == megatron.NAME:
        traits, table = traits_of(manifest), with_users(builtin("megatron"), asked.rules)
        if traits is None:
            raise UsageError(manifest.origin.path, "does not say what its model is")
        described = Described(table, _numbers(traits, asked), manifest.train.config)
        return Naming(manifest, described=described)
    manifest, traits, family = _as_hf(manifest, asked, model)
    table = with_users(family.table, asked.rules)
    done = names.from_hf(manifest, table, traits.architecture())
    notes = (*done.notes, f"named as Megatron does by the table of {family.name}")
    described = Described(table, _numbers(traits, asked), as_megatron(traits))
    return Naming(done.manifest, notes, described=described)


def _for_meta(manifest: Manifest, asked: Asked, model: str | None) -> Naming:
    """The state under Meta's names, whose model is a Llama."""
    table = with_users(families.meta().table, asked.rules)
    if manifest.origin.format == meta.NAME:
        numbers = _numbers(meta.traits(manifest), asked)
        return Naming(manifest, described=Described(table, numbers, manifest.train.config))
    manifest, traits, _ = _as_hf(manifest, asked, model)
    families.need(traits, "llama")
    if traits.rope_scaling is not None:
        raise UnsupportedError(
            traits.source, f"scales rotations ({traits.rope_scaling}), which params.json cannot say"
        )
    from reshard.formats.meta import target as meta_target

    done = names.from_hf(manifest, table, traits.architecture())
    head = {meta.OUTPUT: meta.EMBEDDING} if traits.tied else {}
    described = Described(table, _numbers(traits, asked), meta_target.params_of(traits))
    named = replace(done.manifest, tied={**done.manifest.tied, **head})
    return Naming(named, (*done.notes, "named as Meta does"), described=described)


def _as_hf(manifest: Manifest, asked: Asked, model: str | None) -> tuple[Manifest, Traits, Family]:
    """The state under Hugging Face's names, and the model's traits and family."""
    traits = traits_of(manifest)
    if traits is None:
        family, traits = _of_config(manifest, asked, model)
        return manifest, traits, family
    family = families.need(traits, asked.family)
    return chosen(manifest, replace(asked, whose="hf")).manifest, traits, family


def _numbers(traits: Traits, asked: Asked) -> Architecture:
    return replace(traits, vocab=asked.words or traits.vocab).architecture()


def _of_config(manifest: Manifest, asked: Asked, model: str | None) -> tuple[Family, Traits]:
    """By the config that the user names, else by the one beside the source."""
    path = as_path(model) if model else config_beside(manifest)
    if path is not None and path.is_dir():
        path /= "config.json"
    if path is None or not path.is_file():
        raise UsageError(
            manifest.origin.path if model is None else f"--model {model}",
            "nothing says which of Hugging Face's models it is",
            "give its config: --model config.json|DIR",
        )
    config = _filled(path)
    with understood(path):
        return families.of_config(config, str(path), asked.family)


def _filled(path: Path) -> Mapping[str, Any]:
    """A transformers config with the defaults of its class."""
    config = huggingface.json_object(path)
    from transformers import AutoConfig

    try:
        made: dict[str, Any] = AutoConfig.for_model(**config).to_dict()
    except Exception as error:  # each config class has its own ways to refuse
        problem = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(path, f"is no config of transformers: {problem}") from error
    return made


def traits_of(manifest: Manifest) -> Traits | None:
    """What a source says of its model, where its names are not Hugging Face's."""
    with understood(manifest.origin.path):
        return _traits_of(manifest)


def _traits_of(manifest: Manifest) -> Traits | None:
    origin, config = manifest.origin, manifest.train.config
    if origin.format == megatron.NAME and isinstance(config, Mapping):
        return of_megatron(config, origin.path)
    if origin.format == meta.NAME:
        return meta.traits(manifest)
    args = manifest.train.client.get("args")  # Megatron-DeepSpeed's, a Namespace
    if _dialect(manifest) == neox.DIALECT:
        said = neox.settings(origin.path)
        padded = args.get("padded_vocab_size") if isinstance(args, Mapping) else None
        return neox.traits(said, padded, origin.path) if said else None
    state = args.get("state") if isinstance(args, Mapping) else None
    if isinstance(state, Mapping) and state.keys() >= _OF_MEGATRON:
        return of_megatron(state, origin.path)
    return None


def _dialect(manifest: Manifest) -> str | None:
    """Which words of a table a DeepSpeed pipeline's names are; None elsewhere."""
    if manifest.origin.format != deepspeed.NAME:
        return None
    return dialect_of(entry.fqn for entry in manifest.of_kind(*WEIGHT_KINDS))[0]


def _refuse_unheeded(asked: Asked) -> None:
    given = {
        "--family": asked.family is not None,
        "--keep-padding": asked.keep_padding,
        "--vocab-size": asked.words is not None,
    }
    for option, is_given in given.items():
        if is_given:
            raise UsageError(option, "changes nothing: the names stay the source's")


def _family(manifest: Manifest, traits: Traits, asked: Asked) -> Family:
    """By its name, by the config's, else by its traits."""
    if manifest.origin.format == meta.NAME:
        if traits.odd and asked.config is None:
            raise UnsupportedError(
                traits.source,
                f"says that the model has {traits.odd[0]}: Llama 3.1 has 8, Llama 3.2 has 32",
                "give the config of this model with --hf-dir DIR, or --names source",
            )
        return families.meta()
    given = asked.config.get("model_type") if asked.config else None
    return families.need(traits, asked.family or (given if families.is_known(given) else None))


def _words(traits: Traits, asked: Asked) -> int | None:
    if asked.words is not None:
        return asked.words
    given = asked.config.get("vocab_size") if asked.config else None
    return given if type(given) is int else traits.vocab


def _check_config(given: Mapping[str, Any], made: Mapping[str, Any], traits: Traits) -> None:
    """Refuse the config of another model.

    Raises:
        UsageError: a size differs.
    """
    for key, value in made.items():
        held = given.get(key)
        if type(value) is int and type(held) is int and held != value and key not in _FREE:
            raise UsageError(
                traits.source,
                f"is of another model than the config: {key} is {value}, there {held}",
                "give the model's own config with --hf-dir, or --names source",
            )


def _padding(manifest: Manifest, table: Table, words: int) -> list[str]:
    """What is to be said of the rows that are taken off: they take part in the softmax."""
    found = []
    with SourceFiles() as pool:
        for entry in manifest.entries.values():
            rule = table.find(entry.fqn, {})
            padded = rule is not None and rule.rule.is_vocabulary and entry.shape[:1] > (words,)
            if padded and entry.chunks and _is_trained(entry, words, pool):
                found.append(f"{entry.fqn} ({entry.kind})")
    if not found:
        return []
    what = f"the padding rows of {', '.join(found)} have values of their own"
    return [f"{what}: they were trained, as they take part in the softmax"]


def _is_trained(entry: Entry, words: int, pool: SourceFiles) -> bool:
    """Whether the rows from ``words`` on differ, or hold optimizer state; read a row at a time."""
    width = entry.shape[1:]
    rows = (
        bytes(read_block(pool, entry, Box((row, *(0,) * len(width)), (1, *width))))
        for row in range(words, entry.shape[0])
    )
    first = next(rows)
    state = entry.kind not in WEIGHT_KINDS and any(first)
    return state or any(row != first for row in rows)
