"""Compare the memory of a running program with the checkpoint that it has loaded, by names.

A loader lays out files or state dicts, and the program's library finds the parameters in them by
position, by number or by name. The expected elements come from the entries of the source instead,
so that an error of either side is found, such as a state that went to another parameter.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reshard.checks.identity import Trust
from reshard.core import dtypes
from reshard.core.box import Box, Index, contiguous_cuts, flat_span, index_of
from reshard.core.dtypes import DType
from reshard.core.keys import remove_wrappers
from reshard.core.manifest import BUFFER, MASTER, PARAM, WEIGHT_KINDS, Entry, Key, SourceFile
from reshard.engine.move.fill import fill
from reshard.engine.planning.copies import CopyPlanner
from reshard.errors import DifferentError, ReshardError
from reshard.live.files import LiveFiles, is_first_rank, raise_on_all_ranks
from reshard.system.files import SourceFiles
from reshard.tensors.lazy import view_bytes
from reshard.training import optimizers
from reshard.units import abridge, counted

if TYPE_CHECKING:
    from torch import Tensor

_RUN = 16  # elements of a sample
_SEARCHED = 4096  # elements among which another sample is looked for if the first has only zeros
_BLOCK = 1 << 20  # elements that are compared at a time
_NAMED = 3  # names in a message
_REMEDY = (
    "do not train with what was loaded; `reshard split` writes files that the program loads without"
    ' reshard. Please report the error with the param groups of the optimizer. (trust="none" leaves'
    " this comparison out.)"
)
_INFINITE = "train in bf16 or fp32, or accept infinite values with on_overflow='allow'"
_NAMES = {PARAM: "weight", MASTER: "fp32 master"}  # of kinds, in messages
_logger = logging.getLogger("reshard")


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """A block of a parameter, of its master or of one of its slots in this rank's memory.

    Args:
        kind: PARAM, MASTER or the name of a slot.
        shape: the shape of the whole tensor.
        box: the block of the whole tensor.
        values: the elements of the block, flat or in the block's shape.
    """

    fqn: str
    kind: str
    shape: Index
    box: Box
    values: Tensor


@dataclass(frozen=True, slots=True)
class NotCompared:
    """A kind of value that this rank has, and the reason why it is not compared."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class WithoutState:
    """A parameter that the live optimizer trains, and that has no state on this rank."""

    fqn: str


Loaded = LoadedBlock | NotCompared | WithoutState


class Expected:
    """The entries of the source under the names of the live model.

    Args:
        entries: weights and slots, without those that are zero because the source has none.
        tied: alias -> the name that has the entries.
        may_overflow: whether a cast may make a finite value infinite.
    """

    def __init__(
        self, entries: Mapping[Key, Entry], tied: Mapping[str, str], *, may_overflow: bool = False
    ) -> None:
        self.entries = entries
        self.may_overflow = may_overflow
        self.kinds = frozenset(kind for kind, _ in entries)
        self._tied = tied
        self._fqns = {fqn for _, fqn in entries}
        self._canonical = {remove_wrappers(fqn): fqn for fqn in [*tied, *self._fqns]}

    def resolve(self, fqn: str) -> str | None:
        """Return the name under which the source has a live parameter; None if it has not."""
        known = fqn in self._fqns or fqn in self._tied
        own = fqn if known else self._canonical.get(remove_wrappers(fqn), fqn)
        own = self._tied.get(own, own)
        return own if own in self._fqns else None

    def find_slot(self, fqn: str) -> Entry | None:
        """Return a tensor of optimizer state of a live parameter, or None."""
        own = self.resolve(fqn)
        slots = self.kinds.difference(WEIGHT_KINDS)
        found = (self.entries.get((kind, own)) for kind in slots if own is not None)
        return next((entry for entry in found if entry is not None), None)

    def list_candidates(self, fqn: str, kind: str, dtype: DType) -> list[Entry]:
        """Return the entries of which a live tensor may be a cast.

        A weight of 16 bits is either the stored one or a cast of its master.
        """
        if kind not in (PARAM, MASTER):
            entry = self.entries.get((kind, fqn))
            return [] if entry is None else [entry]
        stored = self.entries.get((PARAM, fqn)) or self.entries.get((BUFFER, fqn))
        master = self.entries.get((MASTER, fqn))
        if stored is None or (master is not None and stored.dtype != dtype):
            return [] if master is None else [master]
        return [stored] if master is None else [master, stored]


