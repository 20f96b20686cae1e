"""The codes and scales of each quantised weight: found by their names, checked by their shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from reshard.core.dtypes import BFLOAT16, E8M0, FLOAT16, FLOAT32, UINT8
from reshard.core.manifest import PARAM, Entry, Manifest, Quantisation
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.quantised.compressed import find_compressed
from reshard.quantised.grids import fit_grid
from reshard.quantised.packed import find_packed
from reshard.quantised.scale_names import CODE_DTYPES, FLOAT8, PACKED, UNUSED, name_scales
from reshard.quantised.scaled import E2M1, Scaled
from reshard.quantised.weights import QuantisedPair

_EXPONENTS = (UINT8, E8M0)
_SCALES = (FLOAT32, BFLOAT16, FLOAT16, *_EXPONENTS)
_GROUP = 32  # values of an MXFP4 block; OCP Microscaling Formats 1.0


def find_pairs(manifest: Manifest, stated: Quantisation) -> list[QuantisedPair]:
    """Return the quantised weights of a model, in the order of their codes.

    Raises:
        UnsupportedError: the method is not known, or codes have an unknown dtype.
        IncompleteError: codes without scales, or scales without codes.
        CorruptError: the shapes of codes and scales do not fit.
    """
    find = METHODS.get(stated.method)
    if find is None:
        raise UnsupportedError(
            stated.stated_in,
            f"states that the model is quantised with {stated.method!r}, which reshard cannot"
            f" dequantise (it knows {', '.join(METHODS)})",
            "dequantise the model with the library that quantised it, or use the model that was"
            " quantised; reshard merge without --dtype copies codes and scales unchanged",
        )
    entries = {entry.fqn: entry for entry in manifest.of_kind(PARAM)}
    pairs = list(find(manifest, entries, stated))
    for pair in pairs:
        _check_stored(manifest, pair)
    return pairs


def list_unused_scales(manifest: Manifest) -> list[str]:
    """Return the names of scales that belong to activations, not to weights."""
    return [entry.fqn for entry in manifest.of_kind(PARAM) if entry.fqn.endswith(UNUSED)]


def _check_stored(manifest: Manifest, pair: QuantisedPair) -> None:
    """Check that codes and scales are stored as plain tensors without checksums of their own."""
    for entry in pair.stored:
        chunk = entry.chunks[0]
        plain = len(entry.chunks) == 1 and chunk.is_dense and chunk.factor == 1.0
        if not plain or manifest.files[chunk.file].has_checksums:
            raise UnsupportedError(
                chunk.file,
                f"{entry.fqn!r} is part of a quantised weight, but is not stored in safetensors",
                "write it as safetensors first: reshard merge SOURCE DIRECTORY",
            )


def _find_fp8(
    manifest: Manifest, entries: Mapping[str, Entry], stated: Quantisation
) -> Iterator[QuantisedPair]:
    """Yield float8 weights with scales (transformers 5.23 ``quantizer_finegrained_fp8.py``)."""
    used = set()
    for fqn, codes in entries.items():
        if fqn.endswith(UNUSED):
            continue
        scales = next((entries[name] for name in name_scales(fqn) if name in entries), None)
        packed = codes.dtype == PACKED and scales is not None and scales.dtype in _EXPONENTS
        if codes.dtype in FLOAT8 or packed:
            if scales is None:
                raise IncompleteError(
                    manifest.origin.path,
                    f"{fqn!r} is {codes.dtype} but has no scales: {fqn}_scale_inv is missing",
                    "fetch all files of the model; its index lists them",
                )
            used |= {fqn, scales.fqn}
            yield _pair_fp8(codes, scales, stated, packed=packed)
    left = next((e for e in entries.values() if e.fqn not in used and _is_left(e)), None)
    if left is not None:
        raise IncompleteError(
            left.chunks[0].file if left.chunks else manifest.origin.path,
            f"{left.fqn!r} ({left.dtype}) does not belong to any float8 weight",
            "fetch all files of the model; these may belong to two models",
        )


def _is_left(entry: Entry) -> bool:
    return entry.dtype.family == "float8" or entry.fqn.endswith(("_scale_inv", "weight_scale"))


def _pair_fp8(codes: Entry, scales: Entry, stated: Quantisation, *, packed: bool) -> QuantisedPair:
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if packed else codes.shape
    if len(shape) < 2:
        raise UnsupportedError(
            codes.chunks[0].file, f"{codes.fqn!r} is a float8 tensor of shape {shape}, not a matrix"
        )
    if scales.dtype not in _SCALES:
        raise UnsupportedError(
            scales.chunks[0].file,
            f"{scales.fqn!r} has dtype {scales.dtype}, which reshard does not support for scales",
        )
    matrices, (rows, columns) = prod(shape[:-2]), shape[-2:]
    geometry = fit_grid(
        codes.fqn, shape, scales, scales.shape, None if packed else _read_block(stated)
    )
    weight = Scaled(
        codes.fqn,
        codes.chunks[0],
        scales.chunks[0],
        matrices * geometry.cuts,
        rows // geometry.cuts,
        columns,
        geometry.block,
        E2M1 if packed else codes.dtype.name,
        shared=geometry.shared,
    )
    return QuantisedPair(codes.fqn, shape, codes, scales, weight)


def _read_block(stated: Quantisation) -> tuple[int, int] | None:
    """Return the size of a block; None: one scale for each tensor."""
    block = stated.settings.get("weight_block_size")
    if block is None:
        return None
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(n) is int and n > 0 for n in block)
    ):
        raise CorruptError(
            stated.stated_in, f"weight_block_size is {block!r}, expected two positive integers"
        )
    return block[0], block[1]


def _find_mxfp4(
    manifest: Manifest, entries: Mapping[str, Entry], _stated: Quantisation
) -> Iterator[QuantisedPair]:
    """Yield experts of GPT-OSS (transformers 5.23 ``integrations/mxfp4.py``)."""
    names = (fqn.removesuffix(end) for fqn in entries for end in _ENDS if fqn.endswith(end))
    for fqn in dict.fromkeys(names):
        codes, scales = (entries.get(fqn + end) for end in _ENDS)
        if codes is None or scales is None:
            missing, present = _ENDS if codes is None else _ENDS[::-1]
            raise IncompleteError(
                manifest.origin.path,
                f"{fqn + present!r} exists, but {fqn + missing!r} is missing",
                "fetch all files of the model; its index lists them",
            )
        yield _pair_mxfp4(fqn, codes, scales)


_ENDS = ("_blocks", "_scales")


def _pair_mxfp4(fqn: str, codes: Entry, scales: Entry) -> QuantisedPair:
    shape = codes.shape
    if (codes.dtype, scales.dtype) != (UINT8, UINT8):
        raise _explain_mxfp4(codes, scales)
    if len(shape) != 4 or shape[-1] * 2 != _GROUP or scales.shape != shape[:-1]:
        raise _explain_mxfp4(codes, scales)
    experts, rows, groups, _ = shape
    columns = groups * _GROUP
    weight = Scaled(
        fqn,
        codes.chunks[0],
        scales.chunks[0],
        experts,
        rows,
        columns,
        (1, _GROUP),
        E2M1,
        transposed=True,
    )
    return QuantisedPair(fqn, (experts, columns, rows), codes, scales, weight)


def _explain_mxfp4(codes: Entry, scales: Entry) -> CorruptError:
    return CorruptError(
        codes.where,
        f"{codes.fqn!r} is {codes.dtype} {codes.shape} with scales {scales.dtype} {scales.shape}:"
        f" expected uint8 [experts, rows, groups, {_GROUP // 2}] and uint8 [experts, rows, groups]",
        "config.json is of another model, or the file is damaged: fetch both again",
    )


METHODS = {  # quant_method -> the function that finds the weights
    "fp8": _find_fp8,
    "mxfp8": _find_fp8,
    "mxfp4": _find_mxfp4,
    "compressed-tensors": find_compressed,
    "modelopt": find_compressed,
}


def find_evidence(manifest: Manifest) -> Entry | None:
    """Return an entry that is part of a quantised weight, by names, dtypes and shapes, or None.

    A float8 tensor without scales is no evidence: its values are the weights.
    """
    entries = {entry.fqn: entry for entry in manifest.of_kind(PARAM)}
    named = (entry for entry in entries.values() if _is_evidence(entry, entries))
    return next(named, None) or next(iter(find_packed(manifest).values()), None)


def _is_evidence(entry: Entry, entries: Mapping[str, Entry]) -> bool:
    fqn = entry.fqn
    if entry.dtype in (*CODE_DTYPES, UINT8) and not entries.keys().isdisjoint(name_scales(fqn)):
        return True
    if entry.dtype == UINT8 and fqn.endswith(_ENDS[0]):
        return fqn.removesuffix(_ENDS[0]) + _ENDS[1] in entries
    return entry.dtype.family == "int" and fqn.endswith(_CODES)


# Names of codes: GPTQ and AWQ, compressed-tensors, and the maps of bitsandbytes.
_CODES = (
    *(".qweight", ".weight_packed", ".absmax", ".weight.quant_map", ".weight_format"),
    *(".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
)
