"""Check that the reader of a written output finds what was planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

from reshard import formats
from reshard.commands.output import is_single_file
from reshard.commands.split.passes import SplitConversion
from reshard.core.chunks import Chunk
from reshard.core.dtypes import DType
from reshard.core.keys import remove_wrappers
from reshard.core.manifest import WEIGHT_KINDS, Entry, Manifest
from reshard.errors import DifferentError
from reshard.naming import Naming
from reshard.quantised import moments
from reshard.training.optimizers import RECOMPUTED
from reshard.training.state import WritableState


def check(split: SplitConversion, staging: Path) -> None:
    """Check that the reader of the output's format finds exactly what was planned.

    Of files that are alike, one is checked whole, and the others by the bytes that may differ.

    Raises:
        DifferentError: it finds a tensor at another location, or misses one.
    """
    skeleton, state, named, options = (
        split.layout.skeleton,
        split.state,
        split.naming,
        split.options,
    )
    if is_single_file(split.destination):
        staging /= split.destination.name
    # With its model, a checkpoint with published names is read as it is in memory.
    model = None if options.names == "hf" and not options.wrap else options.model
    above = staging.parent if staging.is_file() else staging
    alike = {f"{above}/{f.name}": f"{above}/{f.like}" for f in skeleton.files if f.like}
    seen = formats.read(
        staging,
        model=model,
        wrap=options.wrap,
        rules=options.rules,
        alike=alike,
        prove=not alike,
    )
    planned = _group_by_name(skeleton.entries, named)
    tied = {_bare(named, alias): _bare(named, kept) for alias, kept in state.manifest.tied.items()}
    stepless = {_bare(named, member.fqn) for member in state.members if not member.slots}
    for fqn, entries in _group_by_name(seen.entries.values(), named).items():
        # A layout may store slots for every parameter; those of one that was never updated are
        # zeros, which the plan does not list.
        if fqn in stepless:
            entries = [entry for entry in entries if entry.kind in WEIGHT_KINDS]  # noqa: PLW2901
        # Parameters may share the value of a slot that the next update computes again.
        entries = [e for e in entries if e.kind not in RECOMPUTED]  # noqa: PLW2901
        # Codes are in items of DCP that were copied as a whole.
        entries = [e for e in entries if not moments.is_decoded(e)]  # noqa: PLW2901
        expected = [*planned.get(fqn, ()), *planned.get(tied.get(fqn, fqn), ())]
        # One tensor at a time, because all chunks of a large run need much memory.
        read = {chunk.file for entry in entries for chunk in entry.chunks} if alike else None
        locations = {
            place for entry in expected for place in _iterate_locations(entry, f"{above}/", read)
        }
        for chunk in (chunk for entry in entries for chunk in entry.chunks if chunk.box.volume):
            if _locate(chunk) not in locations and not _is_padding(chunk, expected):
                raise DifferentError(
                    chunk.file,
                    f"contains {fqn!r} at byte {chunk.byte_offset}, but the plan puts it"
                    " elsewhere: the files of the output do not describe their content",
                )
    _check_all(seen, state, named)


def _group_by_name(entries: Iterable[Entry], named: Naming) -> dict[str, list[Entry]]:
    by_name = defaultdict(list)
    for entry in entries:
        by_name[_bare(named, entry.fqn)].append(entry)
    return by_name


def _bare(named: Naming, fqn: str) -> str:
    return remove_wrappers(named.name_in_table(fqn))  # keys of DCP may keep the source's wrappers


_Location = tuple[str, int, DType]


def _locate(chunk: Chunk) -> _Location:
    return chunk.file, chunk.byte_offset, chunk.dtype


def _iterate_locations(
    entry: Entry, staging: str, files: Container[str] | None
) -> Iterator[_Location]:
    if files is None:
        yield from ((staging + c.file, c.byte_offset, c.dtype) for c in entry.chunks)
        return
    for position, name in enumerate(entry.layout.file_table[1]):
        file = staging + name
        part = entry.layout.part(position) if file in files else None
        if part is not None:
            yield file, part[0], part[-1]


def _is_padding(chunk: Chunk, expected: Sequence[Entry]) -> bool:
    """Return whether a chunk begins behind its tensor: a rank's part that is all padding rows."""
    ends = (zip(chunk.box.origin, entry.shape, strict=False) for entry in expected)
    return any(at >= size for dims in ends for at, size in dims)


def _check_all(seen: Manifest, state: WritableState, named: Naming) -> None:
    names = {_bare(named, fqn) for fqn in (*(e.fqn for e in seen.entries.values()), *seen.tied)}
    slots = {(entry.kind, _bare(named, entry.fqn)) for entry in seen.entries.values()}
    for weight in state.weights:
        if _bare(named, weight.fqn) not in names:
            raise DifferentError(weight.fqn, "is missing when the output is read back")
    for member in state.members:
        for slot, entry in member.slots.items():
            is_kept = entry.numel and slot not in RECOMPUTED
            if is_kept and (slot, _bare(named, member.fqn)) not in slots:
                reason = f": {seen.unnamed.reason}" if seen.unnamed else ""
                raise DifferentError(
                    member.fqn, f"its {slot} is missing when the output is read back{reason}"
                )
