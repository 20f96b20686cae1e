"""The report of a split, as text and as JSON: what was kept, derived and dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from reshard import units
from reshard.commands.leaf_counts import describe_leaves
from reshard.commands.lines import DetailLine, format_list
from reshard.commands.output_report import OutputReport, describe_common, list_values
from reshard.commands.split.options import LayoutOptions
from reshard.commands.split.passes import SplitConversion
from reshard.core.manifest import MASTER, WEIGHT_KINDS, Manifest
from reshard.engine.planning.planner import Plan
from reshard.formats import engines, unread
from reshard.formats.base import Writer
from reshard.formats.request import Request
from reshard.options import options_of
from reshard.quantised import moments
from reshard.state_dict import torch_state_dict
from reshard.training import batch, copied_files, optimizers, trainer_run
from reshard.training.state import WritableState


@dataclass(kw_only=True, repr=False)
class SplitReport(OutputReport):
    """The result of `split`."""

    COMMAND: ClassVar[str] = "split"

    target: str
    ranks_before: int
    ranks: int
    zero_stage: int | None = None  # None: not DeepSpeed, or model-parallel
    weights: int = 0
    optimizer_tensors_in: int = 0
    optimizer_tensors_out: int = 0
    kept: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(
        default_factory=list
    )  # from the writer, and on values that are not read
    tied_names: int = 0  # beside the weights; not in the document, whose keys are frozen

    def to_dict(self) -> dict[str, Any]:
        """Return one document with a stable schema."""
        document = super().to_dict()
        del document["tied_names"]
        return document

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        yield self._format_written(self.bytes_written)
        yield f"from        {self.format}, {units.counted(self.ranks_before, 'rank')}"
        yield f"to          {self.target}, {units.counted(self.ranks, 'rank')}"
        yield from self._list_identity()
        tied = f" and {units.counted(self.tied_names, 'tied name')}" if self.tied_names else ""
        yield f"weights     {self.weights}{tied}"
        counts = f"{self.optimizer_tensors_in} tensors in, {self.optimizer_tensors_out} out"
        yield f"optimizer   {counts}"
        yield DetailLine("values", describe_leaves(self.leaves))
        for label, items in (
            ("kept", self.kept),
            ("derived", self.derived),
            ("dropped", self.dropped),
            ("note", self.notes),
            ("overflowed", list_values(self.overflowed)),
            ("warning", self.warnings),
        ):
            yield from format_list(label, items)
        yield from self._list_timing()


def _describe_load(writer: Writer, request: Request) -> str:
    if request.run is not None and request.keeps_layout and not request.weights_only:
        return trainer_run.describe_resume(request.world_size)
    return writer.describe_load(request)


def describe_split(split: SplitConversion, plan: Plan) -> SplitReport:
    """Return the part of a report that is known before the first byte moves."""
    state, request, layout = split.state, split.request, split.layout
    manifest, skeleton, notes, writer = state.manifest, layout.skeleton, split.notes, split.writer
    has_stage = writer.writes_zero(request) and request.parallel.is_one
    no_slots = (*WEIGHT_KINDS, copied_files.KIND, copied_files.ITEM, copied_files.TENSOR)
    own_kinds = {entry.kind for entry in writer.list_own_entries(request)}  # not an optimizer's
    out = {e.key for e in skeleton.entries if e.kind not in {*no_slots, *own_kinds}}
    before = {e.key for e in manifest.entries.values() if e.kind not in WEIGHT_KINDS}
    if any(entry.kind == copied_files.ITEM for entry in skeleton.entries):
        # Codes are copied as items under the keys of the source; other slots are entries.
        out |= {e.key for e in manifest.entries.values() if moments.is_decoded(e)}
    report = SplitReport(
        **describe_common(manifest, skeleton, plan, notes.warnings),
        target=" ".join(filter(None, (writer.name, writer.describe(request)))),
        zero_stage=request.zero_stage if has_stage else None,
        load_line=layout.load_line or _describe_load(writer, request),
        ranks_before=manifest.origin.world,
        ranks=request.world_size,
        weights=len(state.weights),
        tied_names=len(state.manifest.tied),
        optimizer_tensors_in=len(before) + split.slots_left_out,
        optimizer_tensors_out=len(out),
        derived=list(notes.derived),
        kept=list(notes.kept),
        dropped=list(notes.dropped),
        notes=list(layout.notes),
    )
    if _keeps_everything(split):
        ranks = units.counted(request.world_size, "rank")
        report.warnings.append(
            f"the output is for {ranks} like the source, in the same layout; --world-size N chooses"
            " another number of ranks, --to another layout"
        )
    copied = [e.fqn for e in skeleton.entries if e.kind == copied_files.KIND]
    if copied:
        report.kept.append(f"{', '.join(copied)}: copied byte for byte")
        report.warnings = unread.update_notes(report.warnings, manifest.unread_files, copied)
    if not layout.copied:
        written = [file.name for file in skeleton.files]
        report.notes += _list_unread(manifest, written)
        report.notes += copied_files.describe_lost_models(manifest.train.hook_files, written)
    _report_masters(manifest, request, report)
    _report_optimizer(state, request, report)
    report.dropped += _list_values_of_training(manifest, writer, request)
    if not request.weights_only:
        report.warnings += batch.describe_positions(manifest, request.world_size)
    report.warnings += engines.describe_defects(
        engines.LoadedForm(
            writer.name,
            [file.name for file in skeleton.files],
            bool(state.groups),
            split.live.fsdp,
            source=manifest.origin if state.has_stored_slots else None,
            zero_stage=request.zero_stage if writer.writes_zero(request) else None,
            precision=str(request.dtype or manifest.origin.precision),
        )
    )
    return report


def _report_masters(manifest: Manifest, request: Request, report: SplitReport) -> None:
    masters = {entry.fqn for entry in manifest.of_kind(MASTER)}
    rounded = masters & manifest.frozen if request.separate_masters else set()
    if masters - rounded:
        report.kept.append(f"{len(masters - rounded)} fp32 master weights")
    if rounded:
        report.dropped.append(
            f"fp32 master weights of {units.counted(len(rounded), 'parameter')} frozen from now on"
        )


def _report_optimizer(state: WritableState, request: Request, report: SplitReport) -> None:
    train = state.manifest.train
    is_new = bool(state.zero_slots) and not state.has_stored_slots
    if is_new:
        report.derived += _note_cast_masters(state, request)
    if state.groups and not is_new:
        shown = optimizers.name_slots(state.slots).values()
        names = ", ".join(shown) or "no optimizer tensors, as the optimizer has none"
        groups = units.counted(len(state.groups), "param group")
        is_counted = train.step is not None or train.optimizer_step
        step = f"step {state.step}" if is_counted else "no count of steps"
        report.kept.append(f"{names}; {step}; {groups}")
    elif report.optimizer_tensors_in:
        why = "--init-optimizer zeros" if state.groups else request.weights_option
        report.dropped.append(f"{report.optimizer_tensors_in} optimizer tensors ({why})")


def _list_values_of_training(manifest: Manifest, writer: Writer, request: Request) -> Iterator[str]:
    if request.weights_only:
        values = torch_state_dict.list_values(manifest.train)
        lost = [name for name in values if not writer.keeps_value(name, request)]
        if lost:
            yield f"{', '.join(lost)} ({request.weights_option})"


def _keeps_everything(split: SplitConversion) -> bool:
    declared = {option.name for option in options_of(LayoutOptions)} | {"to", "world_size"}
    same_ranks = split.request.world_size == split.manifest.origin.world
    return same_ranks and declared.isdisjoint(split.options.given())


def _list_unread(manifest: Manifest, written: Container[str]) -> Iterator[str]:
    """Values of the script are left out: each target reports those that it cannot store."""
    client = manifest.train.client
    by_kind: dict[str, list[str]] = {}
    for name, kind in manifest.unread.items():
        is_copied = f"{name}/config.json" in written  # as the model of a hook
        if not (is_copied or any(name == own or name.startswith(f"{own}.") for own in client)):
            by_kind.setdefault(kind, []).append(name)
    for kind, names in by_kind.items():
        yield f"not copied: {units.abridge(names)} ({kind})"


def _note_cast_masters(state: WritableState, request: Request) -> Iterator[str]:
    written = request.master_dtype
    narrow = Counter(
        member.weight.value.dtype.name
        for member in state.members
        if member.weight.value.dtype != written
    )
    for dtype, count in narrow.items():
        yield f"{count} {written} master weights are cast from {dtype}"
