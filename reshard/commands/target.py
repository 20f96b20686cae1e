"""A target held to proof, before a byte of it is written."""

from __future__ import annotations

from reshard.errors import DifferentError
from reshard.manifest import WEIGHT_KINDS, Entry, Manifest, Origin, Skeleton, SourceFile, check
from reshard.plan.extents import iterate_output_files


def check_skeleton(skeleton: Skeleton) -> None:
    """The target is held to the same proof as a source, for each dtype that a tensor gets."""
    files = {file.name: SourceFile(file.name, file.nbytes) for file in skeleton.files}
    entries = {(e.kind, f"{e.fqn} ({e.dtype}, {n})"): e for n, e in enumerate(skeleton.entries)}
    check(Manifest(Origin("target", ""), entries, files, ordered=False))


def check_places(skeleton: Skeleton) -> None:
    """Every chunk of a target lies inside its file, and no two on the same bytes.

    Raises:
        DifferentError: a target that would damage itself.
    """
    sizes = {file.name: file.nbytes for file in skeleton.files}
    for file, extents in iterate_output_files(skeleton):
        begin, end, last = 0, 0, None
        for extent in extents:
            entry = skeleton.entries[extent.entry]
            stop = extent.byte_offset + extent.nbytes
            if extent.byte_offset < 0 or stop > sizes[file]:
                raise DifferentError(file, f"{entry.fqn!r} would lie outside of it")
            if (
                last is not None
                and _is_shared(last, entry)
                and (begin, end)
                == (
                    extent.byte_offset,
                    stop,
                )
            ):
                continue
            if last is not None and extent.byte_offset < end:
                names = f"{last.fqn!r} and {entry.fqn!r}"
                raise DifferentError(file, f"{names} would lie on the same bytes")
            begin, end, last = extent.byte_offset, stop, entry


def _is_shared(one: Entry, other: Entry) -> bool:
    """Return whether two parameters may have one 0-d value of their flat tensor's optimizer."""
    return (
        one.kind == other.kind
        and not one.shape
        and not other.shape
        and one.kind not in WEIGHT_KINDS
    )
