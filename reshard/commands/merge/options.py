"""The options of ``merge``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard import keys, weights
from reshard.commands.output_options import NamingOptions, OutputOptions
from reshard.errors import UsageError
from reshard.options import nested_options, option, size_option

FILL = "--fill-missing-from"
_OF_WHOLE_MODELS = ("fill_missing_from", "names", "family", "vocab_size", "keep_padding", "tied")


@dataclass(frozen=True, kw_only=True)
class MergeOptions(NamingOptions, OutputOptions):
    """The options of ``merge``; the defaults are the safe ones."""

    dtype: str | None = option(
        None, "bf16, fp16, fp32 or keep (as stored).", group="Weights", unset="as trained"
    )
    keep_fp32: Sequence[str] = option(
        (), "Write weights with a matching name as fp32.", group="Weights", metavar="REGEX"
    )
    tied: weights.Tied = option(
        "auto",
        "Further names of tied weights; auto drops those with equal values.",
        group="Weights",
    )
    fill_missing_from: Path | None = option(
        None,
        "Model that supplies weights missing from the checkpoint (frozen ones that were not"
        " saved).",
        group="Weights",
    )
    adapter: str | None = option(
        None,
        "Write only this LoRA adapter, as PEFT loads it; an unnamed one is called default.",
        group="Weights",
        metavar="NAME",
    )
    keep_padding: bool = option(False, "Keep padding rows of the embedding.", group="Weights")
    edits: keys.Edits = nested_options(keys.Edits)
    max_shard_bytes: int = size_option(
        "5GB", "Maximum size of each weights file.", flag="--max-shard-size", group="Files"
    )
    hf_dir: Path | None = option(
        None,
        "Copy config, tokenizer... from this model.",
        group="Files",
        unset="files beside SOURCE",
    )

    def __post_init__(self) -> None:
        """Refuse values that are not allowed, and options that contradict each other.

        Raises:
            UsageError: an option is refused; the message names it.
        """
        super().__post_init__()
        if self.fill_missing_from and (self.edits.include or self.edits.exclude):
            raise UsageError(FILL, "would bring back what --include and --exclude leave out")
        if self.adapter is not None:
            self._refuse_beside_adapter()

    def reader_arguments(self) -> dict[str, Any]:
        """Return the keywords of `formats.read`; placeholders are allowed if they are filled."""
        return super().reader_arguments() | {"is_filled": self.fill_missing_from is not None}

    def _refuse_beside_adapter(self) -> None:
        """Refuse options of a whole model.

        Raises:
            UsageError: an option is refused; the message names it.
        """
        for name in _OF_WHOLE_MODELS:
            if getattr(self, name) not in (None, False, "auto"):
                raise UsageError(
                    f"--{name.replace('_', '-')}", "has no effect with --adapter", "leave it out"
                )
