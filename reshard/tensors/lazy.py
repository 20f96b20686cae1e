"""Lazy tensors: reads of any block of any tensor of a checkpoint, without the rest."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

from reshard.core.box import Box, Index, contiguous_cuts
from reshard.core.dtypes import DType
from reshard.core.manifest import WEIGHT_KINDS, Entry, Manifest
from reshard.engine.move.fill import fill
from reshard.engine.planning.copies import plan_block
from reshard.errors import UsageError
from reshard.system.files import SourceFiles
from reshard.system.optional import needed_for
from reshard.training.optimizers import name_slots
from reshard.units import counted, show_count

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_COMPARE_ELEMENTS = 1 << 20  # elements that are read at a time
_ZERO_ELEMENTS = 1 << 14  # the first few elements of a trained matrix show that it is not zero


def read_block(pool: SourceFiles, entry: Entry, box: Box, dtype: DType | None = None) -> bytearray:
    """Return the bytes of a box, row-major, in ``dtype`` (by default the stored one).

    Raises:
        ReshardError: a file cannot be read, or the dtype cannot be cast.
    """
    dtype = dtype or entry.dtype
    buffer = bytearray(box.volume * dtype.itemsize)
    fill(pool, plan_block(entry, box, dtype).copies, memoryview(buffer))
    return buffer


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    import torch

    return tensor.view(-1).view(torch.uint8).numpy().data


def find_first_difference(pool: SourceFiles, a: Entry, b: Entry) -> int | None:
    """Return the first flat element at which two tensors differ bitwise, or None.

    It is 0 if the tensors have different shapes or dtypes. Both are read block by block.

    Raises:
        ReshardError: a file cannot be read.
    """
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return 0
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
    blocks = (read_block(pool, entry, box) for box in contiguous_cuts(entry.shape, _ZERO_ELEMENTS))
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

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self._entry.numel

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole tensor, in the stored dtype."""
        return self._entry.nbytes

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dims has no length")
        return self.shape[0]

    def torch(self) -> Tensor:
        """Return the whole tensor as a torch tensor on the CPU, in the stored dtype.

        Raises:
            ReshardError: a file cannot be read.
        """
        whole: Tensor = self[...]
        return whole

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the whole tensor as a numpy array, in the stored dtype.

        Raises:
            TypeError: numpy lacks the dtype (bfloat16, float8).
            ReshardError: a file cannot be read.
        """
        array: np.ndarray[Any, Any] = self[...].numpy()
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the tensor for ``numpy.asarray``; it is read anew each time."""
        if copy is False:
            raise ValueError("the tensor is read from files: an array without a copy is impossible")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Return a DLPack capsule of the tensor, on the CPU."""
        return self[...].__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number of the CPU."""
        return 1, 0

    def __repr__(self) -> str:
        return f"LazyTensor({self._entry.fqn!r}, shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, index: Any) -> Tensor:
        """Return the indexed block as a torch tensor on the CPU, in the stored dtype.

        The index may consist of ints, slices with any positive step, and ``...``. The tensor has
        its own memory.

        Raises:
            IndexError: the index is out of range, or has too many parts or a negative step.
            TypeError: a part of the index is neither an int nor a slice.
            ReshardError: a file cannot be read, or the installed torch does not have the dtype.
        """
        with needed_for("a tensor in memory"):
            import torch

        origin, shape, steps, dropped = _parse_index(index, self.shape)
        box = Box(origin, shape)
        # A bytearray would be filled with zeros first, which takes as long as reading.
        flat = torch.empty(box.volume, dtype=self._entry.dtype.to_torch())
        if box.volume:
            window = plan_block(self._entry, box, self._entry.dtype)
            fill(self._pool, window.copies, view_bytes(flat))
            self._pool.check_read({copy.file for copy in window.copies})
        # A box has no steps: elements between the steps are read and left out here.
        view = flat.reshape(shape)[tuple(slice(None, None, step) for step in steps)]
        keep = tuple(0 if dim in dropped else slice(None) for dim in range(len(shape)))
        return view[keep]


def _parse_index(index: Any, shape: Index) -> tuple[Index, Index, Index, set[int]]:
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
            start, step = _normalize_position(item, size), 1
            stop = start + 1
            dropped.add(dim)
        origin.append(start)
        extents.append(max(stop - start, 0))
        steps.append(step)
    return tuple(origin), tuple(extents), tuple(steps), dropped


def _normalize_position(item: SupportsIndex, size: int) -> int:
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
        self._pool = SourceFiles(manifest.files)
        self._weights = manifest.select_weights()
        # A save without frozen weights states ties of weights that it lacks.
        self._tied = {alias: of for alias, of in manifest.tied.items() if of in self._weights}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._pool.close()

    def __getitem__(self, fqn: str) -> LazyTensor:
        try:
            entry = self._weights[self._tied.get(fqn, fqn)]
        except KeyError:
            import difflib

            near = difflib.get_close_matches(str(fqn), list(self), n=3)
            hint = f"; near names: {', '.join(near)}" if near else ""
            raise KeyError(f"{fqn}{hint}") from None
        return LazyTensor(entry, self._pool)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._weights or fqn in self._tied

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        yield from self._tied

    def __len__(self) -> int:
        return len(self._weights) + len(self._tied)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return f"<Checkpoint {self._describe()}>"

    def _repr_html_(self) -> str:
        import html

        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in cells)}</tr>"
            for cells in ((fqn, self[fqn].dtype, list(self[fqn].shape)) for fqn in self)
        )
        title = html.escape(self._describe())
        return f"<table><caption>{title}</caption><tbody>{rows}</tbody></table>"

    def _describe(self) -> str:
        origin, step = self.manifest.origin, self.step
        at = "" if step is None else f", step {step}"
        numel = show_count(sum(entry.numel for entry in self._weights.values()))
        tied = f" and {counted(len(self._tied), 'tied name')}" if self._tied else ""
        weights = f"{counted(len(self._weights), 'weight')}{tied}, {numel} elements"
        return f"{origin.path}: {origin.description}{at}, {weights}"

    @property
    def format(self) -> str:
        """The name of the format, as for ``--from``."""
        return self.manifest.origin.format

    @property
    def step(self) -> int | None:
        """The training step; None if the files do not state it."""
        return self.manifest.train.step

    @property
    def world_size(self) -> int:
        """The number of ranks that saved; 1 if the files do not state it."""
        return self.manifest.origin.world

    def state_dict(self) -> dict[str, Tensor]:
        """Read all weights, as ``load_state_dict`` of a model takes them; tied names share memory.

        Raises:
            ReshardError: a file cannot be read.
        """
        tensors = {fqn: self[fqn][...] for fqn in self._weights}
        return tensors | {alias: tensors[fqn] for alias, fqn in self._tied.items()}

    def optimizer(self, slot: str) -> dict[str, LazyTensor]:
        """Return one optimizer slot by fqn, for example ``optimizer("exp_avg")``.

        Args:
            slot: its name in the files or in reports.

        Raises:
            UsageError: the checkpoint has no such slot.
        """
        slots = {e.kind for e in self.manifest.entries.values()} - set(WEIGHT_KINDS[:2])
        stored = {shown: kind for kind, shown in name_slots(slots).items()}
        kind = slot if slot in slots else stored.get(slot, slot)
        tensors = {e.fqn: LazyTensor(e, self._pool) for e in self.manifest.of_kind(kind)}
        if not tensors or slot in WEIGHT_KINDS[:2]:
            raise UsageError(
                slot, f"is not an optimizer slot of this checkpoint; available: {sorted(slots)}"
            )
        return tensors
