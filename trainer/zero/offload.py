"""Where a flat tensor lives between uses: on the device, in host memory, or on disk."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from trainer.errors import SettingsError


class Slot(Protocol):
    """Keeps one tensor."""

    def get(self) -> Tensor:
        """The tensor; changes to it count only after ``put``."""
        ...

    def piece(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop)."""
        ...

    def put(self, tensor: Tensor) -> None:
        """Keep this value."""
        ...

    @property
    def resident(self) -> int:
        """Bytes of memory while not in use."""
        ...


class InMemory:
    """On the device, or (offload to cpu) in host memory."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self._tensor = tensor.to(device, copy=True)

    def get(self) -> Tensor:
        """The kept tensor itself."""
        return self._tensor

    def piece(self, start: int, stop: int) -> Tensor:
        """A view."""
        return self._tensor[start:stop]

    def put(self, tensor: Tensor) -> None:
        """Nothing moves when it is the kept tensor."""
        if tensor is not self._tensor:
            self._tensor.copy_(tensor)

    @property
    def resident(self) -> int:
        """All of it."""
        return self._tensor.untyped_storage().nbytes()


class OnDisk:
    """A file without a name, gone with the process; memory is used only between get and put."""

    def __init__(self, tensor: Tensor, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._dtype = tensor.dtype
        self._numel = tensor.numel()
        self.put(tensor)

    def get(self) -> Tensor:
        """Read the file into a new CPU tensor."""
        return self.piece(0, self._numel)

    def piece(self, start: int, stop: int) -> Tensor:
        """Read these elements alone."""
        tensor = torch.empty(stop - start, dtype=self._dtype)
        self._file.seek(start * self._dtype.itemsize)
        view = _bytes_of(tensor)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise OSError(f"an offload file ends after {done} of {len(view)} bytes")
            done += count
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Write the file anew."""
        view = _bytes_of(tensor.detach().cpu().contiguous())
        self._file.seek(0)
        while view:
            view = view[self._file.write(view) :]

    @property
    def resident(self) -> int:
        """None of it."""
        return 0


def _bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's memory, writable."""
    return memoryview(cast("Any", tensor.view(torch.uint8).numpy()))


class Home:
    """Makes slots in the place that the settings name.

    Args:
        place: none (the device), cpu or nvme.
        directory: where nvme keeps its files; they have no names, so that nothing stays behind.

    Raises:
        SettingsError: the directory cannot be used.
    """

    def __init__(self, place: str, device: torch.device, directory: str | None) -> None:
        self._device = torch.device("cpu") if place == "cpu" else device
        self._directory: Path | None = None
        if place == "nvme":
            self._directory = Path(str(directory))
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self._directory).close()
            except OSError as error:
                raise SettingsError(f"nvme_path cannot be used: {error}", one_rank=True) from error

    def slot(self, tensor: Tensor) -> Slot:
        """Keep a copy of ``tensor``, 1-D."""
        if self._directory is None:
            return InMemory(tensor, self._device)
        return OnDisk(tensor, self._directory)
