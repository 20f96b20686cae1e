"""Read blocks of tensors from the checkpoint's files into the target's memory, with casts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from reshard.core import dtypes
from reshard.core.box import Box, Index, contiguous_cuts, flat_span
from reshard.core.dtypes import DType
from reshard.core.manifest import BUFFER, Entry
from reshard.engine.move.fill import fill, group_into_batches
from reshard.engine.planning.copies import Copy, plan_block
from reshard.errors import DifferentError
from reshard.live.dcp.plain_items import identify_memory
from reshard.system.files import SourceFiles
from reshard.tensors.lazy import read_block, view_bytes
from reshard.units import counted

_STAGED_BYTES = 4 << 20  # read at a time if a target is on another device, or not contiguous
# The size of the targets that are filled at a time: a planner may create a tensor for each of them.
_BATCH_BYTES = 64 << 20


@dataclass(slots=True)
class BlockRead:
    """One block to read, and the item of the target that receives it."""

    item: ReadItem
    entry: Entry
    box: Box

    @property
    def place(self) -> tuple[str, int, int]:
        """A sort key that puts jobs in the approximate order of their bytes in the files."""
        first = self.entry.chunks[0]
        return first.file, first.byte_offset, flat_span(self.box, self.entry.shape)[0]

    @property
    def nbytes(self) -> int:
        """The bytes of the block in the source's dtype."""
        return self.box.volume * self.entry.dtype.itemsize


def refuse_other_shape(item: ReadItem, entry: Entry, targets: Mapping[str, Any]) -> None:
    """Refuse a target of another shape, which a planner may have accepted and fill in part.

    Raises:
        DifferentError: the shapes differ.
    """
    key = item.dest_index.fqn
    target = targets.get(key)
    if not isinstance(target, torch.Tensor):
        return
    shape = _find_whole_shape(target)
    if shape != entry.shape:
        raise DifferentError(
            key, f"has shape {entry.shape} in the checkpoint, but {shape} in the target"
        )


def _find_whole_shape(target: torch.Tensor) -> Index:
    # torch 2.15 also loads into a plain tensor that states its place in a whole one
    # (``distributed/checkpoint/protocol.py``).
    protocol = getattr(dcp, "CheckpointableTensor", None)
    if protocol is not None and isinstance(target, protocol):
        return tuple(target.global_shape)
    return tuple(target.size())


def refuse_different_aliases(
    pool: SourceFiles, jobs: Iterable[BlockRead], targets: Mapping[str, Any]
) -> None:
    """Refuse two values for one memory: names that the target ties, but the checkpoint does not.

    Raises:
        DifferentError: they differ.
    """
    firsts: dict[object, BlockRead] = {}
    for job in jobs:
        target = targets.get(job.item.dest_index.fqn)
        if not isinstance(target, torch.Tensor) or not job.box.volume:
            continue
        first = firsts.setdefault((identify_memory(target), job.box), job)
        if first.entry.key == job.entry.key:
            continue
        entries = first.entry, job.entry
        dtype = min((entry.dtype for entry in entries), key=lambda dtype: dtype.itemsize)
        for cut in contiguous_cuts(job.box.shape, _STAGED_BYTES // dtype.itemsize):
            a, b = (read_block(pool, entry, cut.shift(job.box.origin), dtype) for entry in entries)
            if a != b:
                raise DifferentError(
                    job.item.dest_index.fqn,
                    f"is one tensor with {first.item.dest_index.fqn} in the target, but the"
                    " checkpoint has different values for them",
                    "load into a model that does not tie them (tie_word_embeddings=False in a"
                    " config of transformers)",
                )


def read(pool: SourceFiles, jobs: Iterable[BlockRead], planner: LoadPlanner) -> None:
    """Fill the targets of all jobs, in the order of their bytes in the files.

    Raises:
        DifferentError: a dtype cannot be cast, or a finite value would become infinite.
    """
    ordered = sorted(jobs, key=lambda job: job.place)
    for batch in group_into_batches(ordered, lambda job: job.nbytes, _BATCH_BYTES):
        _read_batch(pool, batch, planner)


def _read_batch(pool: SourceFiles, batch: list[BlockRead], planner: LoadPlanner) -> None:
    copies: list[tuple[Copy, memoryview]] = []
    staged: list[tuple[BlockRead, torch.Tensor]] = []
    # Detached, because torch refuses to change a leaf that requires gradients in place.
    targets = [(job, planner.resolve_tensor(job.item).detach()) for job in batch]
    filled = set()
    overflowed: Counter[str] = Counter()
    for job, target in targets:
        dtype = _find_target_dtype(job, target)
        memory = (job.entry.key, job.box, identify_memory(target), target.dtype)
        if not job.box.volume or memory in filled:  # tied weights are one tensor
            continue
        filled.add(memory)
        if target.device.type == "cpu" and target.is_contiguous():
            view = view_bytes(target)
            copies += ((copy, view) for copy in plan_block(job.entry, job.box, dtype).copies)
        else:
            staged.append((job, target))
    copies.sort(key=lambda item: (item[0].file, item[0].byte_offset))
    for copy, view in copies:
        overflowed += fill(pool, [copy], view)
    for job, target in staged:
        overflowed += _fill_through_buffer(pool, job, target)
    _refuse_overflow(overflowed, targets)
    for job, target in targets:
        planner.commit_tensor(job.item, target)


def _refuse_overflow(
    overflowed: Mapping[str, int], targets: Iterable[tuple[BlockRead, torch.Tensor]]
) -> None:
    for job, target in targets:
        lost = overflowed.get(job.entry.fqn)
        if lost and _find_target_dtype(job, target) != job.entry.dtype:
            raise DifferentError(
                job.item.dest_index.fqn,
                f"{counted(lost, 'finite value')} of {job.entry.dtype} would become infinite in"
                f" {target.dtype}",
                "load into a wider dtype",
            )


def _find_target_dtype(job: BlockRead, target: torch.Tensor) -> DType:
    key = job.item.dest_index.fqn
    dtype = dtypes.BY_NAME.get(str(target.dtype).removeprefix("torch."))
    if tuple(target.shape) != job.box.shape:
        raise DifferentError(
            key, f"a block of {job.box.shape} would go into a tensor of {tuple(target.shape)}"
        )
    floats = dtype is not None and dtype.family == job.entry.dtype.family == "float"
    if dtype is None or (dtype != job.entry.dtype and (job.entry.kind == BUFFER or not floats)):
        raise DifferentError(
            key,
            f"is {job.entry.dtype} in the checkpoint but {target.dtype} in the target; only"
            " floating-point parameters and optimizer state are cast",
            f"create the target with dtype {job.entry.dtype}",
        )
    return dtype


def _fill_through_buffer(pool: SourceFiles, job: BlockRead, target: torch.Tensor) -> Counter[str]:
    dtype = _find_target_dtype(job, target)
    overflowed: Counter[str] = Counter()
    longest = _STAGED_BYTES // dtype.itemsize
    # One buffer for all cuts: the system clears the pages of each new one.
    buffer = torch.empty(min(longest, job.box.volume), dtype=target.dtype)
    view = view_bytes(buffer)
    for cut in contiguous_cuts(job.box.shape, longest):
        copies = plan_block(job.entry, cut.shift(job.box.origin), dtype).copies
        overflowed += fill(pool, copies, view[: cut.volume * dtype.itemsize])
        target[cut.slices].copy_(buffer[: cut.volume].reshape(cut.shape))
    return overflowed
