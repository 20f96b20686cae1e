"""The report of a merge, as text and as JSON, with all that was dropped, cast or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from reshard import units
from reshard.commands.leaf_counts import describe_leaves
from reshard.commands.lines import LISTED, DetailLine, format_list
from reshard.commands.output_report import OutputReport, WriteResult, describe_common, list_values
from reshard.core.manifest import WEIGHT_KINDS, Manifest
from reshard.engine.planning.planner import Plan
from reshard.model import adapter_names
from reshard.training.companion_files import is_of_diffusers
from reshard.units import counted

if TYPE_CHECKING:
    from reshard.commands.merge.passes import Merge

_HEAD = "lm_head.weight"


@dataclass(kw_only=True, repr=False)
class MergeReport(OutputReport):
    """The result of `merge`."""

    COMMAND: ClassVar[str] = "merge"

    tensors: int = 0
    parameters: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # dtype -> tensors
    trained_in: str = ""
    from_master: int = 0
    from_copy: int = 0
    buffers: int = 0
    kept_fp32: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)  # from another model
    adapter: dict[str, Any] = field(default_factory=dict)  # see `passes.Addition`
    dropped_aliases: dict[str, str] = field(default_factory=dict)
    written_aliases: dict[str, str] = field(default_factory=dict)
    stripped: list[tuple[str, str]] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    optimizer_tensors_left: int = 0
    flushed: dict[str, int] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    peak_buffer_bytes: int = 0

    def add_result(self, written: WriteResult, *, verified: bool) -> None:
        """Add what is known once the output is complete."""
        super().add_result(written, verified=verified)
        self.flushed = dict(written.outcome.flushed)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        yield self._format_written(sum(file["bytes"] for file in self.files))
        for file in self.files[:LISTED]:
            yield f"  {file['name']}  {units.show_bytes(file['bytes'])}"
        if len(self.files) > LISTED:
            yield f"  ... {len(self.files) - LISTED} more"
        yield (
            f"tensors     {self.tensors} ({units.show_count(self.parameters)} elements), "
            + ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
        )
        yield f"source      {self._describe_sources()}"
        yield from self._list_identity()
        yield from self._describe_adapter()
        yield from self._list_changes()
        yield DetailLine("values", describe_leaves(self.leaves))
        buffers = units.show_bytes(self.peak_buffer_bytes)
        yield DetailLine("read", f"{units.show_bytes(self.bytes_read)}; buffers {buffers}")
        yield from self._list_timing()

    def _describe_sources(self) -> str:
        parts = []
        if self.from_master:
            parts.append(f"{counted(self.from_master, 'weight')} from fp32 master weights")
        if self.from_copy:
            parts.append(f"{counted(self.from_copy, 'weight')} as stored")
        if self.buffers:
            parts.append(counted(self.buffers, "buffer"))
        trained = f" (trained in {self.trained_in})" if self.trained_in else ""
        return ", ".join(parts) + trained

    def _describe_adapter(self) -> Iterator[str]:
        added = self.adapter
        if not added:
            return
        scales = ", ".join(f"{scale} for {count}" for scale, count in added["scales"].items())
        dora = f", {added['dora']} with DoRA" if added["dora"] else ""
        masters = " (from fp32 masters)" if added["from_masters"] else ""
        yield (
            f"adapter     {added['adapter']}{masters}: added to"
            f" {counted(added['merged'], 'weight')} (scale {scales or 'none'}{dora})"
        )
        revision = f", revision {added['revision']}" if added["revision"] else ""
        yield f"base        {added['base']}{revision}"
        yield from format_list("replaced", added["replaced"])
        for fqn, count in added["token_rows"].items():
            yield f"tokens      {counted(count, 'row')} of {fqn} from the adapter"

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
            count = counted(self.optimizer_tensors_left, "optimizer tensor")
            yield f"left out    {count} ({self.COMMAND} writes weights)"
        yield from format_list("overflowed", list_values(self.overflowed))
        yield from format_list("to zero", list_values(self.flushed))
        for text in self.changes:
            yield f"changed     {text}"
        for text in self.warnings:
            yield f"warning     {text}"


def describe_merge(manifest: Manifest, merge: Merge, plan: Plan) -> MergeReport:
    """Return the part of a report that is known before the first byte moves.

    Args:
        manifest: the source before its names were changed.
    """
    chosen, edited, notes = merge.weights, merge.edited, merge.notes
    return MergeReport(
        **describe_common(manifest, merge.skeleton, plan, notes.warnings),
        load_line=_describe_load(merge),
        tensors=len(chosen.tensors),
        parameters=sum(entry.numel for entry, _ in chosen.tensors),
        dtypes=dict(Counter(dtype.name for _, dtype in chosen.tensors)),
        trained_in=manifest.origin.precision,
        from_master=chosen.from_master,
        from_copy=chosen.from_copy,
        buffers=chosen.buffers,
        kept_fp32=chosen.kept_fp32,
        filled=merge.filled,
        adapter={**asdict(merge.addition), "merged": merge.addition.merged}
        if merge.addition
        else {},
        dropped_aliases=chosen.dropped_aliases,
        written_aliases=chosen.written_aliases,
        stripped=edited.stripped,
        renamed=edited.renamed,
        excluded=edited.excluded,
        optimizer_tensors_left=sum(kind not in WEIGHT_KINDS for kind, _ in manifest.entries),
        changes=notes.derived,
        peak_buffer_bytes=merge.options.count_buffer_bytes(
            plan.window_bytes, merge.computed_nbytes
        ),
    )


def _describe_load(merge: Merge) -> str:
    if not merge.is_directory:
        is_safetensors = merge.output.suffix == ".safetensors"
        return f'{"safetensors.torch.load_file" if is_safetensors else "torch.load"}("{{path}}")'
    if merge.adapter is not None:
        return 'peft.PeftModel.from_pretrained(base, "{path}")'
    if merge.companions.config is None or merge.has_config_of_other_model:
        return 'reshard.open("{path}").state_dict()'
    if adapter_names.find_parts(entry.fqn for entry, _ in merge.weights.tensors):
        return 'reshard.open("{path}").state_dict()'  # transformers has none of PEFT's names
    if is_of_diffusers(merge.companions.config):
        return f'diffusers.{merge.companions.config["_class_name"]}.from_pretrained("{{path}}")'
    return f'{_name_class(merge)}.from_pretrained("{{path}}")'


def _name_class(merge: Merge) -> str:
    config = merge.companions.config or {}
    classes = config.get("architectures")
    if isinstance(classes, list) and classes and isinstance(classes[0], str):
        return f"transformers.{classes[0]}"
    written = {entry.fqn for entry, _ in merge.weights.tensors}
    is_tied = config.get("tie_word_embeddings") is True  # a published model has no second copy
    has_head = is_tied or _HEAD in written or _HEAD in merge.weights.dropped_aliases
    return f"transformers.AutoModel{'ForCausalLM' if has_head else ''}"
