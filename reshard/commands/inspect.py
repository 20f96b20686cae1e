"""``inspect``: describe a checkpoint from its headers, without torch or numpy."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reshard import formats, units
from reshard.checks.identity import find_conflicts
from reshard.checks.identity.counters import find_counter_conflicts
from reshard.commands.leaf_counts import count_leaves, describe_leaves
from reshard.commands.lines import DetailLine, LabelledLine, Report, align, format_row
from reshard.commands.options import ReportOptions
from reshard.commands.page import check_page, write_page
from reshard.core.manifest import BUFFER, MASTER, PARAM, WEIGHT_KINDS, Entry, Manifest
from reshard.options import option
from reshard.training import optimizers
from reshard.training.completeness import find_impossible_settings, find_lost_state

if TYPE_CHECKING:
    from reshard.html.page import Page

SCHEMA = 1
_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)|^\d{1,9}(?=\.)")  # more digits are not a layer index
_SHOWN = 6
_WIDTH = 100  # characters of the train state in one row


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ReportOptions):
    """The options of ``inspect``."""

    tensors: bool = option(False, "List the tensors, with repeated layers folded.", group="Output")
    force: str | None = None  # another name of source_format

    def reader_arguments(self) -> dict[str, Any]:
        """Return the keywords of `formats.read`."""
        return super().reader_arguments() | {"force": self.source_format or self.force}


@dataclass(slots=True, repr=False)
class Inspection(Report):
    """The result of `inspect`."""

    manifest: Manifest
    with_tensors: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # those that differ from the defaults

    def to_dict(self) -> dict[str, Any]:
        """Return one document with a stable schema."""
        manifest, train = self.manifest, self.manifest.train
        document = {
            "schema": SCHEMA,
            "command": "inspect",
            "options": self.options,
            "path": manifest.origin.path,
            "format": manifest.origin.format,
            "detail": manifest.origin.detail,
            "versions": dict(manifest.origin.versions),
            "mesh": dict(manifest.origin.mesh),
            "precision": manifest.origin.precision,
            "quantisation": manifest.quantisation.method if manifest.quantisation else None,
            "step": train.step,
            "skipped_steps": train.skipped_steps,
            "samples": train.samples,
            "parameters": count_parameters(manifest),
            "kinds": _summarize_kinds(manifest),
            "files": len(manifest.files),
            "disk_bytes": sum(file.nbytes for file in manifest.files.values()),
            "logical_bytes": sum(entry.nbytes for entry in manifest.entries.values()),
            "tied": dict(manifest.tied),
            "frozen": self.frozen,
            "never_updated": self.never_updated,
            "absent": list(manifest.absent),
            "optimizer": manifest.has_optimizer,
            "unassigned_optimizers": list(manifest.unnamed_optimizers),
            "param_groups": [
                {"hyper": dict(group.hyper), "tensors": len(group.fqns)}
                for group in train.param_groups
            ],
            "scheduler": train.scheduler,
            "scaler": train.scaler,
            "client": dict(train.client),
            "config": train.config,
            "leaves": count_leaves(manifest),
            "complete": True,  # formats.read raises where a rank's file or an element is missing
            "warnings": self.warnings,
            "unknown_globals": list(manifest.unknown_globals),
        }
        if self.with_tensors:
            document["tensors"] = [
                {
                    "fqn": entry.fqn,
                    "kind": entry.kind,
                    "dtype": str(entry.dtype),
                    "shape": list(entry.shape),
                    "chunks": len(entry.chunks),
                }
                for entry in manifest.entries.values()
            ]
        return document

    @property
    def warnings(self) -> list[str]:
        """The warnings of the reader, contradictions, and state of the optimizer that was lost."""
        conflicts = (
            f"{conflict.file}: {conflict.problem}"
            for conflict in find_conflicts(self.manifest.files)
        )
        counters = find_counter_conflicts(self.manifest)
        lost = (f"the optimizer has {state}" for state in find_lost_state(self.manifest))
        odd = find_impossible_settings(self.manifest)
        return [*self.manifest.warnings, *conflicts, *counters, *lost, *odd]

    @property
    def frozen(self) -> list[str]:
        """The parameters that no optimizer lists, sorted."""
        return sorted(self.manifest.frozen - self.manifest.train.group_of.keys())

    @property
    def never_updated(self) -> list[str]:
        """The parameters that an optimizer lists, but has no state for, sorted.

        No file states whether they are frozen, or have only had no gradient so far.
        """
        return sorted(self.manifest.frozen & self.manifest.train.group_of.keys())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        yield self.manifest.origin.path
        yield from align(list(self._list_rows()))
        if self.with_tensors:
            yield ""
            yield from list_tensors(self.manifest)

    def _list_rows(self) -> Iterator[LabelledLine]:
        origin = self.manifest.origin
        versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
        described = filter(None, (origin.format, origin.detail, versions))
        yield format_row("format", ", ".join(described))
        yield from self._list_training()
        yield from self._list_sizes()
        yield from self._list_names()
        if self.manifest.absent:
            shown = units.abridge(self.manifest.absent, _SHOWN)
            yield format_row("warning", f"listed, but no rank stores a value: {shown}")
        for text in self.warnings:
            yield format_row("warning", text)
        if self.manifest.unknown_globals:
            yield format_row(
                "warning",
                "pickles name classes that no known framework writes: "
                + ", ".join(self.manifest.unknown_globals),
            )

    def _list_training(self) -> Iterator[LabelledLine]:
        origin, train = self.manifest.origin, self.manifest.train
        if train.step is not None:
            extra = f" ({train.skipped_steps} skipped)" if train.skipped_steps else ""
            yield format_row("step", f"{train.step}{extra}")
        mesh = ", ".join(f"{axis} {size}" for axis, size in origin.mesh.items())
        yield format_row("ranks", mesh or "1")
        yield format_row("precision", origin.precision or "unknown")
        stated = self.manifest.quantisation
        if stated is not None:
            text = (
                f"{stated.method}, as {stated.stated_in} states; the tensors are codes and scales"
            )
            yield format_row("quantised", text)
        for number, group in enumerate(train.param_groups):
            shown = ", ".join(
                f"{key} {group.hyper[key]}" for key in ("lr", "weight_decay") if key in group.hyper
            )
            tensors = units.counted(len(group.fqns), "tensor")
            yield format_row(f"group {number}", f"{tensors}; {shown}" if shown else tensors)
        for name, value in (("scheduler", train.scheduler), ("scaler", train.scaler)):
            for state in value if isinstance(value, list) else filter(None, [value]):
                pairs = state.items() if isinstance(state, dict) else [("", state)]
                texts = [str(v) if k in ("", "class") else f"{k} {v}" for k, v in pairs]
                yield format_row(name, _join_texts(texts))
        if train.client:
            yield format_row("client", _join_texts(train.client))

    def _list_sizes(self) -> Iterator[LabelledLine]:
        manifest = self.manifest
        count = count_parameters(manifest)
        weights = units.counted(sum(1 for _ in _iterate_parameters(manifest)), "tensor")
        names = set(self.frozen)
        frozen = sum(e.numel for e in _iterate_parameters(manifest) if e.fqn in names)
        shown = f"; {units.show_count(frozen)} of them frozen" if frozen else ""
        yield format_row("parameters", f"{units.show_count(count)} in {weights}{shown}")
        kinds = _summarize_kinds(manifest)
        shown_kinds = optimizers.name_slots(kinds)
        for kind, facts in kinds.items():
            tensors = units.counted(facts["tensors"], "tensor")
            text = f"{tensors}, {units.show_bytes(facts['bytes'])}"
            yield format_row(shown_kinds[kind], f"{text} ({', '.join(facts['dtypes'])})")
        disk = sum(file.nbytes for file in manifest.files.values())
        files = units.counted(len(manifest.files), "file")
        logical = sum(entry.nbytes for entry in manifest.entries.values())
        yield format_row(
            "on disk",
            f"{units.show_bytes(disk)} in {files}; tensors {units.show_bytes(logical)}",
        )
        yield format_row("optimizer", _describe_optimizer(manifest))
        yield DetailLine("values", describe_leaves(count_leaves(manifest)))
        what = (
            f"agree: {files} of all ranks, no gap and no overlap (elements of tensors are not read)"
        )
        yield format_row("headers", what)

    def _list_names(self) -> Iterator[LabelledLine]:
        for alias, kept in list(self.manifest.tied.items())[:_SHOWN]:
            yield format_row("tied", f"{alias} = {kept}")
        if self.frozen:
            yield format_row("frozen", units.abridge(self.frozen, _SHOWN))
        if self.never_updated:
            shown = units.abridge(self.never_updated, _SHOWN)
            yield format_row("not updated", f"{shown} (frozen, or without a gradient so far)")


def _describe_optimizer(manifest: Manifest) -> str:
    is_left_out = manifest.unnamed or manifest.train.non_tensor_state
    lost = manifest.unnamed_optimizers
    unassigned = f", but not assigned to parameters: {units.abridge(lost)}" if lost else ""
    if manifest.has_optimizer:
        return f"yes{unassigned}"
    if lost or is_left_out:
        return f"stored{unassigned or ', but left out'}"
    return "no"


def inspect(path: formats.Paths, options: InspectOptions | None = None) -> Inspection:
    """Describe a checkpoint from its headers.

    Raises:
        ReshardError: as in `formats.read`, or the page cannot be written.
    """
    options = options or InspectOptions()
    check_page(options, formats.as_paths(path))
    manifest = formats.read(path, **options.reader_arguments())
    inspection = Inspection(manifest, options.tensors, options.given())
    write_page(options, lambda: _build_page(inspection))
    return inspection


def _build_page(inspection: Inspection) -> Page:
    from reshard.html import pages

    return pages.build_inspect_page(inspection.to_dict(), inspection.manifest)


def _iterate_parameters(manifest: Manifest) -> Iterator[Entry]:
    seen: set[str] = set()
    for entry in manifest.of_kind(PARAM, MASTER):
        if entry.fqn not in seen:
            seen.add(entry.fqn)
            yield entry


def count_parameters(manifest: Manifest) -> int:
    """Return the number of parameter elements, without buffers and aliases."""
    return sum(entry.numel for entry in _iterate_parameters(manifest))


def _summarize_kinds(manifest: Manifest) -> dict[str, dict[str, Any]]:
    summary: dict[str, dict[str, Any]] = {}
    present = {entry.kind for entry in manifest.entries.values()}
    order = [kind for kind in (PARAM, BUFFER, MASTER) if kind in present]
    for kind in [*order, *sorted(present - set(WEIGHT_KINDS))]:
        entries = list(manifest.of_kind(kind))
        summary[kind] = {
            "tensors": len(entries),
            "bytes": sum(entry.nbytes for entry in entries),
            "dtypes": sorted({str(entry.dtype) for entry in entries}),
        }
    return summary


def list_tensors(manifest: Manifest) -> Iterator[str]:
    """Yield one line for each tensor; equal tensors of consecutive layers share a line."""
    by_fqn: dict[str, list[Entry]] = defaultdict(list)
    for entry in manifest.entries.values():
        by_fqn[entry.fqn].append(entry)
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for fqn, entries in by_fqn.items():
        slots = optimizers.name_slots(entry.kind for entry in entries)
        stored = ", ".join(f"{slots[entry.kind]} {entry.dtype}" for entry in entries)
        what = f"{list(entries[0].shape)}  {stored}"
        groups[_NUMBER.sub("*", fqn, count=1), what].append(fqn)
    width = min(max((len(name) for name, _ in groups), default=0) + 8, 72)
    for (name, what), fqns in groups.items():
        shown = fqns[0] if len(fqns) == 1 else name.replace("*", _format_numbers(fqns), 1)
        yield f"  {shown:<{width}} {what}"


def _join_texts(texts: Iterable[str]) -> str:
    """Join the texts that fit in a row; the end says how many do not.

    >>> _join_texts(["lr 0.1", "x" * 90, "step 4"])[-16:]
    'xxxx, ... 1 more'
    """
    every = list(texts)
    shown = list(every)
    while len(shown) > 1 and len(", ".join(shown)) > _WIDTH:
        shown.pop()
    text, left = ", ".join(shown), len(every) - len(shown)
    text = units.shorten(text, _WIDTH)
    return f"{text}, ... {left} more" if left else text


def _format_numbers(fqns: list[str]) -> str:
    numbers = sorted(int(match[0]) for fqn in fqns if (match := _NUMBER.search(fqn)))
    if len(set(numbers)) == len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers)) + "}"
