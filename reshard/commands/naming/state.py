"""What is asked of names, and a training state under those that it is written with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reshard.manifest import Manifest

if TYPE_CHECKING:
    from reshard.model_parallel.described import Described

Whose = Literal["source", "hf"]


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
