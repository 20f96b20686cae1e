"""The page of `plan`: stacked bars of each strategy's memory, and the table."""

from __future__ import annotations

from reshard import units
from reshard.html.bars import BarPart, Bars
from reshard.html.page import Column, Facts, Findings, Page, PageTable
from reshard.html.pages import Document

_PARTS = (
    ("parameters", "Parameters"),
    ("gradients", "Gradients"),
    ("masters", "Masters"),
    ("moments", "Moments"),
    ("gathered", "Gathered layers"),
    ("buckets", "Buckets"),
    ("activations", "Activations"),
    ("logits", "Logits"),
    ("margin", "Margin"),
)
_FURTHER = (
    ("states", "States: the first four"),
    ("step", "Optimizer step"),
    ("recomputed", "Activations with checkpointing"),
    ("total", "Total"),
    ("total_with_checkpointing", "Total with checkpointing"),
    ("host", "Host memory of a node"),
    ("disk", "Checkpoint on disk"),
    ("sent", "Sent per step"),
)


def build_plan_page(document: Document) -> Page:
    """Build the page from the ``to_json()`` of the report."""
    rows, recommended = document["rows"], document["recommended"]
    names = [row["strategy"] for row in rows]
    tables = [Column("Strategy", "name", names)]
    tables += [
        Column(title, "bytes", [row[key] for row in rows]) for key, title in (*_PARTS, *_FURTHER)
    ]
    for key, title in (("fits", "Fits"), ("fits_with_checkpointing", "Fits with checkpointing")):
        tables.append(Column(title, "state", ["yes" if row[key] else "no" for row in rows]))
    tables.append(Column("Too small", "text", [" and ".join(row["lacks"]) for row in rows]))
    advice = [f"{units.show_bytes(item['saved'])}: {item['what']}" for item in document["advice"]]
    return Page(
        "plan",
        document["model"]["source"],
        recommended["reason"],
        "good" if recommended["fits"] else "bad",
        facts=(_describe_model(document), _describe_cluster(document)),
        findings=(
            Findings("Next steps", document["next_steps"]),
            Findings("What saves memory, least cost in speed first", advice),
            Findings("Notes", document["notes"]),
        ),
        sections=(
            _draw(document, "Memory of a GPU", "activations", "total"),
            _draw(
                document,
                "Memory of a GPU with activation checkpointing",
                "recomputed",
                "total_with_checkpointing",
            ),
            PageTable("Strategies", tables),
        ),
    )


def _draw(document: Document, title: str, activations: str, total: str) -> Bars:
    # The step of the optimizer comes after the backward pass, so only what it needs beyond adds.
    keys = [activations if key == "activations" else key for key, _ in _PARTS]
    rows = document["rows"]
    beyond = [row[total] - sum(row[key] for key in keys) for row in rows]
    limit = document["cluster"]["gpu_bytes"]
    return Bars(
        title,
        tuple(row["strategy"] for row in rows),
        (
            *(
                BarPart(label, [row[key] for row in rows])
                for key, (_, label) in zip(keys, _PARTS, strict=True)
            ),
            BarPart("Optimizer step, beyond the backward pass", beyond),
        ),
        limit=limit,
        limit_label=f"{units.show_bytes(limit)}: memory of a GPU",
    )


def _describe_model(document: Document) -> Facts:
    model = document["model"]
    return Facts(
        "Model",
        (
            ("Source", model["source"]),
            ("Parameters", f"{units.show_count(model['parameters'])} ({model['counted_by']})"),
            ("Layers", str(model["layers"])),
            ("Largest layer", units.show_count(model["largest_layer"])),
        ),
    )


def _describe_cluster(document: Document) -> Facts:
    cluster, training = document["cluster"], document["training"]
    return Facts(
        "Training",
        (
            ("GPUs", f"{cluster['nodes']} x {cluster['gpus']}"),
            ("Memory of a GPU", units.show_bytes(cluster["gpu_bytes"])),
            ("Precision", training["precision"]),
            ("Optimizer", training["optimizer"]),
            ("Tokens", f"{training['seq_len']} x micro batch {training['micro_batch']}"),
        ),
    )
