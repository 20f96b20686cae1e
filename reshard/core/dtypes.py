"""The dtype table: torch name, size, safetensors code, legacy storage class of torch.

Sources: torch 2.13 ``torch/storage.py`` (storage classes), safetensors 0.8
``safetensors/src/tensor.rs`` (codes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    import torch

Family = Literal["float", "float8", "float4", "int", "bool", "complex"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Args:
        name: torch's name, for example ``bfloat16``.
        family: only ``float`` is ever cast.
        safetensors: code in a safetensors header; empty if that format does not have the type.
        storage: class name in a ``torch.save`` stream; empty if torch has no such class.
        packed: numbers in one element, each of which safetensors counts in the last dim.
    """

    name: str
    itemsize: int
    family: Family
    safetensors: str
    storage: str = ""
    packed: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def can_train(self) -> bool:
        """Whether a tensor of this dtype can have a gradient."""
        return self.family in ("float", "float8", "float4", "complex")

    def to_torch(self) -> torch.dtype:
        """Return the dtype as an object of the installed torch.

        Raises:
            UnsupportedError: the installed torch does not have it.
        """
        import torch

        found: torch.dtype | None = getattr(torch, self.name, None)
        if found is None:  # torch 2.6 does not have float8_e8m0fnu
            raise UnsupportedError(
                f"dtype {self.name}",
                f"the installed torch {torch.__version__} does not have it",
                "install torch 2.7 or later",
            )
        return found


FLOAT64 = DType("float64", 8, "float", "F64", "DoubleStorage")
FLOAT32 = DType("float32", 4, "float", "F32", "FloatStorage")
FLOAT16 = DType("float16", 2, "float", "F16", "HalfStorage")
BFLOAT16 = DType("bfloat16", 2, "float", "BF16", "BFloat16Storage")
UINT8 = DType("uint8", 1, "int", "U8", "ByteStorage")
E4M3 = DType("float8_e4m3fn", 1, "float8", "F8_E4M3")
E5M2 = DType("float8_e5m2", 1, "float8", "F8_E5M2")
E8M0 = DType("float8_e8m0fnu", 1, "float8", "F8_E8M0")  # an exponent alone

ALL = (  # in the order in which safetensors stores tensors: widest first
    DType("uint64", 8, "int", "U64"),
    DType("int64", 8, "int", "I64", "LongStorage"),
    FLOAT64,
    DType("complex64", 8, "complex", "C64", "ComplexFloatStorage"),
    FLOAT32,
    DType("uint32", 4, "int", "U32"),
    DType("int32", 4, "int", "I32", "IntStorage"),
    BFLOAT16,
    FLOAT16,
    DType("uint16", 2, "int", "U16"),
    DType("int16", 2, "int", "I16", "ShortStorage"),
    DType("float8_e5m2fnuz", 1, "float8", "F8_E5M2FNUZ"),
    DType("float8_e4m3fnuz", 1, "float8", "F8_E4M3FNUZ"),
    E8M0,
    E4M3,
    E5M2,
    DType("int8", 1, "int", "I8", "CharStorage"),
    UINT8,
    DType("float4_e2m1fn_x2", 1, "float4", "F4", packed=2),
    DType("bool", 1, "bool", "BOOL", "BoolStorage"),
    DType("complex128", 16, "complex", "", "ComplexDoubleStorage"),
)

WIDEST = max(dtype.itemsize for dtype in ALL)
BY_NAME = {dtype.name: dtype for dtype in ALL}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in ALL if dtype.safetensors}
BY_STORAGE = {dtype.storage: dtype for dtype in ALL if dtype.storage}

_SHORT = {
    "fp32": FLOAT32,
    "float": FLOAT32,
    "fp16": FLOAT16,
    "half": FLOAT16,
    "bf16": BFLOAT16,
    "fp64": FLOAT64,
}


def parse_float(option: str, text: str | None) -> DType | None:
    """Return the dtype in which an option asks to write or compare values; None if it is not set.

    Raises:
        UsageError: the text is not a dtype, or reshard does not cast to it.
    """
    if text is None:
        return None
    dtype = parse(text)
    if dtype.family != "float":
        raise UsageError(f"{option} {text}", "must be bf16, fp16, fp32 or fp64")
    return dtype


def parse(text: str) -> DType:
    """Return the dtype for a text such as ``bf16``, ``bfloat16`` or ``torch.bfloat16``.

    >>> parse("bf16").name
    'bfloat16'

    Raises:
        UsageError: the name is not a dtype.
    """
    name = text.lower().removeprefix("torch.")
    dtype = _SHORT.get(name) or BY_NAME.get(name)
    if dtype is None:
        raise UsageError(
            f"dtype {text!r}", "is not a dtype", "use bf16, fp16, fp32 or a torch name"
        )
    return dtype


def round_to_bfloat16(bits: Any) -> Any:
    """Return the upper 16 bits of float32 numbers, rounded to nearest even.

    The result for a NaN can be infinite, or need 17 bits.

    Args:
        bits: the bits of a number as an int, or of several as a uint32 array of numpy.
    """
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
