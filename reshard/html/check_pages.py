"""Pages of the commands that compare and check: `diff`, `verify` and `resume-check`.

They are built like those of `pages`: from the document of a report, and from the manifests.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from reshard import units
from reshard.core.manifest import Manifest
from reshard.html import shards
from reshard.html.curves import Curves, LossRun
from reshard.html.page import Column, Facts, Findings, Maps, Page, PageTable, Section
from reshard.html.pages import MOST_SHOWN, Document, build_checkpoint_panel, build_command_panel

_LEVELS = ("state", "trajectory", "bitwise")


def build_diff_page(
    document: Document, facts: Sequence[Document], a: Manifest, b: Manifest
) -> Page:
    """Build the page that compares two checkpoints."""
    counts = [
        (len(document["unequal"]), "unequal"),
        (len(document["only_a"]), "only in A"),
        (len(document["only_b"]), "only in B"),
        (len(document["train"]), "other values differ"),
    ]
    different = ", ".join(f"{count} {what}" for count, what in counts if count)
    how = "bit by bit" if document["exact"] else "under the tolerance"
    equal = f"{units.counted(document['equal'], 'tensor')} equal {how}"
    maps = Maps(
        (shards.map_manifest("A", a), shards.map_manifest("B", b)),
        [  # the module's copy is a weight in a map
            ("weight" if tensor["kind"] == "copy" else tensor["kind"], tensor["fqn"])
            for tensor in document["unequal"]
        ],
        "unequal",
    )
    return Page(
        "diff",
        f"{document['a']} and {document['b']}",
        f"the same: {equal}" if document["same"] else f"different: {different}; {equal}",
        "good" if document["same"] else "bad",
        facts=(
            build_checkpoint_panel("A", facts[0]),
            build_checkpoint_panel("B", facts[1]),
            Facts("Compared", _list_comparison(document)),
        ),
        findings=(Findings("Notes", document["notes"]),),
        sections=(*_build_difference_tables(document), maps),
    )


def build_verify_page(
    document: Document, facts: Document | None = None, manifest: Manifest | None = None
) -> Page:
    """Build the page of the checks of a checkpoint; an unreadable one has no facts and no map."""
    checks = document["checks"]
    verdict, has_passed = _judge_checks(document)
    warned = [check["name"] for check in checks if check["status"] == "warned"]
    warnings = f", with warnings: {', '.join(warned)}" if warned and has_passed else ""
    labels = ("Checks", "Read", "Time", "Manifest")
    read = units.show_bytes(document["bytes_read"]) if document["bytes_read"] else "headers only"
    values = (document["mode"], read, f"{document['seconds']:.2f} s", document["manifest"])
    rows = [row for row in zip(labels, values, strict=True) if row[1]]
    maps = [Maps((shards.map_manifest("Shards", manifest),))] if manifest else []
    return Page(
        "verify",
        document["source"],
        verdict + warnings,
        "good" if has_passed else "bad",
        facts=[
            *([build_checkpoint_panel("Checkpoint", facts)] if facts else []),
            Facts("Verified", rows),
        ],
        findings=[*_list_check_findings(checks), Findings("Notes", document["notes"])],
        sections=(_build_checks_table(checks), *maps),
    )


def build_history_page(document: Document) -> Page:
    """Build the page of a run's history: a chart of its layers, its checkpoints, and the checks."""
    checks, tags = document["checks"], document["checkpoints"]
    verdict, has_passed = _judge_checks(document)
    rows = [
        ("Format", ", ".join(filter(None, (document["format"], document["detail"])))),
        ("Checkpoints", str(len(tags))),
        ("Read", units.show_bytes(document["bytes_read"])),
        ("Time", f"{document['seconds']:.2f} s"),
    ]
    return Page(
        "verify --history",
        document["source"],
        verdict,
        "good" if has_passed else "bad",
        facts=[Facts("Run", rows)],
        findings=[*_list_check_findings(checks), Findings("Notes", document["notes"])],
        sections=(
            *_draw_layers(document),
            _build_checkpoints_table(tags),
            _build_checks_table(checks),
        ),
    )


def _judge_checks(document: Document) -> tuple[str, bool]:
    failed = [check["name"] for check in document["checks"] if check["status"] == "failed"]
    passed = f"passed the {document['mode']} checks"
    return f"failed: {', '.join(failed)}" if failed else passed, not failed


def _draw_layers(document: Document) -> Iterator[Curves]:
    numbers: dict[str, list[int]] = {}
    for tag in document["checkpoints"]:
        numbers.setdefault(tag["model"], []).append(tag["number"])
    runs = tuple(
        LossRun(name, places, {"change": values})
        for name, values in document["groups"].items()
        if (places := numbers.get(name.partition(": ")[0], numbers.get("", []))[1:])
    )
    if runs:
        title = "Change per update, relative to the weights (root mean square)"
        yield Curves(runs, None, {"change": title})


