"""What ``merge`` can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from reshard import keys, weights
from reshard.commands import naming
from reshard.commands.output import OutputOptions
from reshard.commands.reading import one_of
from reshard.errors import UsageError

FILL = "--fill-missing-from"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions(OutputOptions):
    """What a merge can be asked for; the defaults are the safe ones."""

    dtype: str | None = None  # bf16, fp16, fp32, keep; None: as trained
    keep_fp32: Sequence[str] = ()
    max_shard_bytes: int = 5 * 10**9
    hf_dir: Path | None = None
    fill_missing_from: Path | None = None  # a model: weights that the checkpoint lacks
    tied: weights.Tied = "auto"
    names: naming.Whose | None = None  # None: Hugging Face's for a directory, where they are known
    family: str | None = None  # which of Hugging Face's models it is; None: as the source says
    vocab_size: int | None = None  # rows that are words; None: as the source says
    keep_padding: bool = False  # of the vocabulary
    adapter: str | None = None  # the name of a LoRA adapter to write alone
    edits: keys.Edits = field(default_factory=keys.Edits)

    def __post_init__(self) -> None:
        """Refuse a choice that there is not.

        Raises:
            UsageError: naming the choices, or two that contradict each other.
        """
        OutputOptions.__post_init__(self)
        if self.fill_missing_from and (self.edits.include or self.edits.exclude):
            raise UsageError(FILL, "would bring back what --include and --exclude leave out")
        one_of("tied", self.tied, get_args(weights.Tied))
        one_of("names", self.names, (None, *get_args(naming.Whose)))
        if self.adapter is not None:
            self._refuse_beside_adapter()

    def told(self) -> dict[str, Any]:
        """Return the keywords of `formats.read`; what is to be filled may have placeholders."""
        return OutputOptions.told(self) | {"is_filled": self.fill_missing_from is not None}

    def _refuse_beside_adapter(self) -> None:
        """Refuse what says something of a whole model.

        Raises:
            UsageError: naming the option.
        """
        whole = ("fill_missing_from", "names", "family", "vocab_size", "keep_padding", "tied")
        for option in whole:
            if getattr(self, option) not in (None, False, "auto"):
                raise UsageError(
                    f"--{option.replace('_', '-')}", "means nothing to --adapter", "leave it out"
                )