def compare_files(blocks: Iterable[Loaded], live: LiveFiles) -> None:
    """Compare what every rank has loaded from live files; every rank must call it.

    Raises:
        DifferentError: on every rank, if an element differs on one of them.
    """
    planned, may_overflow = live.planned, live.on_overflow == "allow"
    expected = Expected(planned.entries, planned.tied, may_overflow=may_overflow)
    compare(blocks, expected, live.pool, live.trust)


def compare_read(
    blocks: Iterable[Loaded],
    read: Mapping[Key, Entry],
    sources: Mapping[str, SourceFile],
    trust: Trust = "sampled",
) -> None:
    """Compare what every rank has loaded with the entries that it has read, under live names.

    Args:
        sources: the source files by path. A file that changed after its header was read is refused.

    Raises:
        DifferentError: on every rank, if an element differs on one of them.
    """
    with SourceFiles(sources) as pool:
        compare(blocks, Expected(read, {}), pool, trust)


def compare(blocks: Iterable[Loaded], expected: Expected, pool: SourceFiles, trust: Trust) -> None:
    """Compare what every rank has loaded with the source; every rank must call it.

    Args:
        blocks: what this rank has.
        trust: ``sampled`` compares a sample of each block, ``full`` all elements, ``none`` nothing.

    Raises:
        DifferentError: on every rank, if an element differs on one of them.
    """
    error: ReshardError | None = None
    try:
        compare_on_rank(blocks, expected, pool, trust)
    except ReshardError as found:
        error = found
    raise_on_all_ranks(error)


def compare_on_rank(
    blocks: Iterable[Loaded], expected: Expected, pool: SourceFiles, trust: Trust
) -> None:
    """Compare what this rank has loaded, like `compare`, and say on rank 0 what was not compared.

    Raises:
        DifferentError: an element differs.
    """
    if trust == "none":
        return
    comparer = _Comparer(expected, pool, trust == "full")
    compared, left_out = 0, Counter[NotCompared]()
    for block in blocks:
        outcome = block if isinstance(block, NotCompared) else None
        if isinstance(block, LoadedBlock):
            outcome = comparer.compare(block)
            compared += outcome is None
        elif isinstance(block, WithoutState):
            comparer.refuse_lost(block)
        if outcome is not None:
            left_out[outcome] += 1
    if is_first_rank():
        _log(compared, left_out, trust)


def _log(compared: int, left_out: Mapping[NotCompared, int], trust: Trust) -> None:
    how = "all elements" if trust == "full" else "a sample"
    _logger.info("compared with the source: %s of %s in memory", how, counted(compared, "block"))
    for value, count in left_out.items():
        where = counted(count, "place")
        _logger.info("not compared: %s (%s): %s", value.kind, where, value.reason)


@dataclass(frozen=True, slots=True)
class _Elements:
    """Elements of a block from ``start`` on, in the flattened whole tensor."""

    start: int
    values: Tensor


def _cut_all(block: LoadedBlock) -> Iterator[_Elements]:
    values = block.values.detach().reshape(block.box.shape)
    is_flat = block.box.is_run(block.shape)
    # Only cuts that leave the last dim alone are runs of the whole tensor.
    limit = _BLOCK if is_flat else min(_BLOCK, block.box.shape[-1])
    for cut in contiguous_cuts(block.box.shape, limit):
        start = flat_span(cut.shift(block.box.origin), block.shape)[0]
        yield _Elements(start, values[cut.slices])