def _build_checkpoints_table(tags: Sequence[Document]) -> PageTable:
    def values(key: str) -> list[float | None]:
        return [tag.get(key) for tag in tags]

    return PageTable(
        "Checkpoints",
        (
            Column("Checkpoint", "name", [tag["name"] for tag in tags]),
            Column("Step", "number", values("step")),
            Column("Updates", "number", values("updates")),
            Column("Learning rate", "number", values("lr")),
            Column("Moved", "number", values("moved")),
            Column("Change", "number", values("change")),
            Column("Largest", "number", values("largest")),
            Column("Moments moved", "number", values("moments_moved")),
        ),
        "Since the checkpoint before: the fraction of weights with other bits, their change"
        " relative to the weights, the largest change, the fraction of moments with other bits.",
    )


def _list_check_findings(checks: Sequence[Document]) -> Iterator[Findings]:
    for check in checks:
        yield Findings(f"Failed: {check['name']}", check["failures"], "bad")
    for check in checks:
        yield Findings(f"Warning: {check['name']}", check["warnings"])


def _build_checks_table(checks: Sequence[Document]) -> PageTable:
    counts = [len(check["failures"]) + len(check["warnings"]) for check in checks]
    return PageTable(
        "Checks",
        (
            Column("Check", "text", [check["name"] for check in checks]),
            Column("Result", "state", [check["status"] for check in checks]),
            Column("Checked", "text", [check["looked_at"] for check in checks]),
            Column("Findings", "number", counts),
        ),
    )


def build_resume_page(document: Document) -> Page:
    """Build the page that compares training from a checkpoint and from each layout of it."""
    targets, need = document["targets"], document["require"]
    good = sum(target["reached"][need] for target in targets)
    verdict = f"{need} reached by {good} of {len(targets)} layouts"
    if document["verdict"] == "could not run":
        verdict = f"could not run: {verdict}"
    if document["control"] and not document["control"]["noticed"] and need != "state":
        verdict = "these steps show nothing: the losses do not reveal even a zeroed optimizer"
    runs = [document["unbroken"], *(target["run"] for target in targets)]
    series = [_read_series(run) for run in runs if run["series"]]
    drawn: list[Section] = [Curves.of(series)] if series else []
    return Page(
        "resume-check",
        document["source"],
        verdict,
        "good" if document["reached"] else "bad",
        facts=(
            Facts("Checkpoint", _list_resume_rows(document)),
            build_command_panel(document),
            Facts("Levels", _LEVEL_MEANINGS),
        ),
        findings=[*_list_failed_runs(document), Findings("Notes", document["notes"])],
        sections=(
            *drawn,
            _build_layouts_table(targets),
            *_build_notes_table(targets),
            _build_runs_table(document),
        ),
    )


_LEVEL_MEANINGS = (
    ("state", "every tensor and the train state are equal"),
    ("trajectory", "tensors equal, losses within the tolerance"),
    ("bitwise", "tensors equal, losses equal bit by bit"),
)


def _list_resume_rows(document: Document) -> list[tuple[str, str]]:
    step, control = document["step"], document["control"]
    rows = [
        ("Path", document["source"]),
        ("Format", document["format"]),
        ("Ranks", str(document["ranks"])),
        ("Step", "" if step is None else str(step)),
        ("Continued", f"{document['steps']} steps"),
        ("Tolerance", f"{document['rtol']:.2g}, relative, of losses"),
        ("Control", _show_control(control) if control else "not run (--control)"),
        ("Time", f"{document['seconds']:.1f} s"),
    ]
    return [row for row in rows if row[1]]


def _show_control(control: Document) -> str:
    noticed = "noticed" if control["noticed"] else "NOT noticed: these steps show nothing"
    far = _find_max_relative(control["trajectory"], "loss")
    distance = f", by {far:.2g} relative" if isinstance(far, float) else ""
    return f"{control['wiped']} set to zero is {noticed}{distance}"


def _read_series(run: Document) -> dict[str, Any]:
    points = run["series"]
    norms = [_read_number(point, "grad_norm") for point in points]
    return {
        "name": run["name"],
        "steps": [point["step"] for point in points],
        "loss": [_read_number(point, "loss") for point in points],
        "grad_norm": norms if any(norm is not None for norm in norms) else [],
    }


def _read_number(point: Document, key: str) -> float | None:
    exact = point.get(f"{key}_hex")
    value = float.fromhex(exact) if exact else point.get(key)
    return None if value is None else float(value)


def _list_failed_runs(document: Document) -> Iterator[Findings]:
    control = [document["control"]] if document["control"] else []
    for result in (*document["targets"], *control):
        run = result["run"]
        if run["failure"]:
            yield Findings(f"Failed: {run['name']}", [run["failure"], *run["said"]], "bad")


