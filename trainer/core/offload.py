"""Places to keep a flat tensor between uses: the device, host memory, and the disk."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from trainer.core.errors import SettingsError


class Slot(Protocol):
    """Keeps one tensor."""

    def get(self) -> Tensor:
        """Return the tensor; changes to it take effect with ``put``."""
        ...

    def get_range(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop)."""
        ...

    def put(self, tensor: Tensor) -> None:
        """Replace the kept value."""
        ...

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory between uses."""
        ...


class MemorySlot:
    """Keeps a tensor on the device or (offload to cpu) in host memory."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self._tensor = tensor.to(device, copy=True)

    def get(self) -> Tensor:
        """Return the kept tensor itself."""
        return self._tensor

    def get_range(self, start: int, stop: int) -> Tensor:
        """Return a view of elements [start, stop)."""
        return self._tensor[start:stop]

    def put(self, tensor: Tensor) -> None:
        """Copy the value, unless it is the kept tensor itself."""
        if tensor is not self._tensor:
            self._tensor.copy_(tensor)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self._tensor.untyped_storage().nbytes()


class DiskSlot:
    """Keeps a tensor in an unnamed file, which ends with the process; only `get` uses memory."""

    def __init__(self, tensor: Tensor, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._dtype = tensor.dtype
        self._numel = tensor.numel()
        self.put(tensor)

    def get(self) -> Tensor:
        """Read the file into a new CPU tensor."""
        return self.get_range(0, self._numel)

    def get_range(self, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) only."""
        tensor = torch.empty(stop - start, dtype=self._dtype)
        self._file.seek(start * self._dtype.itemsize)
        view = _bytes_of(tensor)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise OSError(f"an offload file ended after {done} of {len(view)} bytes")
            done += count
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Overwrite the file."""
        view = _bytes_of(tensor.detach().cpu().contiguous())
        self._file.seek(0)
        while view:
            view = view[self._file.write(view) :]

    @property
    def resident_bytes(self) -> int:
        """Zero: the tensor is on disk."""
        return 0


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the writable memory of a contiguous CPU tensor."""
    return memoryview(cast("Any", tensor.view(torch.uint8).numpy()))


class SlotFactory:
    """Makes slots on the device that the settings choose.

    Args:
        offload: none (the device itself), cpu or nvme.
        device: the device of the model.
        directory: where nvme keeps its files; they have no names, so that none is left behind.

    Raises:
        SettingsError: the directory cannot be used.
    """

    def __init__(self, offload: str, device: torch.device, directory: str | None) -> None:
        self._device = torch.device("cpu") if offload == "cpu" else device
        self._directory: Path | None = None
        if offload == "nvme":
            self._directory = Path(str(directory))
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self._directory).close()
            except OSError as error:
                raise SettingsError(
                    f"cannot write offload files to nvme_path {directory}: "
                    f"{error.strerror or error}",
                    "give a directory that this process can write to",
                    one_rank=True,
                ) from error

    def make_slot(self, tensor: Tensor) -> Slot:
        """Return a slot with a copy of ``tensor``, 1-D."""
        if self._directory is None:
            return MemorySlot(tensor, self._device)
        return DiskSlot(tensor, self._directory)
