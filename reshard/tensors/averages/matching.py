"""The tensors of several checkpoints matched by name, and what is written of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from reshard.core.box import Box, contiguous_cuts
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import BUFFER, PARAM, Entry
from reshard.errors import DifferentError, UnsupportedError, UsageError
from reshard.model.norm_buffers import find_norm_buffers
from reshard.system.files import SourceFiles
from reshard.tensors.averages.mean import compute_mean
from reshard.tensors.lazy import find_first_difference, read_block
from reshard.tensors.weights import Weights
from reshard.units import abridge, counted

_SAMPLED = 64  # elements of a weight that are compared to recognize a copy
_COMPARED = 32  # weights of each checkpoint that are compared


@dataclass(frozen=True, slots=True)
class Summand:
    """The weights of one checkpoint, under the names of the output.

    Args:
        path: the checkpoint, as the user named it.
        weights: its weights; aliases of tied weights are left out or copied already.
        weight: its factor in the sum; None: all count the same.
    """

    path: str
    weights: Weights
    weight: float | None

    @property
    def tensors(self) -> dict[str, tuple[Entry, DType]]:
        """The weights by name, each with the dtype to write."""
        return {entry.fqn: (entry, dtype) for entry, dtype in self.weights.tensors}


@dataclass(slots=True)
class Averaged:
    """The weights to write.

    Args:
        tensors: the weights, in the order of the last checkpoint, each with its dtype.
        means: the number of means among them.
        equal: tensors that are not averaged because all checkpoints have the same value.
        dropped_aliases: names of tied weights that only some checkpoints store -> kept name.
        notes: notes for the report.
    """

    tensors: list[tuple[Entry, DType]] = field(default_factory=list)
    means: int = 0
    equal: list[str] = field(default_factory=list)
    dropped_aliases: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def average(sources: Sequence[Summand], pool: SourceFiles) -> Averaged:
    """Return the means of the weights of several checkpoints.

    Args:
        sources: in the order of the sum.

    Raises:
        DifferentError: a weight is missing from a checkpoint or has another shape, or values that
            cannot be averaged differ.
        UsageError: the checkpoints would be written in different dtypes.
        UnsupportedError: a dtype cannot be averaged.
        ReshardError: a file cannot be read.
    """
    tables = [source.tensors for source in sources]
    result = Averaged()
    result.dropped_aliases = _drop_aliases(sources, tables, pool)
    _check_names(sources, tables)
    averager = _Averager(sources, pool, result)
    for fqn in tables[-1]:
        averager.add([table[fqn] for table in tables])
    averager.note_buffers()
    result.notes += _note_copies(sources, tables, pool)
    return result


def _drop_aliases(
    sources: Sequence[Summand], tables: Sequence[dict[str, tuple[Entry, DType]]], pool: SourceFiles
) -> dict[str, str]:
    """Return the removed names, with the names that are kept."""
    dropped = {a: kept for source in sources for a, kept in source.weights.dropped_aliases.items()}
    for alias, kept in dropped.items():
        for source, table in zip(sources, tables, strict=True):
            if alias not in table:
                continue
            stored, main = table.pop(alias)[0], table.get(kept, (None, None))[0]
            if main is None or find_first_difference(pool, stored, main) is not None:
                tying = next(s.path for s in sources if alias in s.weights.dropped_aliases)
                raise DifferentError(
                    source.path,
                    f"the values of {alias!r} differ from those of {kept!r}, but {tying} ties the"
                    " two weights",
                    "average checkpoints of one model, or pass --tied keep to write both names",
                )
    return dropped


def _check_names(
    sources: Sequence[Summand], tables: Sequence[dict[str, tuple[Entry, DType]]]
) -> None:
    last = tables[-1]
    for source, table in zip(sources, tables, strict=True):
        for here, there, lacking in (
            (source, sources[-1], [fqn for fqn in last if fqn not in table]),
            (sources[-1], source, [fqn for fqn in table if fqn not in last]),
        ):
            if lacking:
                raise DifferentError(
                    here.path,
                    f"does not have {counted(len(lacking), 'tensor')} of {there.path}:"
                    f" {abridge(lacking)}",
                    "average checkpoints of one model; --exclude REGEX leaves out tensors, --rename"
                    " adapts names",
                )
        for fqn, (entry, _) in table.items():
            if entry.shape != last[fqn][0].shape:
                raise DifferentError(
                    source.path,
                    f"{fqn!r} has shape {list(entry.shape)} here, but shape"
                    f" {list(last[fqn][0].shape)} in {sources[-1].path}",
                    "average checkpoints of one model",
                )


class _Averager:
    def __init__(self, sources: Sequence[Summand], pool: SourceFiles, result: Averaged) -> None:
        self._sources = sources
        self._pool = pool
        self._result = result
        self._where = [source.path for source in sources]
        given = [source.weight for source in sources]
        self._weights = [weight for weight in given if weight is not None] or None
        self._buffers: list[str] = []
        last = {fqn: entry for fqn, (entry, _) in sources[-1].tensors.items()}
        self._norms = find_norm_buffers(last)

    def add(self, found: Sequence[tuple[Entry, DType]]) -> None:
        """Add what is written of one tensor.

        Args:
            found: the tensor of each source, with the dtype that the source would be written in.

        Raises:
            DifferentError, UsageError, UnsupportedError: as in `average`.
        """
        # Some formats do not distinguish buffers; a buffer keeps its own dtype.
        is_buffer = any(entry.kind == BUFFER for entry, _ in found)
        dtype = self._choose_dtype(found, is_buffer=is_buffer)
        entries = [replace(entry, kind=BUFFER if is_buffer else PARAM) for entry, _ in found]
        if {entry.dtype.family for entry in entries} != {"float"}:
            self._result.tensors.append((self._take_equal(entries), dtype))
            return
        may_be_statistic = is_buffer or entries[-1].fqn in self._norms
        if may_be_statistic and self._find_other(entries) is not None:
            self._buffers.append(entries[-1].fqn)
        self._result.tensors.append((compute_mean(entries, self._weights, self._where), dtype))
        self._result.means += 1

    def note_buffers(self) -> None:
        if self._buffers:
            self._result.notes.append(
                f"buffers that differ were averaged: {abridge(self._buffers)}. If they are"
                " statistics of activations (BatchNorm), compute them again with the averaged"
                " weights"
            )

    def _choose_dtype(self, found: Sequence[tuple[Entry, DType]], *, is_buffer: bool) -> DType:
        # A checkpoint that knows a buffer as such decides.
        dtypes: dict[DType, str] = {}
        for source, (entry, dtype) in zip(self._sources, found, strict=True):
            if not is_buffer or entry.kind == BUFFER:
                dtypes.setdefault(dtype, source.path)
        if len(dtypes) == 1:
            return next(iter(dtypes))
        shown = " and ".join(f"{dtype} of {path}" for dtype, path in dtypes.items())
        raise UsageError(
            found[0][0].fqn,
            f"the checkpoints were trained or stored in different dtypes: {shown}",
            "choose the dtype to write: --dtype bf16 or fp32",
        )

    def _take_equal(self, entries: Sequence[Entry]) -> Entry:
        last = entries[-1]
        other = self._find_other(entries)
        if other is None:
            self._result.equal.append(last.fqn)
            return last
        if last.dtype.family == "int" and not last.shape and len({e.dtype for e in entries}) == 1:
            return self._take_largest(entries)
        if last.dtype.family in ("float8", "float4"):
            raise UnsupportedError(
                last.fqn,
                f"{last.dtype} codes differ between the checkpoints, and codes cannot be averaged",
                "pass --dtype bf16, which dequantises weights if a config.json states how, or leave"
                " them out with --exclude REGEX",
            )
        raise DifferentError(
            last.fqn,
            f"{last.dtype} values differ between {self._where[other]} and {self._where[-1]}, and"
            " only floating-point values can be averaged",
            "leave it out with --exclude REGEX if the model does not need it",
        )

    def _find_other(self, entries: Sequence[Entry]) -> int | None:
        last = entries[-1]
        unequal = (
            number
            for number, entry in enumerate(entries[:-1])
            if find_first_difference(self._pool, entry, last) is not None
        )
        return next(unequal, None)

    def _take_largest(self, entries: Sequence[Entry]) -> Entry:
        """Return the counter (``num_batches_tracked`` of BatchNorm) that has the largest value."""
        signed = not entries[0].dtype.name.startswith("uint")
        values = [
            int.from_bytes(read_block(self._pool, entry, Box((), ())), "little", signed=signed)
            for entry in entries
        ]
        self._result.notes.append(
            f"the counter {entries[-1].fqn} has the values {', '.join(map(str, sorted(values)))}:"
            f" the highest, {max(values)}, is written"
        )
        return entries[values.index(max(values))]


def _note_copies(
    sources: Sequence[Summand], tables: Sequence[dict[str, tuple[Entry, DType]]], pool: SourceFiles
) -> Iterator[str]:
    samples: dict[tuple[bytes, ...], str] = {}
    names = list(tables[-1])
    # A copy is noted, not proved: a few weights from all over the model suffice.
    names = names[:: max(len(names) // _COMPARED, 1)]
    for source, table in zip(sources, tables, strict=True):
        found = tuple(_sample(table[fqn][0], pool) for fqn in names)
        other = samples.setdefault(found, source.path)
        if other != source.path:
            yield (
                f"{other} and {source.path} have equal values in a sample of their weights: if one"
                " is a copy of the other, its weights count twice"
            )


def _sample(entry: Entry, pool: SourceFiles) -> bytes:
    if entry.dtype.family != "float" or not entry.numel:
        return b""
    box = next(contiguous_cuts(entry.shape, _SAMPLED))
    return bytes(read_block(pool, entry, box, FLOAT32))