def _build_layouts_table(targets: Sequence[Document]) -> PageTable:
    columns = [Column("Layout", "text", [target["name"] for target in targets])]
    for level in _LEVELS:
        states = ["yes" if target["reached"][level] else "no" for target in targets]
        columns.append(Column(level.capitalize(), "state", states))
    trajectories = [target["trajectory"] for target in targets]
    compared_states = [target["state"] for target in targets]
    differ = [len(s["unequal"]) + len(s["only_a"]) + len(s["only_b"]) for s in compared_states]
    return PageTable(
        "Layouts",
        (
            *columns,
            Column("Equal", "number", [state["equal"] for state in compared_states]),
            Column("Different", "number", differ),
            Column(
                "Loss",
                "number",
                [_find_max_relative(trajectory, "loss") for trajectory in trajectories],
            ),
            Column(
                "Norm",
                "number",
                [_find_max_relative(trajectory, "grad_norm") for trajectory in trajectories],
            ),
            Column(
                "Final weights", "state", [_show_weights(trajectory) for trajectory in trajectories]
            ),
        ),
        "Equal and different tensors; the largest difference of losses and of gradient norms,"
        " relative to the larger value.",
    )


def _build_runs_table(document: Document) -> PageTable:
    control = [
        (name, document[key]["run"])
        for key, name in (("noise", "unbroken, weights rounded"), ("control", "control"))
        if document[key]
    ]
    resumed_runs = [(target["name"], target["run"]) for target in document["targets"]]
    named = [("unbroken", document["unbroken"]), *resumed_runs, *control]
    names, runs = zip(*named, strict=True)
    return PageTable(
        "Runs",
        (
            Column("Run", "text", names),
            Column("Ranks", "number", [run["ranks"] for run in runs]),
            Column("Steps", "number", [len(run["series"]) for run in runs]),
            Column("Seconds", "number", [round(run["seconds"], 1) for run in runs]),
            Column("Command", "name", [shlex.join(run["command"]) for run in runs]),
        ),
    )


def _find_max_relative(trajectory: Document | None, key: str) -> float | None:
    distance = trajectory[key] if trajectory else None
    return distance["max_rel"] if distance else None


def _show_weights(trajectory: Document | None) -> str:
    states = {True: "equal", False: "different", None: "not compared"}
    return states[trajectory["parameters_equal"] if trajectory else None]


def _build_notes_table(targets: Sequence[Document]) -> Iterator[PageTable]:
    rows = [
        (target["name"], label, text)
        for target in targets
        for label in ("warnings", "dropped", "derived", "kept", "notes")
        for text in target["written"][label]
    ]
    if rows:
        names, labels, texts = zip(*rows, strict=True)
        columns = (("Layout", names), ("Kind", labels), ("Note", texts))
        yield PageTable("Written", [Column(title, "text", values) for title, values in columns])


def _list_comparison(document: Document) -> list[tuple[str, str]]:
    kinds = [(kind, f"{count} equal") for kind, count in document["equal_by_kind"].items()]
    read = units.show_bytes(document["bytes_read"])
    return [*kinds, ("Read", read), ("Time", f"{document['seconds']:.2f} s")]


def _build_difference_tables(document: Document) -> tuple[PageTable, ...]:
    unequal, train = document["unequal"], document["train"]
    only = [(side, *key) for side in ("a", "b") for key in document[f"only_{side}"]]
    firsts = [None if tensor["at"] is None else str(list(tensor["at"])) for tensor in unequal]
    tables = (
        PageTable(
            "Unequal tensors",
            (
                Column("Name", "name", [tensor["fqn"] for tensor in unequal]),
                Column("Kind", "text", [tensor["kind"] for tensor in unequal]),
                Column("What", "text", [tensor["what"] for tensor in unequal]),
                Column("Unequal", "number", [tensor["count"] for tensor in unequal]),
                Column("Of", "number", [tensor["numel"] for tensor in unequal]),
                Column("Max abs", "number", [tensor["max_abs"] for tensor in unequal]),
                Column("Max rel", "number", [tensor["max_rel"] for tensor in unequal]),
                Column("Max ulp", "number", [tensor["max_ulp"] for tensor in unequal]),
                Column("Not finite", "number", [tensor["not_finite"] for tensor in unequal]),
                Column("First at", "name", firsts),
                Column("A", "name", [tensor["a"] for tensor in unequal]),
                Column("B", "name", [tensor["b"] for tensor in unequal]),
            ),
        ),
        PageTable(
            "Only on one side",
            (
                Column("Name", "name", [fqn for _, _, fqn in only]),
                Column("Kind", "text", [kind for _, kind, _ in only]),
                Column("Side", "text", [side.upper() for side, _, _ in only]),
            ),
        ),
        PageTable(
            "Not tensors",
            (
                Column("Name", "name", [value["name"] for value in train]),
                Column("A", "name", [_show_value(value["a"]) for value in train]),
                Column("B", "name", [_show_value(value["b"]) for value in train]),
            ),
        ),
    )
    return tuple(table for table in tables if table.height)


def _show_value(value: Any) -> str | None:
    return None if value is None else units.shorten(value, MOST_SHOWN)
