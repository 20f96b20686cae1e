"""Pages of `inspect` and of the commands that write.

A page is built from a ``document``, which is the ``to_json()`` of the command's report, and from
the manifests of the command. The ``facts`` of a checkpoint are the document of `inspect`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard import units
from reshard.core.chunks import Chunk
from reshard.core.manifest import MASTER, PARAM, Entry, Manifest, Skeleton
from reshard.html import shards
from reshard.html.page import Column, Facts, Findings, Maps, Page, PageTable
from reshard.system.paths import shorten_names

Document = Mapping[str, Any]

MOST_SHOWN = 200  # characters of a value
_MODULE_FILES = "_model_states.pt"  # DeepSpeed's files of module weights


def build_inspect_page(document: Document, manifest: Manifest) -> Page:
    """Build the page that describes a checkpoint."""
    warnings = list(document["warnings"])
    absent = [f"{fqn}: listed, but no rank stores a value" for fqn in document["absent"]]
    unknown = [f"pickles name {name}" for name in document["unknown_globals"]]
    return Page(
        "inspect",
        document["path"],
        f"headers agree: {units.counted(document['files'], 'file')} of all ranks",
        "good",
        facts=(
            build_checkpoint_panel("Checkpoint", document),
            _build_kinds_panel("Content", document),
            _build_training_panel(document),
        ),
        findings=(
            Findings("Warnings", [*warnings, *unknown], "bad"),
            Findings("Without a value", absent, "bad"),
            Findings("Tied", [f"{name} = {kept}" for name, kept in document["tied"].items()]),
            Findings("Frozen", document["frozen"]),
            Findings("Never updated", document["never_updated"]),
        ),
        sections=(
            Maps((shards.map_manifest("Shards", manifest),)),
            _build_tensor_table("Tensors", manifest.entries.values()),
            _build_files_table(manifest),
        ),
    )


def build_output_page(
    document: Document,
    facts: Document,
    manifest: Manifest,
    skeleton: Skeleton,
    *,
    has_masters: bool,
) -> Page:
    """Build the page of a merge, split or conversion: its source, and its output.

    Args:
        has_masters: whether the output has master weights beside the module's.
    """
    layout = _set_read_kinds(skeleton, has_masters=has_masters)
    verb = "wrote" if document["done"] else "would write (dry run)"
    size = units.show_bytes(document["bytes_written"])
    checked = "every byte read back" if document["verified"] else "not read back"
    ending = f"; {checked}" if document["done"] else ""
    return Page(
        document["command"],
        f"{document['source']} → {document['destination']}",
        f"{verb} {size} in {units.counted(len(document['files']), 'file')}{ending}",
        "good" if document["done"] else "plain",
        facts=(
            build_checkpoint_panel("Source", facts),
            _build_kinds_panel("Source content", facts),
            _build_target_panel(document, skeleton),
            build_command_panel(document),
        ),
        findings=_collect_findings(document),
        sections=(
            *_build_averaged_table(document.get("sources", ())),
            Maps((shards.map_manifest("Before", manifest), shards.map_skeleton("After", layout))),
            _build_tensor_table("Tensors written", layout.entries),
            PageTable(
                "Files written",
                (
                    Column("File", "name", [file["name"] for file in document["files"]]),
                    Column("Size", "bytes", [file["bytes"] for file in document["files"]]),
                ),
            ),
        ),
    )


def build_command_panel(document: Document) -> Facts:
    """Build the panel of the command: its options, and the line that loads its output."""
    places = [document[name] for name in ("source", "destination") if name in document]
    command = shlex.join(["reshard", document["command"], *places])
    options = document["options"].items()
    rows = [(name, str(value)) for name, value in options if name != "html"]
    load = [("load it", document["load_line"])] if document.get("load_line") else []
    return Facts("Command", [("command", command), *rows, *load])


def _build_averaged_table(sources: Sequence[Document]) -> Iterator[PageTable]:
    if sources:
        yield PageTable(
            "Averaged",
            (
                Column("Checkpoint", "name", [source["path"] for source in sources]),
                Column("Format", "text", [source["format"] for source in sources]),
                Column("Step", "number", [source["step"] for source in sources]),
                Column("Factor", "number", [source["weight"] for source in sources]),
            ),
            "The map shows the last of them.",
        )


def _set_read_kinds(skeleton: Skeleton, *, has_masters: bool) -> Skeleton:
    # An entry of a skeleton has the kind of the source entry that fills it. Module weights may thus
    # be called masters, masters may be called weights, and one entry may be both. Masters
    # are in optimizer files, or in a wider dtype than the module's copy.
    sizes: dict[str, set[int]] = {}
    for entry in skeleton.entries:
        if entry.kind in (PARAM, MASTER):
            sizes.setdefault(entry.fqn, set()).update(c.dtype.itemsize for c in entry.chunks)

    def is_master(fqn: str, chunk: Chunk) -> bool:
        wider = len(sizes[fqn]) > 1 and chunk.dtype.itemsize == max(sizes[fqn])
        return has_masters and (wider or not chunk.file.endswith(_MODULE_FILES))

    def split_by_kind(entry: Entry) -> Iterator[Entry]:
        if entry.kind not in (PARAM, MASTER) or not entry.chunks:
            yield entry
            return
        for kind in (PARAM, MASTER):
            chunks = [c for c in entry.chunks if is_master(entry.fqn, c) == (kind == MASTER)]
            if chunks:
                yield Entry(entry.fqn, kind, chunks[0].dtype, entry.shape, tuple(chunks))

    entries = tuple(part for entry in skeleton.entries for part in split_by_kind(entry))
    return replace(skeleton, entries=entries)


def build_checkpoint_panel(title: str, document: Document) -> Facts:
    """Build the panel of a checkpoint from the document of `inspect`."""
    versions = [f"{name} {version}" for name, version in document["versions"].items()]
    mesh = document["mesh"]
    ranks = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if axis != "world")
    world = str(mesh.get("world", 1))
    step = document["step"]
    skipped = f" ({document['skipped_steps']} skipped)" if document["skipped_steps"] else ""
    files = units.counted(document["files"], "file")
    rows = (
        ("Path", document["path"]),
        ("Format", ", ".join(filter(None, (document["format"], document["detail"])))),
        ("Versions", ", ".join(versions)),
        ("Ranks", f"{world} ({ranks})" if ranks and ranks != f"dp {world}" else world),
        ("Step", "" if step is None else f"{step}{skipped}"),
        ("Precision", document["precision"]),
        ("Parameters", units.show_count(document["parameters"])),
        ("On disk", f"{units.show_bytes(document['disk_bytes'])} in {files}"),
    )
    return Facts(title, tuple(row for row in rows if row[1]))


def _build_tensor_table(title: str, entries: Iterable[Entry]) -> PageTable:
    rows = list(entries)
    return PageTable(
        title,
        (
            Column("Name", "name", [entry.fqn for entry in rows]),
            Column("Kind", "text", [entry.kind for entry in rows]),
            Column("Dtype", "text", [str(entry.dtype) for entry in rows]),
            Column("Shape", "name", [str(list(entry.shape)) for entry in rows]),
            Column("Elements", "number", [entry.numel for entry in rows]),
            Column("Size", "bytes", [entry.nbytes for entry in rows]),
            Column("Pieces", "number", [len(entry.chunks) for entry in rows]),
        ),
    )


def _build_kinds_panel(title: str, document: Document) -> Facts:
    rows = []
    for kind, info in document["kinds"].items():
        size, dtypes = units.show_bytes(info["bytes"]), ", ".join(info["dtypes"])
        rows.append((kind, f"{units.counted(info['tensors'], 'tensor')}, {size}, {dtypes}"))
    return Facts(title, rows)


def _build_training_panel(document: Document) -> Facts:
    rows = []
    for number, group in enumerate(document["param_groups"]):
        hyper = group["hyper"]
        shown = [f"{key} {hyper[key]}" for key in ("lr", "weight_decay") if key in hyper]
        parts = [units.counted(group["tensors"], "tensor"), *shown]
        rows.append((f"Group {number}", "; ".join(parts)))
    values = {name: document[name] for name in ("scheduler", "scaler", "samples")}
    values["client"] = ", ".join(map(str, document["client"]))
    rows += [(name.capitalize(), _show_state(value)) for name, value in values.items() if value]
    return Facts("Training", rows or [("Optimizer", "none")])


def _show_state(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = [str(v) if k == "class" else f"{k} {_show_state(v)}" for k, v in value.items()]
        return units.shorten(", ".join(pairs), MOST_SHOWN)
    return units.shorten(value, MOST_SHOWN)


def _build_files_table(manifest: Manifest) -> PageTable:
    tensor_bytes: dict[str, int] = {}
    for entry in manifest.entries.values():
        for chunk in entry.chunks:
            nbytes = chunk.box.volume * chunk.dtype.itemsize
            tensor_bytes[chunk.file] = tensor_bytes.get(chunk.file, 0) + nbytes
    return PageTable(
        "Files",
        (
            Column("File", "name", list(shorten_names(manifest.files).values())),
            Column("Size", "bytes", [file.nbytes for file in manifest.files.values()]),
            Column("In tensors", "bytes", [tensor_bytes.get(path, 0) for path in manifest.files]),
        ),
    )


def _build_target_panel(document: Document, skeleton: Skeleton) -> Facts:
    size = units.show_bytes(document["bytes_written"])
    optimizer = ""
    if "optimizer_tensors_out" in document:
        inside, outside = document["optimizer_tensors_in"], document["optimizer_tensors_out"]
        optimizer = f"{inside} tensors in, {outside} out"
    rows = (
        ("Path", document["destination"]),
        ("Format", document.get("target", "weights")),
        ("Ranks", str(document.get("ranks", ""))),
        ("Tensors", str(len(skeleton.entries))),
        ("Optimizer", optimizer),
        ("On disk", f"{size} in {units.counted(len(document['files']), 'file')}"),
        ("Read", units.show_bytes(document["bytes_read"])),
        ("Time", f"{document['seconds']:.2f} s" if document["done"] else ""),
    )
    return Facts("Target", tuple(row for row in rows if row[1]))


def _collect_findings(document: Document) -> tuple[Findings, ...]:
    def abridge(key: str) -> list[str]:
        return list(document.get(key, ()))

    def pairs(key: str, between: str, after: str = "") -> list[str]:
        table = document.get(key, {})
        items = table.items() if isinstance(table, Mapping) else table
        return [f"{one}{between}{two}{after}" for one, two in items]

    left = document.get("optimizer_tensors_left")
    dropped = (
        [f"{units.counted(left, 'optimizer tensor')} ({document['command']} writes weights only)"]
        if left
        else []
    )
    return (
        Findings("Warnings", abridge("warnings"), "bad"),
        Findings("Became infinite", pairs("overflowed", ": ", " values"), "bad"),
        Findings("Became zero", pairs("flushed", ": ", " values"), "bad"),
        Findings("Dropped", [*abridge("dropped"), *dropped]),
        Findings("Excluded", abridge("excluded")),
        Findings("Derived", abridge("derived")),
        Findings("Kept", abridge("kept")),
        Findings("Kept in float32", abridge("kept_fp32")),
        Findings("Notes", [*abridge("notes"), *abridge("changes")]),
        Findings("Renamed", pairs("renamed", " → ")),
        Findings("Prefixes removed", pairs("stripped", " → ")),
        Findings("Tied, not written twice", pairs("dropped_aliases", " = ")),
        Findings("Tied, written as a copy", pairs("written_aliases", " = ")),
    )
