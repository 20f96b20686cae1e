"""The report of a split, as text and as JSON: what was kept, derived and dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from reshard import units
from reshard.commands.balance import count_leaves, format_leaves
from reshard.commands.lines import format_list, format_timing
from reshard.formats.base import Conversion
from reshard.formats.request import Request
from reshard.identity import Identity
from reshard.identity.counters import find_counter_conflicts
from reshard.manifest import MASTER, WEIGHT_KINDS, Manifest, Skeleton
from reshard.plan.planner import Plan
from reshard.training import copied_files
from reshard.training.state import WritableState

SCHEMA = 1


@dataclass(slots=True)
class SplitReport:
    """The result of `split`. Sizes in bytes; ``done`` is False for a dry run."""

    source: str
    format: str
    target: str
    ranks_before: int
    ranks: int
    zero_stage: int | None = None  # of a layout of DeepSpeed without model parallelism
    destination: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # those that were given
    done: bool = False
    verified: bool = False
    files: list[dict[str, Any]] = field(default_factory=list)  # name, bytes
    identity: Identity | None = None  # evidence that the files belong to one save
    weights: int = 0
    optimizer_tensors_in: int = 0
    optimizer_tensors_out: int = 0
    leaves: dict[str, Any] = field(default_factory=dict)  # see `count_leaves`
    kept: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(
        default_factory=list
    )  # of the target, and on values that were not read
    overflowed: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_written: int = 0
    resumed_bytes: int = 0  # of those, written by an interrupted run
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return one document with a stable schema."""
        return {"schema": SCHEMA, "command": "split", **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        verb = "wrote" if self.done else "would write"
        total = units.show_bytes(self.bytes_written)
        yield f"{verb} {self.destination}: {total} in {units.counted(len(self.files), 'file')}"
        yield f"from        {self.format}, {self.ranks_before} ranks"
        yield f"to          {self.target}, {self.ranks} ranks"
        yield from format_list("identity", [str(self.identity)] if self.identity else [])
        yield f"weights     {self.weights}"
        counts = f"{self.optimizer_tensors_in} tensors in, {self.optimizer_tensors_out} out"
        yield f"optimizer   {counts}"
        yield format_leaves(self.leaves)
        for label, items in (
            ("kept", self.kept),
            ("derived", self.derived),
            ("dropped", self.dropped),
            ("note", self.notes),
            ("overflowed", [f"{name}: {count} values" for name, count in self.overflowed.items()]),
            ("warning", self.warnings),
        ):
            yield from format_list(label, items)
        if self.resumed_bytes:
            size = units.show_bytes(self.resumed_bytes)
            yield f"resumed     {size} of an interrupted run"
        if self.done:
            yield format_timing(self.bytes_written, self.seconds, verified=self.verified)


def describe_split(
    conversion: Conversion, state: WritableState, skeleton: Skeleton, plan: Plan
) -> SplitReport:
    """Return the part of a report that is known before the first byte moves."""
    manifest, request = state.manifest, conversion.request
    notes, writer = conversion.notes, conversion.writer
    has_stage = request.separate_masters and request.parallel.is_one
    no_slots = (*WEIGHT_KINDS, copied_files.KIND, copied_files.TENSOR)
    out = {e.key for e in skeleton.entries if e.kind not in no_slots}
    before = {e.key for e in manifest.entries.values() if e.kind not in WEIGHT_KINDS}
    report = SplitReport(
        source=manifest.origin.path,
        format=manifest.origin.description,
        target=" ".join(filter(None, (writer.name, writer.describe(request)))),
        zero_stage=request.zero_stage if has_stage else None,
        ranks_before=manifest.origin.world,
        ranks=request.world_size,
        files=[{"name": file.name, "bytes": file.nbytes} for file in skeleton.files],
        weights=len(state.weights),
        optimizer_tensors_in=len(before),
        optimizer_tensors_out=len(out),
        leaves=count_leaves(manifest),
        derived=list(notes.derived),
        kept=list(notes.kept),
        dropped=list(notes.dropped),
        notes=list(_unread(manifest)),
        warnings=[*manifest.warnings, *find_counter_conflicts(manifest), *notes.warnings],
        bytes_read=plan.copied_bytes,
        bytes_written=skeleton.nbytes,
    )
    copied = [e.fqn for e in skeleton.entries if e.kind == copied_files.KIND]
    if copied:
        report.kept.append(f"{', '.join(copied)}: copied as they are")
    masters = sum(1 for _ in manifest.of_kind(MASTER))
    if masters:
        report.kept.append(f"{masters} fp32 master weights")
    if state.groups and not state.zero_slots:
        names = ", ".join(state.slots)
        groups = units.counted(len(state.groups), "param group")
        report.kept.append(f"{names}; step {state.step()}; {groups}")
    elif before:
        why = "--init-optimizer zeros" if state.groups else "--weights-only"
        report.dropped.append(f"{len(before)} optimizer tensors ({why})")
    if state.zero_slots:
        report.derived += _masters(state, request)
    return report


def _unread(manifest: Manifest) -> Iterator[str]:
    """Yield notes on values that no target writes, because reshard does not read them.

    Values of the script are left out here: each target reports those that it cannot store.
    """
    client = manifest.train.client
    by_kind: dict[str, list[str]] = {}
    for name, kind in manifest.unread.items():
        if not any(name == own or name.startswith(f"{own}.") for own in client):
            by_kind.setdefault(kind, []).append(name)
    for kind, names in by_kind.items():
        yield f"not carried: {units.some(names)} ({kind})"


def _masters(state: WritableState, request: Request) -> Iterator[str]:
    """Yield notes on the masters of a new optimizer that are cast from narrower weights."""
    written = request.master_dtype
    narrow = Counter(
        member.weight.value.dtype.name
        for group in state.groups
        for member in group.members
        if member.weight.value.dtype != written
    )
    for dtype, count in narrow.items():
        yield f"{count} {written} master weights are cast from {dtype}"
