"""Names of the scales of quantised weights, which tell them from weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from reshard.core.dtypes import BY_NAME, E4M3, E5M2
from reshard.core.manifest import Entry, find_most_common_dtype

FLOAT8 = (E4M3, E5M2)
PACKED = BY_NAME["int8"]  # two e2m1 codes: the experts of DeepSeek V4
CODE_DTYPES = (*FLOAT8, PACKED)
# Scales of activations and of the cache of keys and values, which weights do not depend on.
UNUSED = (
    *("activation_scale", "input_scale", "input_global_scale", "input_zero_point", "qscale_act"),
    *(".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale"),
)
# Ends of names of scales, whatever their codes: compressed-tensors and Model Optimizer, and
# bitsandbytes (also nested_absmax and nested_quant_map).
_SCALES = (
    *(*UNUSED, ".weight_scale", "weight_scale_2", "weight_global_scale", "pre_quant_scale"),
    *("absmax", "quant_map"),
)


def name_scales(fqn: str) -> Iterator[str]:
    """Yield the names that the scales of a weight can have.

    The first is DeepSeek V3's; then vLLM's for one scale per tensor, DeepSeek V4's and Mistral's.
    """
    yield f"{fqn}_scale_inv"
    if fqn.endswith(".weight"):
        stem = fqn.removesuffix("weight")
        yield from (f"{fqn}_scale", f"{stem}scale", f"{stem}qscale_weight")


def find_precision(entries: Collection[Entry]) -> str:
    """Return torch's name of the most common float dtype of weights; scales do not count."""
    codes = (entry.fqn for entry in entries if entry.dtype in CODE_DTYPES)
    scales = set(chain.from_iterable(map(name_scales, codes)))
    return find_most_common_dtype(
        entry.dtype
        for entry in entries
        if entry.fqn not in scales and not entry.fqn.endswith(_SCALES)
    )
