"""Detect the naming scheme of a pipeline: programs name the parts of a layer differently.

Sources: GPT-NeoX ea7aefd ``megatron/model/``, Megatron-DeepSpeed and BigScience's Bloom
``megatron/model/gpt_model.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from reshard.core.manifest import Manifest
from reshard.formats.deepspeed.directory import NAME

NEOX = "neox"
_QKV = re.compile(r"(?:sequential\.)?(\d{1,9})\.(self_)?attention\.query_key_value\.weight")
_FIRST_OF_BLOOM = 3  # the layer of its first block; 2 in Megatron-DeepSpeed and GPT-NeoX


def find_dialect(manifest: Manifest) -> str | None:
    """Return the naming scheme of a DeepSpeed pipeline, as tables call it; else None."""
    if manifest.origin.format != NAME:
        return None
    return detect_dialect(manifest.weight_shapes)[0]


def detect_dialect(names: Iterable[str]) -> tuple[str | None, int]:
    """Return the naming scheme of a pipeline's parameters and its number of blocks.

    The scheme is None if no built-in table has it.
    """
    blocks = {int(m[1]): m[2] for name in names if (m := _QKV.fullmatch(name))}
    if not blocks:
        return None, 0
    if None in blocks.values():  # GPT-NeoX says "attention", the others "self_attention"
        return NEOX, len(blocks)
    return ("bloom" if min(blocks) == _FIRST_OF_BLOOM else "layers"), len(blocks)
