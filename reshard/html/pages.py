"""The page of each command's report, from the report's JSON document and the manifests behind it.

A ``document`` is what ``to_json()`` of the report gives; ``facts`` of a checkpoint are those that
``inspect`` tells of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard import units
from reshard.html import shards
from reshard.html.page import Column, Facts, Findings, Maps, Page, Table
from reshard.manifest import Entry, Manifest, Skeleton

Document = Mapping[str, Any]


def inspected(document: Document, manifest: Manifest) -> Page:
    """What a checkpoint is."""
    warnings = list(document["warnings"])
    absent = [f"{fqn}: listed, but no rank holds a value" for fqn in document["absent"]]
    strange = [f"pickles name {name}" for name in document["unknown_globals"]]
    return Page(
        "inspect",
        document["path"],
        f"complete: {document['files']} files of all ranks, every element once",
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


def compared(document: Document, facts: Sequence[Document], a: Manifest, b: Manifest) -> Page:
    """Two checkpoints, side by side."""
    counts = [
        (len(document["unequal"]), "unequal"),
        (len(document["only_a"]), "only in A"),
        (len(document["only_b"]), "only in B"),
        (len(document["train"]), "other values differ"),
    ]
    found = ", ".join(f"{count} {what}" for count, what in counts if count)
    how = "bit by bit" if document["exact"] else "under the tolerance"
    equal = f"{document['equal']} tensors equal {how}"
    maps = Maps(
        (shards.of_manifest("A", a), shards.of_manifest("B", b)),
        [(_as_stored(each["kind"]), each["fqn"]) for each in document["unequal"]],
        "unequal",
    )
    return Page(
        "diff",
        f"{document['a']} and {document['b']}",
        f"the same: {equal}" if document["same"] else f"different: {found}; {equal}",
        "good" if document["same"] else "bad",
        facts=(
            checkpoint("A", facts[0]),
            checkpoint("B", facts[1]),
            Facts("Compared", _comparison(document)),
        ),
        findings=(Findings("Notes", document["notes"]),),
        sections=(*_differences(document), maps),
    )


def written(document: Document, facts: Document, manifest: Manifest, skeleton: Skeleton) -> Page:
    """A merge, split or conversion: what came in, what went out."""
    verb = "wrote" if document["done"] else "would write (dry run)"
    size = units.show_bytes(document["bytes_written"])
    checked = "every byte read back" if document["verified"] else "not read back"
    ending = f"; {checked}" if document["done"] else ""
    return Page(
        document["command"],
        f"{document['source']} → {document['destination']}",
        f"{verb} {size} in {len(document['files'])} files{ending}",
        "good" if document["done"] else "plain",
        facts=(
            checkpoint("Source", facts),
            _kinds("Source holds", facts),
            _target(document, skeleton),
        ),
        findings=_findings(document),
        sections=(
            Maps((shards.of_manifest("Before", manifest), shards.of_skeleton("After", skeleton))),
            tensors("Tensors written", skeleton.entries),
            Table(
                "Files written",
                (
                    Column("File", "name", [file["name"] for file in document["files"]]),
                    Column("Size", "bytes", [file["bytes"] for file in document["files"]]),
                ),
            ),
        ),
    )


def checkpoint(title: str, document: Document) -> Facts:
    """What `inspect` says of a checkpoint, as a panel."""
    versions = [f"{name} {version}" for name, version in document["versions"].items()]
    mesh = document["mesh"]
    ranks = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if axis != "world")
    world = str(mesh.get("world", 1))
    step = document["step"]
    skipped = f" ({document['skipped_steps']} skipped)" if document["skipped_steps"] else ""
    rows = (
        ("Path", document["path"]),
        ("Format", ", ".join(filter(None, (document["format"], document["detail"])))),
        ("Versions", ", ".join(versions)),
        ("Ranks", f"{world} ({ranks})" if ranks and ranks != f"dp {world}" else world),
        ("Step", "" if step is None else f"{step}{skipped}"),
        ("Precision", document["precision"]),
        ("Parameters", units.show_count(document["parameters"])),
        ("On disk", f"{units.show_bytes(document['disk_bytes'])} in {document['files']} files"),
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
        return _short(", ".join(pairs))
    return _short(value)


def _short(value: Any, most: int = 200) -> str:
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
        ("On disk", f"{size} in {len(document['files'])} files"),
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


def _comparison(document: Document) -> list[tuple[str, str]]:
    kinds = [(kind, f"{count} equal") for kind, count in document["equal_by_kind"].items()]
    read = units.show_bytes(document["bytes_read"])
    return [*kinds, ("Read", read), ("Time", f"{document['seconds']:.2f} s")]


def _differences(document: Document) -> tuple[Table, ...]:
    unequal, train = document["unequal"], document["train"]
    only = [(side, *key) for side in ("a", "b") for key in document[f"only_{side}"]]
    tables = (
        Table(
            "Unequal tensors",
            (
                Column("Name", "name", [each["fqn"] for each in unequal]),
                Column("Kind", "text", [each["kind"] for each in unequal]),
                Column("What", "text", [each["what"] for each in unequal]),
                Column("Unequal", "number", [each["count"] for each in unequal]),
                Column("Of", "number", [each["numel"] for each in unequal]),
                Column("Max abs", "number", [each["max_abs"] for each in unequal]),
                Column("Max rel", "number", [each["max_rel"] for each in unequal]),
                Column("Max ulp", "number", [each["max_ulp"] for each in unequal]),
                Column("Not finite", "number", [each["not_finite"] for each in unequal]),
                Column("First at", "name", [_index(each["at"]) for each in unequal]),
                Column("A", "name", [each["a"] for each in unequal]),
                Column("B", "name", [each["b"] for each in unequal]),
            ),
        ),
        Table(
            "Only on one side",
            (
                Column("Name", "name", [fqn for _, _, fqn in only]),
                Column("Kind", "text", [kind for _, kind, _ in only]),
                Column("Side", "text", [side.upper() for side, _, _ in only]),
            ),
        ),
        Table(
            "Not tensors",
            (
                Column("Name", "name", [value["name"] for value in train]),
                Column("A", "name", [_value(value["a"]) for value in train]),
                Column("B", "name", [_value(value["b"]) for value in train]),
            ),
        ),
    )
    return tuple(table for table in tables if table.height)


def _as_stored(kind: str) -> str:
    """The kind of a compared tensor as maps know it; the module's copy is one of a weight."""
    return "weight" if kind == "copy" else kind


def _index(at: Sequence[int] | None) -> str | None:
    return None if at is None else str(list(at))


def _value(value: Any) -> str | None:
    return None if value is None else _short(value)
