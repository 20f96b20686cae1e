"""What one rank writes in a save: files and DCP directories, ready to write or to copy first.

A save in the background must not see what training changes meanwhile. `copy_to_host` copies each
storage once, so that views and tied parameters still share one and the files have the same bytes::

    collect   the state of the engine, by reference; collective
    copy      into host memory: the time that training waits
    write     torch.save or DCP, and fsync; in the background
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor

from trainer.checkpoint import files, fsdp_dcp
from trainer.core.fsdp_units import ignore_known_warnings
from trainer.core.ranks import Ranks


class Content(Protocol):
    """A part of a checkpoint that this rank writes. Every rank has the same number of parts."""

    def write(self, directory: Path, ranks: Ranks) -> None:
        """Write it into the directory of the checkpoint. Collective for some contents."""
        ...

    def copied(self, copy: Callable[[Any], Any]) -> Content:
        """Return the same content with another value."""
        ...


class Nothing:
    """A part that other ranks write."""

    def write(self, directory: Path, ranks: Ranks) -> None:
        """Do nothing, see Content."""

    def copied(self, copy: Callable[[Any], Any]) -> Nothing:
        """See Content."""
        del copy
        return self


@dataclass(frozen=True)
class TorchFile:
    """A file of ``torch.save``."""

    name: str
    value: Any
    pickle_module: Any = pickle

    def write(self, directory: Path, ranks: Ranks) -> None:
        """Write the file, see Content."""
        del ranks
        path = directory / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.save(self.value, path, pickle_module=self.pickle_module)

    def copied(self, copy: Callable[[Any], Any]) -> TorchFile:
        """See Content."""
        return replace(self, value=copy(self.value))


@dataclass(frozen=True)
class DcpDirectory:
    """A directory of torch.distributed.checkpoint, which all ranks write together."""

    name: str
    value: dict[str, Any]

    def write(self, directory: Path, ranks: Ranks) -> None:
        """Write this rank's shards, see Content. Collective."""
        fsdp_dcp.save(self.value, directory / self.name, ranks)

    def copied(self, copy: Callable[[Any], Any]) -> DcpDirectory:
        """See Content."""
        return replace(self, value=copy(self.value))


class HostCopies:
    """Copies of tensors in host memory.

    Attributes:
        nbytes: the bytes of all copies.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._storages: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}

    def copy(self, value: Any) -> Any:
        """Return nested containers with copies of their tensors; other objects as they are."""
        if isinstance(value, DTensor):
            local = self._copy_tensor(value.to_local())
            return DTensor(local, value._spec, requires_grad=False)  # noqa: SLF001 - as from_local
        if isinstance(value, ShardedTensor):
            return self._copy_sharded(value)
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if isinstance(value, dict):
            return self._copy_dict(value)
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(map(self.copy, value))
        return value

    def _copy_dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        """Copy a dictionary with its class and attributes (``state_dict`` has ``_metadata``)."""
        new = type(value)()
        new.update({key: self.copy(each) for key, each in value.items()})
        for name, attribute in getattr(value, "__dict__", {}).items():
            setattr(new, name, attribute)
        return new

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        storage = self._copy_storage(tensor.detach().untyped_storage())
        new = torch.empty(0, dtype=tensor.dtype)
        new.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        new.requires_grad_(tensor.requires_grad)
        vars(new).update(vars(tensor))  # FSDP 1 gives attributes, which torch.save writes
        return new

    def _copy_storage(self, storage: UntypedStorage) -> UntypedStorage:
        # The original is kept, too: its address may not be given to another storage meanwhile.
        key = storage._cdata  # noqa: SLF001 - identity of the storage, as torch.save takes it
        if key not in self._storages:
            new = storage.clone() if storage.device.type == "cpu" else storage.cpu()
            self._storages[key] = storage, new
            self.nbytes += storage.nbytes()
        return self._storages[key][1]

    def _copy_sharded(self, value: ShardedTensor) -> Any:
        shards = [Shard(self._copy_tensor(s.tensor), s.metadata) for s in value.local_shards()]
        new = ShardedTensor.__new__(
            ShardedTensor,
            value.sharding_spec(),
            *value.size(),
            dtype=value.dtype,
            layout=value.layout,
            pin_memory=False,
            requires_grad=value.requires_grad,
        )
        vars(new).update(vars(value))
        new._metadata = value.metadata()  # noqa: SLF001 - no public constructor has both
        new._local_shards = shards  # noqa: SLF001
        return new


def write_all(directory: Path, contents: Iterable[Content], ranks: Ranks) -> None:
    """Write the parts one after the other; each is collected when the one before is on the disk.

    Raises:
        TrainerError: on every rank; one of them could not write.
    """
    parts: Iterator[Content] = iter(contents)
    while (part := next(parts, None)) is not None:
        with ignore_known_warnings(), ranks.raise_on_all("write its part of the checkpoint"):
            part.write(directory, ranks)


def copy_to_host(contents: Iterable[Content]) -> tuple[list[Content], int]:
    """Return contents that training cannot change, and the bytes of host memory they take."""
    copies = HostCopies()
    with ignore_known_warnings():
        copied = [content.copied(copies.copy) for content in contents]
    return copied, copies.nbytes
