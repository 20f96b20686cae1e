"""Make a tensor for every shape, stride and dtype that a checkpoint can contain.

All code that reads, plans, casts or writes tensors is tested with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from reshard.core.manifest import Entry

_BY_BITS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float32", "float64", "complex64")


def sample_tensors() -> dict[str, torch.Tensor]:
    """Return the tensors by name, with the same values on every call.

    ``tied.a`` and ``tied.b`` share a storage.
    """
    chance = torch.Generator().manual_seed(11)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=chance, dtype=dtype)

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=chance, dtype=torch.uint8)

    tied = normal(7, 3)
    tensors = {
        "scalar": torch.tensor(2.5),
        "scalar.int": torch.tensor(-3),
        "scalar.bool": torch.tensor(True),
        "empty": torch.empty(0),
        "empty.3d": torch.empty(3, 0, 2),
        "one": normal(1),
        "ones": normal(1, 5, 1, 3, 1),
        "prime": normal(13),
        "prime.2d": normal(11, 17),
        "odd.3d": normal(3, 5, 7),
        "wide.5d": normal(2, 3, 2, 5, 3),
        "strided": normal(400)[7:211:3],
        "strided.2d": normal(20, 30)[3:17:2, 1:29:5],
        "strided.shifted": normal(9, 8)[2:, 3:6],
        "transposed": normal(5, 9).t(),
        "permuted": normal(4, 3, 5).permute(2, 0, 1),
        "expanded": normal(1, 6).expand(4, 6),
        "expanded.row": normal(3, 1).expand(3, 5),
        "expanded.scalar": torch.tensor(1.25).expand(3, 4),
        "empty.tail": normal(4, 6)[4:, 6:],  # its first element would lie past its storage
        "tied.a": tied,
        "tied.b": tied,
        "tied.view": tied[2:5],
        "bool": bits(3, 11) > 127,
        'Größe.权重/\u2028"quoted\\': normal(2, 3),
    }
    for name in filter(partial(hasattr, torch), _BY_BITS):  # torch 2.6 has no float4
        dtype = getattr(torch, name)
        tensors[name] = bits(9, 2 * dtype.itemsize).view(dtype)
    for name in _INTEGERS:
        dtype = getattr(torch, name)
        tensors[name] = bits(5, 3, dtype.itemsize).view(dtype).reshape(5, 3)
    for name in _FLOATS:
        tensors[f"special.{name}"] = _special(getattr(torch, name))
        tensors[name] = normal(6, 5, dtype=getattr(torch, name))
    tensors["uint16.column"] = tensors["uint16"][:, 1]
    return tensors


def _special(dtype: torch.dtype) -> torch.Tensor:
    values = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3e38, -1.0]
    return torch.tensor(values, dtype=dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements in row-major order."""
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether shape, dtype and bits are equal; NaNs compare by their bits."""
    return a.shape == b.shape and a.dtype == b.dtype and raw(a) == raw(b)


def built(entry: Entry, files: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the float32 tensor that an entry's chunks make, read with torch's own strides.

    Args:
        files: the content of each file, as a 1-d tensor.
    """
    out = torch.full(entry.shape, float("nan"))
    for chunk in entry.chunks:
        strides = [s // 4 for s in chunk.byte_strides]
        block = torch.as_strided(
            files[chunk.file], chunk.box.shape, strides, chunk.byte_offset // 4
        )
        out[chunk.box.slices] = block
    return out
