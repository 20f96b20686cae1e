"""Whose words a pipeline's names are: of one layer's number, several programs call the parts so.

Sources: GPT-NeoX ea7aefd ``megatron/model/``, Megatron-DeepSpeed and BigScience's Bloom
``megatron/model/gpt_model.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from reshard.formats.deepspeed.directory import NAME
from reshard.manifest import WEIGHT_KINDS, Manifest

NEOX = "neox"
_QKV = re.compile(r"(?:sequential\.)?(\d{1,9})\.(self_)?attention\.query_key_value\.weight")
_FIRST_OF_BLOOM = 3  # the layer of its first block; 2 in Megatron-DeepSpeed and GPT-NeoX


def of_manifest(manifest: Manifest) -> str | None:
    """Which words of a table a DeepSpeed pipeline's names are; None elsewhere."""
    if manifest.origin.format != NAME:
        return None
    return of_names(entry.fqn for entry in manifest.of_kind(*WEIGHT_KINDS))[0]


def of_names(names: Iterable[str]) -> tuple[str | None, int]:
    """(which words of the table a pipeline speaks, its number of blocks); None: none of them."""
    found = {int(m[1]): m[2] for name in names if (m := _QKV.fullmatch(name))}
    if not found:
        return None, 0
    if None in found.values():
        return NEOX, len(found)
    return ("bloom" if min(found) == _FIRST_OF_BLOOM else "layers"), len(found)