def _choose_samples(block: LoadedBlock) -> Iterator[_Elements]:
    values = block.values.detach()
    if values.is_contiguous():
        values = values.view(block.box.shape)
    middle = _take_run(block, values, block.box.volume // 2)
    yield middle
    if block.box.volume > _RUN and not bool(middle.values.count_nonzero()):
        # Rows of an embedding have zero moments if no batch had their tokens.
        step = -(-block.box.volume // _SEARCHED)
        searched = values.reshape(-1)[::step]
        yield _take_run(block, values, int(searched.ne(0).int().argmax()) * step)
    if values.dtype == torch.float16:  # which the program may have cast from the master
        infinite = values.reshape(-1).isinf()
        if bool(infinite.any()):
            yield _take_run(block, values, int(infinite.int().argmax()))


def _take_run(block: LoadedBlock, values: Tensor, at: int) -> _Elements:
    """``values`` are those of the block; ``at`` is the position in the flattened block."""
    if not block.box.shape:
        return _Elements(0, values)
    *row, column = index_of(at, block.box.shape)
    first = max(min(column, block.box.shape[-1] - _RUN), 0)
    place = tuple(a + b for a, b in zip((*row, first), block.box.origin, strict=True))
    start = flat_span(Box(place, (1,) * len(place)), block.shape)[0]
    return _Elements(start, values.reshape(block.box.shape)[tuple(row)][first : first + _RUN])


@dataclass(frozen=True, slots=True)
class _Comparer:
    expected: Expected
    pool: SourceFiles
    is_full: bool

    def compare(self, block: LoadedBlock) -> NotCompared | None:
        """Compare one block; return why not, if it has no counterpart.

        Raises:
            DifferentError: an element or the shape differs.
        """
        if not block.box.volume:
            return None
        fqn, kind = self.expected.resolve(block.fqn), block.kind
        if fqn is None:
            return NotCompared("parameters", "the source does not have them")
        dtype = dtypes.BY_NAME.get(str(block.values.dtype).removeprefix("torch."))
        if dtype is None:
            return NotCompared(kind, f"its dtype in memory is {block.values.dtype}")
        entries = self.expected.list_candidates(fqn, kind, dtype)
        if not entries:
            if kind not in optimizers.PER_ELEMENT or kind not in self.expected.kinds:
                return NotCompared(kind, "the source does not have it")
            # The optimizer has never updated this parameter.
            entries = [Entry(fqn, kind, dtype, block.shape, ())]
        if entries[0].shape != block.shape:
            raise DifferentError(
                f"{block.fqn!r}",
                f"has a {_NAMES.get(kind, kind)} of shape {block.shape} in memory after the load,"
                f" but of {entries[0].shape} in the checkpoint",
                _REMEDY,
            )
        stored = entries[0].dtype
        if any(e.dtype != dtype and {e.dtype.family, dtype.family} != {"float"} for e in entries):
            return NotCompared(kind, f"it is {stored} in the source, but {dtype} in memory")
        self._compare_runs(block, entries, dtype)
        return None

    def _compare_runs(self, block: LoadedBlock, entries: list[Entry], dtype: DType) -> None:
        planners = [CopyPlanner(entry) for entry in entries]
        for run in _cut_all(block) if self.is_full else _choose_samples(block):
            found = run.values.to("cpu").contiguous().reshape(-1)
            fitting = [p for p in planners if _equals(self._read(p, run, dtype), found)]
            if not fitting:
                raise self._build_error(block, run, found, self._read(planners[0], run, dtype))
            planners = fitting

    def _read(self, planner: CopyPlanner, run: _Elements, dtype: DType) -> Tensor:
        """Return a run of the source in another dtype; elements that nothing stores are zero."""
        numel = run.values.numel()
        buffer = torch.zeros(numel, dtype=dtype.to_torch())
        copies = planner.plan_run(run.start, run.start + numel, dtype, 0)
        fill(self.pool, copies, view_bytes(buffer), clamp=not self.expected.may_overflow)
        return buffer

    def _build_error(
        self, block: LoadedBlock, run: _Elements, found: Tensor, wanted: Tensor
    ) -> DifferentError:
        at = int((found.view(-1, 1) != wanted.view(-1, 1)).any(1).int().argmax())
        dtype = dtypes.BY_NAME[str(found.dtype).removeprefix("torch.")]
        kinds = (PARAM, MASTER) if block.kind in (PARAM, MASTER) else (block.kind,)
        owners = {
            repr(fqn)
            for (kind, fqn), entry in self.expected.entries.items()
            if kind in kinds
            and entry.shape == block.shape
            and entry.dtype.family == dtype.family
            and _equals(self._read(CopyPlanner(entry), run, dtype), found)
        }
        others = f"; {abridge(sorted(owners), _NAMED)} has these values" if owners else ""
        return DifferentError(
            f"{block.fqn!r}",
            f"has another {_NAMES.get(block.kind, block.kind)} in memory after the load than in the"
            f" checkpoint: element {run.start + at} is {found[at].item():g} for"
            f" {wanted[at].item():g}{others}",
            _INFINITE if found.dtype == torch.float16 and bool(found[at].isinf()) else _REMEDY,
        )

    def refuse_lost(self, parameter: WithoutState) -> None:
        """Refuse a parameter that has lost its state.

        Raises:
            DifferentError: the source has a state of it.
        """
        entry = self.expected.find_slot(parameter.fqn)
        if entry is not None and entry.numel:
            raise DifferentError(
                f"{parameter.fqn!r}",
                "has no optimizer state in memory after the load, but the checkpoint has its"
                f" {entry.kind}",
                _REMEDY,
            )


def _equals(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
