"""The values of weights and of optimizer state, where files store codes of them."""

from __future__ import annotations

from dataclasses import replace

from reshard.core.manifest import PARAM, Entry, Manifest, index_entries
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.base import S
from reshard.quantised import moments
from reshard.units import abridge, counted


def dequantise(manifest: Manifest) -> tuple[Manifest, list[str]]:
    """Return a model's manifest with dequantised weights in place of codes and scales, and notes.

    The weights are computed as they are read. A model that is not quantised is returned unchanged,
    and so is a training checkpoint: the program that saved quantised weights in it loads them in
    this form.
    """
    if not manifest.origin.weights_only:
        return manifest, []
    from reshard.quantised.pairs import find_pairs, list_unused_scales

    stated = manifest.quantisation
    if stated is None:
        _refuse_unstated(manifest)
        return manifest, []
    if stated.decoded:
        return manifest, []
    pairs = find_pairs(manifest, stated)
    unused = list_unused_scales(manifest) if pairs else []
    values = {
        pair.codes.fqn: Entry(pair.fqn, PARAM, stated.dtype, pair.shape, (pair.value_chunk,))
        for pair in pairs
    }
    removed = {entry.fqn for pair in pairs for entry in pair.stored[1:]} | set(unused)
    entries = [
        values.get(entry.fqn, entry)
        for entry in manifest.entries.values()
        if entry.fqn not in removed
    ]
    weights = counted(len(pairs), "weight")
    text = f"{weights} dequantised from {stated.method} ({stated.stated_in}) in float32"
    notes = [f"{text}, rounded once to the dtype that is written"]
    if unused:
        notes.append(f"scales of activations left out: {abridge(unused)}")
    return (
        replace(
            manifest,
            origin=replace(manifest.origin, precision=str(stated.dtype)),
            entries=index_entries(entries),
            trained_dtypes={entry.fqn: entry.dtype for entry in entries},
            quantisation=stated._replace(decoded=True),
        ),
        notes if pairs else [],
    )


def _refuse_unstated(manifest: Manifest) -> None:
    from reshard.quantised.pairs import find_evidence

    entry = find_evidence(manifest)
    if entry is not None:
        raise UnsupportedError(
            manifest.origin.path,
            f"{entry.fqn!r} ({entry.dtype}) is part of a quantised weight, but no config.json with"
            " a quantization_config states how to read it",
            "put the config.json of the model beside its weights",
        )


def refuse_rounded_scales(manifest: Manifest, dtype: str, method: str = "") -> None:
    """Refuse another dtype for a training checkpoint whose base is quantised, as that of QLoRA.

    Codes are never cast: rounded scales would not fit them.

    Args:
        method: the method of quantisation that config.json states; empty if it states none.

    Raises:
        UsageError: a part of a quantised weight is among the weights, or a method is stated.
    """
    from reshard.quantised.pairs import find_evidence

    if method:
        how = f"config.json states that the model is quantised ({method})"
    elif (entry := find_evidence(manifest)) is not None:
        how = f"{entry.fqn!r} ({entry.dtype}) is part of a quantised weight"
    else:
        return
    raise UsageError(
        f"--dtype {dtype}",
        f"{how}: scales would be rounded, but not the codes",
        "leave out --dtype: codes in a training checkpoint are not dequantised",
    )


def decode_moments(conversion: S) -> S:
    """Return the conversion with values for bitsandbytes' codes, for a target that cuts moments."""
    entries, count = moments.decode_entries(conversion.manifest.entries.values())
    if not count:
        return conversion
    conversion.notes.derived.append(
        f"{counted(count, 'slot')} of bitsandbytes' 8-bit optimizer in float32: it continues with"
        " them in 32 bits"
    )
    return conversion.with_manifest(conversion.manifest.with_entries(entries))
