"""The user's options for names, and a training state under the names to write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reshard.core.manifest import Manifest

if TYPE_CHECKING:
    from reshard.layouts.model_parallel.architecture import Described
    from reshard.layouts.model_parallel.families import Family
    from reshard.layouts.model_parallel.rules import Table
    from reshard.layouts.model_parallel.traits import Traits

Names = Literal["source", "hf", "module"]


def _always(_manifest: Manifest) -> bool:
    return True


def _no_spelling(_manifest: Manifest) -> None:
    return None


class ModelNames(NamedTuple):
    """How the parameter names of a format may differ from the names of Hugging Face's model.

    Args:
        may_differ: returns whether a checkpoint may have other names than Hugging Face's; all may
            by default.
        describe: returns what a checkpoint states about its model; None if it states nothing.
        spelling: returns the spelling of a table's names in a checkpoint; None: the usual one.
        table: name of the table of the format's own names, or another package's file of one.
        family: returns the model's family under the format's own names; None if the family follows
            from the traits.
        describe_adapter: returns what a checkpoint states about its LoRA adapter, as PEFT's
            configuration without the adapted layers; None if it states nothing.
        of_own_models: whether the names are those of the format's own models, which programs that
            load other layouts do not have.
    """

    describe: Callable[[Manifest], Traits | None]
    may_differ: Callable[[Manifest], bool] = _always
    spelling: Callable[[Manifest], str | None] = _no_spelling
    table: str | Path = "megatron"
    family: Callable[[Traits], Family] | None = None
    describe_adapter: Callable[[Manifest], dict[str, Any] | None] = _no_spelling
    of_own_models: bool = False


class NameOptions(NamedTuple):
    """The user's options for names.

    Args:
        names: the naming scheme; None: Hugging Face's names, if they are known.
        config: the config of Hugging Face's model, given or found beside the source.
        vocab_size: rows of the vocabulary without padding; None: as config or source states.
    """

    names: Names | None = None
    family: str | None = None
    rules: Path | None = None
    vocab_size: int | None = None
    keep_padding: bool = False
    config: Mapping[str, Any] | None = None


class Naming(NamedTuple):
    """A training state under the names to write.

    Args:
        config: the model's config, if the names are Hugging Face's now: the given one, else one
            that is derived from the source.
        described: the model, if the names are those of a writer's table.
        merged: tensors that several of the source became, whose values must be equal.
        trimmed: (table, vocab_size) if padding rows of the vocabulary were removed: the table of
            the source's names, and the number of rows that remain.
    """

    manifest: Manifest
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    described: Described | None = None
    merged: frozenset[str] = frozenset()
    trimmed: tuple[Table, int] | None = None

    def name_in_table(self, fqn: str) -> str:
        """Return the table's name of a parameter that a file calls ``fqn`` in another spelling."""
        rule = self.described.table.find(fqn, {}) if self.described else None
        return rule.name if rule else fqn
