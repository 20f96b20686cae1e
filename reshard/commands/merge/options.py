"""The options of ``merge``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reshard.commands.output_options import NamingOptions, OutputOptions
from reshard.core import keys
from reshard.errors import UsageError
from reshard.options import Options, nested_options, option, size_option
from reshard.tensors import schedule_free, weights

HUB_PREFIX = "hf:/"  # pathlib collapses two slashes into one
FILL = "--fill-missing-from"
MERGE_LORA = "--merge-lora"
QUANTISE_LIKE = "--quantise-like"
QUANTISE = "--quantise"
_CODES = re.compile(r"(mx|nv)?(fp|float)[48]", re.IGNORECASE)
_OF_OTHER_MODELS = ("fill_missing_from", "family", "vocab_size", "keep_padding")


@dataclass(frozen=True, kw_only=True)
class WeightsOptions(Options):
    """Options of ``merge`` and ``average``: the weights to write, their dtype and their files."""

    dtype: str | None = option(
        None,
        "Dtype of the weights: bf16, fp16, fp32 or keep (as stored).",
        group="Weights",
        unset="as trained",
        is_common=True,
    )
    keep_fp32: Sequence[str] = option(
        (), "Write weights with a matching name as fp32.", group="Weights", metavar="REGEX"
    )
    tied: weights.Tied = option(
        "auto",
        "Further names of tied weights; auto drops those with equal values.",
        group="Weights",
    )
    schedule_free: schedule_free.ScheduleFree = option(
        "x",
        "Weights of a schedule-free optimizer that was saved in train mode: x, the average that its"
        " eval() computes, or y, as stored.",
        group="Weights",
    )
    keep_padding: bool = option(False, "Keep padding rows of the embedding.", group="Weights")
    edits: keys.Edits = nested_options(keys.Edits)
    max_shard_bytes: int = size_option(
        "5GB",
        "Maximum size of each weights file.",
        flag="--max-shard-size",
        group="Files",
        is_common=True,
    )
    hf_dir: Path | None = option(
        None,
        "Copy config.json, tokenizer files, ... from this model's directory.",
        group="Files",
        unset="files beside SOURCE",
        is_common=True,
    )


@dataclass(frozen=True, kw_only=True)
class OtherModelOptions(Options):
    """Parts of a model that are stored apart: in another model, or as an adapter."""

    fill_missing_from: Path | None = option(
        None,
        "Model that supplies weights missing from the checkpoint (frozen ones that were not"
        " saved).",
        group="Weights",
    )
    adapter: str | None = option(
        None,
        "Write only this PEFT adapter, as PEFT loads it; an unnamed one is called default.",
        group="Weights",
        metavar="NAME",
    )
    merge_lora: Path | None = option(
        None,
        "Add the LoRA adapter of SOURCE (--adapter, if it has several) to this base model, and"
        " write the merged model.",
        group="Weights",
        metavar="BASE",
        is_common=True,
    )


@dataclass(frozen=True, kw_only=True)
class MergeOptions(WeightsOptions, OtherModelOptions, NamingOptions, OutputOptions):
    """The options of ``merge``; the defaults are the safe ones."""

    quantise_like: Path | None = option(
        None,
        "Quantise the same weights in the same way as this fp8 or MXFP4 model: write codes and"
        " scales.",
        group="Weights",
        metavar="RELEASE",
    )
    quantise: Literal["fp8-block"] | None = option(
        None,
        "Write the linear layers as fp8 in blocks of 128 x 128 with fp32 scales, as transformers"
        " quantises the model: codes and scales.",
        group="Weights",
    )

    def __post_init__(self) -> None:
        """Refuse values that are not allowed, and options that contradict each other.

        Raises:
            UsageError: an option is refused; the message names it.
        """
        super().__post_init__()
        if self.dtype and _CODES.match(self.dtype):
            raise UsageError(
                f"--dtype {self.dtype}",
                "stores codes and scales, whose form (block sizes, names) a model must state",
                f"pass such a model (fp8 in blocks, MXFP4): {QUANTISE_LIKE} RELEASE, or quantise as"
                f" transformers does: {QUANTISE} fp8-block",
            )
        if self.fill_missing_from and (self.edits.include or self.edits.exclude):
            raise UsageError(FILL, "would add weights that --include and --exclude leave out")
        if self.merge_lora is not None:
            self.refuse_beside(MERGE_LORA, *_OF_OTHER_MODELS)
            if self.edits.include or self.edits.exclude:
                raise UsageError(
                    MERGE_LORA, "adds the whole adapter", "leave out --include and --exclude"
                )
            if self.tied == "drop":
                raise UsageError(
                    "--tied drop", "would leave out merged values", "pass auto or keep"
                )
        elif self.adapter is not None:
            others = (*_OF_OTHER_MODELS, "names", "tied", "quantise_like", "quantise")
            self.refuse_beside("--adapter", *others)
        if self.quantise_like is not None:
            self.refuse_beside(QUANTISE_LIKE, "quantise")
        if self.writes_codes and self.names == "module":
            how = f"{QUANTISE} writes the names of files"
            if self.quantise_like is not None:
                how = f"{QUANTISE_LIKE} writes the names of the release"
            raise UsageError("--names module", how, "leave it out")

    @property
    def writes_codes(self) -> bool:
        """Whether weights are written as codes and scales, whatever their source stores."""
        return self.quantise is not None or self.quantise_like is not None

    @property
    def writes_adapter(self) -> bool:
        """Whether the output is an adapter, not a model."""
        return self.adapter is not None and self.merge_lora is None

    def reader_arguments(self) -> dict[str, Any]:
        """Return the keywords of `formats.read`; placeholders are allowed if they are filled."""
        return super().reader_arguments() | {"is_filled": self.fill_missing_from is not None}
