"""Lazy tensors: reads of any block of any tensor of a checkpoint, without the rest."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

from reshard.box import Box, Index, contiguous_cuts
from reshard.dtypes import DType
from reshard.errors import UsageError
from reshard.files import SourceFiles
from reshard.manifest import MASTER, WEIGHT_KINDS, Entry, Manifest
from reshard.move.fill import fill
from reshard.planning.copies import plan_block

if TYPE_CHECKING:
    import torch

_COMPARE_ELEMENTS = 1 << 20  # elements that are read at a time


def read_block(pool: SourceFiles, entry: Entry, box: Box, dtype: DType | None = None) -> bytearray:
    """Return the bytes of a box, row-major, in ``dtype`` (by default the stored one).

    Raises:
        ReshardError: a file cannot be read, or the dtype cannot be cast.
    """
    window = plan_block(entry, box, dtype or entry.dtype)
    buffer = bytearray(window.nbytes)
    fill(pool, window.copies, memoryview(buffer))
    return buffer


def first_difference(pool: SourceFiles, a: Entry, b: Entry) -> int | None:
    """Return the first flat element at which two tensors differ bitwise, or None.

    The tensors must have the same shape and dtype. Both are read block by block.

    Raises:
        ReshardError: a file cannot be read.
    """
    start = 0
    for box in contiguous_cuts(a.shape, _COMPARE_ELEMENTS):
        left, right = read_block(pool, a, box), read_block(pool, b, box)
        if left != right:
            at = next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
            return start + at // a.dtype.itemsize
        start += box.volume
    return None


def is_zero(pool: SourceFiles, entry: Entry) -> bool:
    """Return whether every bit of a tensor is zero; the tensor is read block by block.

    Raises:
        ReshardError: a file cannot be read.
    """
    blocks = (
        read_block(pool, entry, box) for box in contiguous_cuts(entry.shape, _COMPARE_ELEMENTS)
    )
    return not any(map(any, blocks))


class LazyTensor:
    """A tensor of a checkpoint that is read when it is indexed.

    ``tensor[...]`` reads the whole tensor, ``tensor[2:4, :, 0]`` only the bytes of that box.
    """

    def __init__(self, entry: Entry, pool: SourceFiles) -> None:
        self._entry = entry
        self._pool = pool

    @property
    def shape(self) -> Index:
        """The full, unsharded shape."""
        return self._entry.shape

    @property
    def dtype(self) -> str:
        """The name that torch has for the stored dtype."""
        return str(self._entry.dtype)

    def __repr__(self) -> str:
        return f"LazyTensor({self._entry.fqn!r}, shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the indexed block as a torch tensor on the CPU, in the stored dtype.

        The index may consist of ints, slices with any positive step, and ``...``. The tensor has
        its own memory.

        Raises:
            IndexError: the index is out of range or of another form.
            ReshardError: a file cannot be read.
        """
        import torch

        origin, shape, steps, dropped = _resolve(index, self.shape)
        box = Box(origin, shape)
        data = read_block(self._pool, self._entry, box) if box.volume else bytearray()
        dtype = getattr(torch, self.dtype)
        # torch.frombuffer refuses an empty buffer.
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        view = flat.reshape(shape)[tuple(slice(None, None, step) for step in steps)]
        keep = tuple(0 if dim in dropped else slice(None) for dim in range(len(shape)))
        return view[keep]


def _resolve(index: Any, shape: Index) -> tuple[Index, Index, Index, set[int]]:
    """Return origin, extent and step of each dim, and the dims that integer indices drop."""
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can have only one '...'")
    for at in dots:
        items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    items += [slice(None)] * (len(shape) - len(items))
    if len(items) != len(shape):
        raise IndexError(f"{len(items)} indices for a tensor of {len(shape)} dims")
    origin, extents, steps, dropped = [], [], [], set()
    for dim, (item, size) in enumerate(zip(items, shape, strict=True)):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 1:
                raise IndexError("steps must be positive")
        else:
            start, step = _position(item, size), 1
            stop = start + 1
            dropped.add(dim)
        origin.append(start)
        extents.append(max(stop - start, 0))
        steps.append(step)
    return tuple(origin), tuple(extents), tuple(steps), dropped


def _position(item: SupportsIndex, size: int) -> int:
    if isinstance(item, bool):  # numpy and torch take it as a mask, not as 0 or 1
        raise TypeError("a bool cannot be used as an index")
    position = operator.index(item)
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of range for a dim of {size}")
    return position % size


class Checkpoint(Mapping[str, LazyTensor]):
    """A mapping fqn -> lazy tensor over one checkpoint of any format.

    A weight is read from its fp32 master if the checkpoint has one. ``optimizer`` returns the
    optimizer's slots, ``manifest`` describes everything else. Aliases of tied weights are keys too.
    Use it as a context manager, or call `close`.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._pool = SourceFiles()
        self._weights = {entry.fqn: entry for entry in manifest.of_kind(*WEIGHT_KINDS[:2])}
        self._weights.update((entry.fqn, entry) for entry in manifest.of_kind(MASTER))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._pool.close()

    def __getitem__(self, fqn: str) -> LazyTensor:
        return LazyTensor(self._weights[self.manifest.tied.get(fqn, fqn)], self._pool)

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        yield from self.manifest.tied

    def __len__(self) -> int:
        return len(self._weights) + len(self.manifest.tied)

    def optimizer(self, slot: str) -> dict[str, LazyTensor]:
        """Return one optimizer slot by fqn, for example ``optimizer("exp_avg")``.

        Raises:
            UsageError: the checkpoint has no such slot.
        """
        tensors = {e.fqn: LazyTensor(e, self._pool) for e in self.manifest.of_kind(slot)}
        if not tensors or slot in WEIGHT_KINDS[:2]:
            slots = {e.kind for e in self.manifest.entries.values()} - set(WEIGHT_KINDS[:2])
            raise UsageError(
                slot, f"is not an optimizer slot of this checkpoint; it has {sorted(slots)}"
            )
        return tensors
