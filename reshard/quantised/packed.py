"""The codes of bitsandbytes where no name tells them from weights.

A state dict has the scales of bitsandbytes beside its codes if they are attributes of the parameter
that it saves. FSDP 2 puts DTensors in place of the parameters, so that its checkpoints have only
codes: int8, or a column of packed 4-bit codes, with two of them in each byte of its dtype (bf16 if
``bnb_4bit_quant_storage`` is that of the other weights, as FSDP requires).

Sources: bitsandbytes 0.50 ``functional.py`` (``quantize_4bit``), ``nn/modules.py``
(``Linear4bit._save_to_state_dict``); PEFT 0.21 ``tuners/lora/bnb.py``.
"""

from __future__ import annotations

from reshard.core.manifest import WEIGHT_KINDS, Entry, Manifest
from reshard.model.adapter_names import IN, OUT, add_root, find_parts

_BASE = ".base_layer.weight"


def find_packed(manifest: Manifest) -> dict[str, Entry]:
    """Return the weights that are codes: integers, or columns as LoRA's shapes show.

    If adapted layers have columns of 4-bit codes, other columns of the same dtype are codes too.
    """
    entries = {entry.fqn: entry for entry in manifest.of_kind(*WEIGHT_KINDS)}
    bases = {fqn: entry for fqn, entry in entries.items() if fqn.endswith(_BASE)}
    if not bases:
        return {}
    parts = {(part.layer, part.role): entries[part.fqn] for part in find_parts(entries)}
    integers = {fqn: entry for fqn, entry in bases.items() if entry.dtype.family == "int"}
    columns = {}
    for fqn, entry in bases.items():
        layer = add_root(fqn).removesuffix(_BASE)
        down, up = (parts.get((layer, sides[0])) for sides in (IN, OUT))
        if down is None or up is None:
            continue
        numel = up.shape[0] * down.shape[-1]
        if _is_column(entry) and entry.numel == (numel + 1) // (2 * entry.dtype.itemsize):
            columns[fqn] = entry
    dtypes = {entry.dtype for entry in columns.values()}
    others = {f: e for f, e in entries.items() if e.dtype in dtypes and _is_column(e)}
    return {**integers, **others}


def _is_column(entry: Entry) -> bool:
    return len(entry.shape) == 2 and entry.shape[1] == 1 and entry.fqn.endswith(".weight")
