"""A file of ``torch.save`` whose tensors are read one by one, when they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from reshard.live.safe_load import load_safely
from reshard.tensors.lazy import view_bytes


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """A tensor in a file.

    Attributes:
        byte_offset: where its first element is in the file.
    """

    file: IO[bytes]
    byte_offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Return the tensor."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.file.seek(self.byte_offset)
        buffer = view_bytes(tensor)
        filled = 0
        while count := self.file.readinto(buffer[filled:]):  # type: ignore[attr-defined]
            filled += count
        return tensor


def load_unread(file: IO[bytes], name: str) -> Any:
    """Return the object in a file, with an `UnreadTensor` for each tensor; scalars are read."""
    # torch leaves the records of a file unread in this mode, and notes where they are.
    with FakeTensorMode():
        loaded = load_safely(file, name)
    return _replace(loaded, file)


def _replace(value: Any, file: IO[bytes]) -> Any:
    if isinstance(value, FakeTensor):
        return _make_unread(value, file)
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _replace(each, file)
    elif isinstance(value, (list, tuple)):
        return type(value)([_replace(each, file) for each in value])
    return value


def _make_unread(tensor: FakeTensor, file: IO[bytes]) -> Any:
    # torch 2.6 ``torch/serialization.py``, ``load_tensor``.
    start: int = tensor.untyped_storage()._checkpoint_offset  # type: ignore[assignment]  # noqa: SLF001
    shift = tensor.storage_offset() * tensor.element_size()
    unread = UnreadTensor(file, int(start + shift), tuple(tensor.shape), tensor.dtype)
    return unread if tensor.dim() else unread.read()
