"""Find the weights of compressed-tensors (vLLM's llm-compressor) and of NVIDIA's Model Optimizer.

Both state schemes for groups of modules; the tensors of a weight tell which scheme it has:

    weight_packed int32                   integers of 4 or 8 bits, to which 8 or 128 was added; with
                                          weight_zero_point, integers to subtract from them
    weight_packed, or weight, uint8       e2m1; scales in e4m3 (NVFP4) or exponents of two (MXFP4)
    weight float8 or int8                 codes as they are

``weight_scale`` has one scale for the tensor, for each row, for each group of a row or for each
block. The scales of NVFP4 are divided by ``weight_global_scale`` (compressed-tensors) or multiplied
by ``weight_scale_2`` (Model Optimizer).

Source: compressed-tensors 0.20 (``compressors/*/base.py``, ``quantization/lifecycle``) and Model
Optimizer 0.47 (``torch/quantization/qtensor``, ``torch/export/unified_export_hf.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, prod
from typing import Any

from reshard.core.box import Index
from reshard.core.chunks import Chunk
from reshard.core.dtypes import BFLOAT16, BY_NAME, E4M3, E8M0, FLOAT16, FLOAT32, UINT8
from reshard.core.manifest import Entry, Manifest, Quantisation
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.quantised.grids import count_blocks, fit_grid
from reshard.quantised.scale_names import FLOAT8
from reshard.quantised.scaled import BITS, E2M1, INT4, INT8, Scaled
from reshard.quantised.weights import QuantisedPair
from reshard.system.files import SourceFiles
from reshard.units import abridge

_INT8, _INT32, _INT64 = BY_NAME["int8"], BY_NAME["int32"], BY_NAME["int64"]
_FLOATS = (FLOAT32, BFLOAT16, FLOAT16)
_SCALES = {  # dtype of the codes -> dtypes of their scales
    _INT32: _FLOATS,
    _INT8: _FLOATS,
    UINT8: (E4M3, UINT8, E8M0),
    **dict.fromkeys(FLOAT8, (*_FLOATS, UINT8, E8M0)),
}
# Columns of a block, by the dtype of its scale: NVFP4, and Microscaling Formats.
_GROUPS = {E4M3: 16, UINT8: 32, E8M0: 32}
_SQUARE = (128, 128)
_SHAPE, _DIVISOR, _FACTOR, _ZERO = "_shape", "_global_scale", "_scale_2", "_zero_point"
_READ = {_SHAPE: 64, _DIVISOR: 8, _FACTOR: 8, _ZERO: 1 << 16}  # end of a name -> maximum bytes
_PARTS = ("weight_packed", "weight_scale", *(f"weight{end}" for end in _READ))
# Ends of names -> why a model with such tensors is refused.
_REFUSED = {
    ".weight_g_idx": "whose groups are not in the order of the columns",
    ".pre_quant_scale": "whose inputs are scaled as well (AWQ)",
    ".bitmask": "which is stored sparsely",
}
_DAMAGED = "config.json is of another model, or the file is damaged: fetch both again"


def find_compressed(
    manifest: Manifest, entries: Mapping[str, Entry], stated: Quantisation
) -> Iterator[QuantisedPair]:
    """Yield the quantised weights.

    Raises:
        UnsupportedError: a weight is quantised by a scheme that is not known.
        IncompleteError: codes without scales, or scales without codes.
        CorruptError: shapes do not fit.
    """
    _refuse_others(stated, entries)
    numbers = _read_numbers(entries)
    schemes = _list_schemes(stated)
    blocks = _list_blocks(schemes)
    is_asymmetric = bool(schemes) and all(scheme.get("symmetric") is False for scheme in schemes)
    used = set()
    for name, codes in entries.items():
        fqn = name.removesuffix("_packed")
        if not fqn.endswith("weight") or not _is_code(codes):
            continue
        scales = entries.get(f"{fqn}_scale")
        if scales is None:
            raise IncompleteError(
                manifest.origin.path,
                f"{name!r} is {codes.dtype} but has no scales: {fqn}_scale is missing",
                "fetch all files of the model; its index lists them",
            )
        others = {end: entry for end in _READ if (entry := entries.get(fqn + end))}
        missing = _find_missing(codes, scales, others, is_asymmetric=is_asymmetric)
        if missing:
            raise IncompleteError(
                manifest.origin.path,
                f"{name!r} is {codes.dtype} with scales in {scales.dtype}, but"
                f" {' or '.join(fqn + end for end in missing)} is missing",
                "fetch all files of the model; its index lists them",
            )
        used |= {codes.fqn, scales.fqn, *(entry.fqn for entry in others.values())}
        yield _pair(codes, scales, others, numbers, blocks)
    left = [fqn for fqn, entry in entries.items() if fqn not in used and _is_left(entry)]
    if left:
        raise IncompleteError(
            manifest.origin.path,
            f"{abridge(left)}: belong to no quantised weight",
            "fetch all files of the model; these may belong to two models",
        )


def _is_code(entry: Entry) -> bool:
    return entry.dtype in _SCALES and (entry.dtype != _INT32 or entry.fqn.endswith("_packed"))


def _is_left(entry: Entry) -> bool:
    return entry.dtype.family == "float8" or entry.fqn.endswith(_PARTS)


def _refuse_others(stated: Quantisation, entries: Mapping[str, Entry]) -> None:
    transforms = stated.settings.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise UnsupportedError(
            stated.stated_in,
            "states that the weights were rotated (transform_config), which reshard cannot undo",
            "use the model that was quantised",
        )
    for end, why in _REFUSED.items():
        found = [fqn for fqn in entries if fqn.endswith(end)]
        if found:
            raise UnsupportedError(
                stated.stated_in,
                f"describes a model {why}, which reshard cannot dequantise: it has"
                f" {abridge(found)}",
                "dequantise it with the library that quantised it, or use the model that was"
                " quantised",
            )


def _find_missing(
    codes: Entry, scales: Entry, others: Mapping[str, Entry], *, is_asymmetric: bool
) -> tuple[str, ...]:
    needed: tuple[str, ...] = ()
    if codes.dtype == UINT8 and scales.dtype == E4M3:
        needed = _DIVISOR, _FACTOR
    elif codes.dtype == _INT32 and is_asymmetric:
        needed = (_ZERO,)
    return needed if others.keys().isdisjoint(needed) else ()


def _list_schemes(stated: Quantisation) -> list[Mapping[str, Any]]:
    groups = stated.settings.get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    weights = (scheme.get("weights") for scheme in schemes if isinstance(scheme, dict))
    return [weight for weight in weights if isinstance(weight, dict)]


def _list_blocks(schemes: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    found = []
    for scheme in schemes:
        sides = scheme.get("block_structure") or [1, scheme.get("group_size")]
        are_sizes = isinstance(sides, list) and all(type(n) is int and n > 0 for n in sides)
        if are_sizes and len(sides) == 2:
            found.append((sides[0], sides[1]))
    return found


def _read_numbers(entries: Mapping[str, Entry]) -> dict[str, bytes]:
    small = [
        (entry, end)
        for entry in entries.values()
        if entry.chunks
        and (end := next((e for e in _READ if entry.fqn.endswith(f"weight{e}")), ""))
    ]
    found = {}
    with SourceFiles() as pool:
        ranges = [
            (entry.chunks[0].file, entry.chunks[0].byte_offset, min(_get_nbytes(entry), _READ[end]))
            for entry, end in small
        ]
        pool.prefetch(ranges)
        for (entry, _), place in zip(small, ranges, strict=True):
            found[entry.fqn] = pool.read(*place)
    return found


def _get_nbytes(entry: Entry) -> int:
    return entry.numel * entry.dtype.itemsize


def _pair(
    codes: Entry,
    scales: Entry,
    others: Mapping[str, Entry],
    numbers: Mapping[str, bytes],
    stated: Sequence[tuple[int, int]],
) -> QuantisedPair:
    fqn = codes.fqn.removesuffix("_packed")
    if scales.dtype not in _SCALES[codes.dtype] or len(codes.shape) < 2:
        raise UnsupportedError(
            codes.where,
            f"{codes.fqn!r} is {codes.dtype} {codes.shape} with scales {scales.dtype}"
            f" {scales.shape}, a scheme that reshard does not know",
            "dequantise the model with the library that quantised it",
        )
    shape, code = _find_shape(codes, others.get(_SHAPE), numbers)
    rows, columns = shape[-2:]
    grid = _find_grid(scales, rows)
    block = _choose_block(scales, grid, (rows, columns), stated)
    geometry = fit_grid(fqn, shape, scales, grid, block)
    weight = Scaled(
        fqn,
        codes.chunks[0],
        scales.chunks[0],
        prod(shape[:-2]) * geometry.cuts,
        rows // geometry.cuts,
        columns,
        geometry.block,
        code,
        shared=geometry.shared,
        factor=_read_factor(others.get(_FACTOR), numbers),
        divisor=_read_factor(others.get(_DIVISOR), numbers),
        zeros=_find_zeros(others.get(_ZERO), numbers, code, shape, geometry.block),
    )
    return QuantisedPair(fqn, shape, codes, scales, weight, tuple(others.values()))


def _find_grid(scales: Entry, rows: int) -> Index:
    """Return the shape of the scales of a weight, with the blocks of a matrix in the last dims."""
    shape = scales.shape
    if shape == (rows,) and rows > 1:  # Model Optimizer, one scale for each row
        return rows, 1
    if _is_split(shape):
        return shape[0], shape[2]
    return shape


def _is_split(shape: Index) -> bool:
    """Return whether Model Optimizer has stored the scales of square blocks (``fp8_pb_wo``)."""
    return len(shape) == 4 and shape[1::2] == (1, 1)


def _choose_block(
    scales: Entry, grid: Index, size: tuple[int, int], stated: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    # The shapes alone do not tell the block: the last ones of a row or column may be smaller.
    # ``grid``: the shape of the scales, with the blocks of a matrix in the last two dims.
    if scales.numel == 1:
        return None
    if scales.dtype in _GROUPS:
        return 1, _GROUPS[scales.dtype]
    if _is_split(scales.shape):
        return _SQUARE
    # The first: one scale for each row.
    blocks = [(1, size[1]), *((min(high, size[0]), min(wide, size[1])) for high, wide in stated)]
    fitting = {block for block in blocks if count_blocks(size, block) == grid[-2:]}
    if len(fitting) == 1:
        return fitting.pop()
    raise UnsupportedError(
        scales.where,
        f"{scales.fqn!r} has shape {scales.shape} for a weight of {size[0]} x {size[1]}, which is"
        f" that of {'two schemes' if fitting else 'no scheme'} in the config: blocks of"
        f" {' or '.join(map(str, blocks))}",
        "dequantise the model with the library that quantised it",
    )


def _find_shape(
    codes: Entry, stated: Entry | None, numbers: Mapping[str, bytes]
) -> tuple[Index, str]:
    lead, last = codes.shape[:-1], codes.shape[-1]
    if codes.dtype == UINT8:
        return (*lead, 2 * last), E2M1
    if codes.dtype != _INT32:
        return codes.shape, codes.dtype.name
    dtypes, most = (_INT32, _INT64), _READ[_SHAPE] // _INT64.itemsize
    if stated is None or stated.dtype not in dtypes or stated.numel > most or not stated.chunks:
        raise IncompleteError(
            codes.where,
            f"{codes.fqn!r} has no weight_shape of integers beside it",
            "fetch all files of the model; its index lists them",
        )
    letter = "i" if stated.dtype == _INT32 else "q"
    shape = struct.unpack(f"<{stated.numel}{letter}", numbers[stated.fqn])
    for code, count in ((INT4, 8), (INT8, 4)):  # in a word of 32 bits
        if shape == (*lead, count * last):
            return shape, code
    raise UnsupportedError(
        codes.where,
        f"{codes.fqn!r} packs a weight of shape {shape} into words of shape {codes.shape}; reshard"
        " reads only integers of 4 and 8 bits that fill the words of each row",
        "dequantise the model with the library that quantised it",
    )


def _read_factor(entry: Entry | None, numbers: Mapping[str, bytes]) -> float:
    if entry is None:
        return 1.0
    if entry.dtype != FLOAT32 or entry.numel != 1 or not entry.chunks:
        raise UnsupportedError(
            entry.where,
            f"{entry.fqn!r} is {entry.dtype} {entry.shape}: reshard knows only one float32",
            "dequantise the model with the library that quantised it",
        )
    factor: float = struct.unpack("<f", numbers[entry.fqn])[0]
    if not isfinite(factor) or factor == 0:
        raise CorruptError(entry.where, f"{entry.fqn!r} is {factor}", _DAMAGED)
    return factor


def _find_zeros(
    entry: Entry | None, numbers: Mapping[str, bytes], code: str, shape: Index, block: Index
) -> Chunk | None:
    """Return where the zero points of a weight are; None if it has none, or if all are 0."""
    if entry is None or not entry.chunks:
        return None
    if code in BITS and block[0] == 1 and entry.dtype == _INT32:
        words, across = -(-shape[-2] * BITS[code] // 32), -(-shape[-1] // block[1])
        if entry.shape == (*shape[:-2], words, across):
            return entry.chunks[0]
    if _get_nbytes(entry) > _READ[_ZERO] or any(numbers[entry.fqn]):
        raise UnsupportedError(
            entry.where,
            f"{entry.fqn!r} has zero points in {entry.dtype} {entry.shape}, which reshard does not"
            " know for such weights",
            "dequantise the model with the library that quantised it",
        )
    return None
