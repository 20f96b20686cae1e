"""Pages of `inspect` and of the commands that write.

Each is made from a ``document``, which is what ``to_json()`` of the command's report gives, and
from the manifests behind it. ``facts`` of a checkpoint are the document that ``inspect`` gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard import units
from reshard.html import shards
from reshard.html.page import Column, Facts, Findings, Maps, Page, Table
from reshard.manifest import MASTER, PARAM, Chunk, Entry, Manifest, Skeleton

Document = Mapping[str, Any]

_MODULE_FILES = "_model_states.pt"  # DeepSpeed's, of the module


def inspected(document: Document, manifest: Manifest) -> Page:
    """What a checkpoint is."""
    warnings = list(document["warnings"])
    absent = [f"{fqn}: listed, but no rank holds a value" for fqn in document["absent"]]
    strange = [f"pickles name {name}" for name in document["unknown_globals"]]
    return Page(
        "inspect",
        document["path"],
        f"complete: {units.counted(document['files'], 'file')} of all ranks, every element once",
        "good",
        facts=(checkpoint("Checkpoint", document), _kinds("Holds", document), _training(document)),
        findings=(
            Findings("Warnings", [*warnings, *strange], "bad"),
            Findings("Without a value", absent, "bad"),
            Findings("Tied", [f"{name} = {kept}" for name, kept in document["tied"].items()]),
            Findings("Frozen", document["frozen"]),
        ),
        sections=(
            Maps((shards.of_manifest("Shards", manifest),)),
            tensors("Tensors", manifest.entries.values()),
            _files(manifest),
        ),
    )


def written(document: Document, facts: Document, manifest: Manifest, skeleton: Skeleton) -> Page:
    """A merge, split or conversion: what came in, what went out."""
    made = _as_read_back(skeleton, document.get("target", ""))
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
            checkpoint("Source", facts),
            _kinds("Source holds", facts),
            _target(document, skeleton),
        ),
        findings=_findings(document),
        sections=(
            Maps((shards.of_manifest("Before", manifest), shards.of_skeleton("After", made))),
            tensors("Tensors written", made.entries),
            Table(
                "Files written",
                (
                    Column("File", "name", [file["name"] for file in document["files"]]),
                    Column("Size", "bytes", [file["bytes"] for file in document["files"]]),
                ),
            ),
        ),
    )


def _as_read_back(skeleton: Skeleton, target: str) -> Skeleton:
    """The entries under the kinds that a reader will give them.

    An entry of a skeleton is named after the one that fills it, so that the module's weights may be
    called masters, masters that are made of them weights, and one may be both. Only DeepSpeed has
    masters: in files of the optimizer's, or wider than the module's beside them.
    """
    has_masters = target.startswith(("deepspeed", "ds-universal"))
    sizes: dict[str, set[int]] = {}
    for entry in skeleton.entries:
        if entry.kind in (PARAM, MASTER):
            sizes.setdefault(entry.fqn, set()).update(c.dtype.itemsize for c in entry.chunks)

    def is_master(fqn: str, chunk: Chunk) -> bool:
        wider = len(sizes[fqn]) > 1 and chunk.dtype.itemsize == max(sizes[fqn])
        return has_masters and (wider or not chunk.file.endswith(_MODULE_FILES))

    def read(entry: Entry) -> Iterator[Entry]:
        if entry.kind not in (PARAM, MASTER) or not entry.chunks:
            yield entry
            return
        for kind in (PARAM, MASTER):
            chunks = [c for c in entry.chunks if is_master(entry.fqn, c) == (kind == MASTER)]
            if chunks:
                yield Entry(entry.fqn, kind, chunks[0].dtype, entry.shape, tuple(chunks))

    entries = tuple(found for entry in skeleton.entries for found in read(entry))
    return replace(skeleton, entries=entries)


def checkpoint(title: str, document: Document) -> Facts:
    """What `inspect` says of a checkpoint, as a panel."""
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


def tensors(title: str, entries: Iterable[Entry]) -> Table:
    """Every tensor, a row each."""
    rows = list(entries)
    return Table(
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


def _kinds(title: str, document: Document) -> Facts:
    rows = []
    for kind, held in document["kinds"].items():
        size, dtypes = units.show_bytes(held["bytes"]), ", ".join(held["dtypes"])
        rows.append((kind, f"{held['tensors']} tensors, {size}, {dtypes}"))
    return Facts(title, rows)


def _training(document: Document) -> Facts:
    rows = []
    for number, group in enumerate(document["param_groups"]):
        words = [f"{group['tensors']} tensors", *_hypers(group["hyper"])]
        rows.append((f"Group {number}", "; ".join(words)))
    values = {name: document[name] for name in ("scheduler", "scaler", "samples")}
    values["client"] = ", ".join(map(str, document["client"]))
    rows += [(name.capitalize(), _words(value)) for name, value in values.items() if value]
    return Facts("Training", rows or [("Optimizer", "none")])


def _hypers(hyper: Mapping[str, Any]) -> list[str]:
    return [f"{key} {hyper[key]}" for key in ("lr", "weight_decay") if key in hyper]


def _words(value: Any) -> str:
    """A state as a person writes it, where it is a plain one."""
    if isinstance(value, Mapping):
        pairs = [str(v) if k == "class" else f"{k} {_words(v)}" for k, v in value.items()]
        return short(", ".join(pairs))
    return short(value)


def short(value: Any, most: int = 200) -> str:
    """A value as text, cut where it is long."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _files(manifest: Manifest) -> Table:
    held: dict[str, int] = {}
    for entry in manifest.entries.values():
        for chunk in entry.chunks:
            nbytes = chunk.box.volume * chunk.dtype.itemsize
            held[chunk.file] = held.get(chunk.file, 0) + nbytes
    return Table(
        "Files",
        (
            Column("File", "name", list(shards.relative_names(manifest.files).values())),
            Column("Size", "bytes", [file.nbytes for file in manifest.files.values()]),
            Column("In tensors", "bytes", [held.get(path, 0) for path in manifest.files]),
        ),
    )


def _target(document: Document, skeleton: Skeleton) -> Facts:
    """What was written, as far as each command's report says it."""
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


def _findings(document: Document) -> tuple[Findings, ...]:
    """What the report of a command that writes says, whichever of them it is."""

    def listed(key: str) -> list[str]:
        return list(document.get(key, ()))

    def pairs(key: str, between: str, after: str = "") -> list[str]:
        held = document.get(key, {})
        items = held.items() if isinstance(held, Mapping) else held
        return [f"{one}{between}{two}{after}" for one, two in items]

    left = document.get("optimizer_tensors_left")
    dropped = [f"{left} optimizer tensors (merge writes weights)"] if left else []
    return (
        Findings("Warnings", listed("warnings"), "bad"),
        Findings("Became infinite", pairs("overflowed", ": ", " values"), "bad"),
        Findings("Became zero", pairs("flushed", ": ", " values"), "bad"),
        Findings("Dropped", [*listed("dropped"), *dropped]),
        Findings("Excluded", listed("excluded")),
        Findings("Derived", listed("derived")),
        Findings("Kept", listed("kept")),
        Findings("Kept in float32", listed("kept_fp32")),
        Findings("Notes", [*listed("notes"), *listed("changes")]),
        Findings("Renamed", pairs("renamed", " → ")),
        Findings("Prefixes taken off", pairs("stripped", " → ")),
        Findings("Tied, not written twice", pairs("dropped_aliases", " = ")),
        Findings("Tied, written as a copy", pairs("written_aliases", " = ")),
    )
