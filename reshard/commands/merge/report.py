"""The report of a merge, as text and as JSON, with all that was dropped, cast or changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from reshard import keys, units
from reshard.commands.balance import count_leaves, format_leaves
from reshard.commands.lines import LISTED, format_list, format_timing
from reshard.identity import Identity
from reshard.identity.counters import find_counter_conflicts
from reshard.manifest import WEIGHT_KINDS, Manifest, Skeleton
from reshard.plan.planner import Plan
from reshard.weights import Weights

SCHEMA = 1


@dataclass(slots=True)
class MergeReport:
    """The result of `merge`. Sizes in bytes; ``done`` is False for a dry run."""

    source: str
    format: str
    destination: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # those that were given
    done: bool = False
    verified: bool = False
    files: list[dict[str, Any]] = field(default_factory=list)  # name, bytes
    tensors: int = 0
    parameters: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # dtype -> tensors
    trained_in: str = ""
    identity: Identity | None = None  # evidence that the files belong to one save
    from_master: int = 0
    from_copy: int = 0
    buffers: int = 0
    kept_fp32: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)  # from another model
    dropped_aliases: dict[str, str] = field(default_factory=dict)
    written_aliases: dict[str, str] = field(default_factory=dict)
    stripped: list[tuple[str, str]] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    optimizer_tensors_left: int = 0
    leaves: dict[str, Any] = field(default_factory=dict)  # see `count_leaves`
    overflowed: dict[str, int] = field(default_factory=dict)
    flushed: dict[str, int] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_written: int = 0
    resumed_bytes: int = 0  # of those, written by an interrupted run
    peak_buffer_bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return one document with a stable schema."""
        return {"schema": SCHEMA, "command": "merge", **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        verb = "wrote" if self.done else "would write"
        total = sum(file["bytes"] for file in self.files)
        count = units.counted(len(self.files), "file")
        yield f"{verb} {self.destination}: {units.show_bytes(total)} in {count}"
        for file in self.files[:LISTED]:
            yield f"  {file['name']}  {units.show_bytes(file['bytes'])}"
        if len(self.files) > LISTED:
            yield f"  ... {len(self.files) - LISTED} more"
        yield (
            f"tensors     {self.tensors} ({units.show_count(self.parameters)} elements), "
            + ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
        )
        yield f"source      {self._describe_sources()}"
        yield from format_list("identity", [str(self.identity)] if self.identity else [])
        yield from self._list_changes()
        yield format_leaves(self.leaves)
        buffers = units.show_bytes(self.peak_buffer_bytes)
        yield f"read        {units.show_bytes(self.bytes_read)}; buffers {buffers}"
        if self.resumed_bytes:
            size = units.show_bytes(self.resumed_bytes)
            yield f"resumed     {size} of an interrupted run"
        if self.done:
            yield format_timing(self.bytes_written, self.seconds, verified=self.verified)

    def _describe_sources(self) -> str:
        parts = []
        if self.from_master:
            parts.append(f"{self.from_master} from fp32 masters")
        if self.from_copy:
            parts.append(f"{self.from_copy} stored as trained")
        if self.buffers:
            parts.append(f"{self.buffers} buffers")
        trained = f"; trained in {self.trained_in}" if self.trained_in else ""
        return ", ".join(parts) + trained

    def _list_changes(self) -> Iterator[str]:
        for alias, kept in self.dropped_aliases.items():
            yield f"tied        {alias} = {kept}: not written twice"
        for alias, kept in self.written_aliases.items():
            yield f"tied        {alias} = {kept}: written as a copy"
        yield from format_list("stripped", [f"{old} -> {new}" for old, new in self.stripped])
        yield from format_list("renamed", [f"{old} -> {new}" for old, new in self.renamed])
        yield from format_list("excluded", self.excluded)
        yield from format_list("kept fp32", self.kept_fp32)
        yield from format_list("filled", self.filled)
        if self.optimizer_tensors_left:
            count = units.counted(self.optimizer_tensors_left, "optimizer tensor")
            yield f"left out    {count} (merge writes weights)"
        yield from format_list(
            "overflowed", [f"{n}: {c} values" for n, c in self.overflowed.items()]
        )
        yield from format_list("to zero", [f"{n}: {c} values" for n, c in self.flushed.items()])
        for text in self.changes:
            yield f"changed     {text}"
        for text in self.warnings:
            yield f"warning     {text}"


def describe(
    manifest: Manifest, edited: keys.Edited, chosen: Weights, skeleton: Skeleton, plan: Plan
) -> MergeReport:
    """Return the report of a planned merge."""
    dtypes: dict[str, int] = {}
    for _, dtype in chosen.tensors:
        dtypes[dtype.name] = dtypes.get(dtype.name, 0) + 1
    optimizer = sum(1 for kind, _ in manifest.entries if kind not in WEIGHT_KINDS)
    return MergeReport(
        source=manifest.origin.path,
        format=manifest.origin.description,
        files=[{"name": file.name, "bytes": file.nbytes} for file in skeleton.files],
        tensors=len(chosen.tensors),
        parameters=sum(entry.numel for entry, _ in chosen.tensors),
        dtypes=dtypes,
        trained_in=manifest.origin.precision,
        from_master=chosen.from_master,
        from_copy=chosen.from_copy,
        buffers=chosen.buffers,
        kept_fp32=chosen.kept_fp32,
        dropped_aliases=chosen.dropped_aliases,
        written_aliases=chosen.written_aliases,
        stripped=edited.stripped,
        renamed=edited.renamed,
        excluded=edited.excluded,
        optimizer_tensors_left=optimizer,
        leaves=count_leaves(manifest),
        warnings=[
            *manifest.warnings,
            *find_counter_conflicts(manifest),
            *(f"{option}: matches no name" for option in edited.unmatched),
            *chosen.notes,
        ],
        bytes_read=plan.copied_bytes,
        bytes_written=skeleton.nbytes,
    )
