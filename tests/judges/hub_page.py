"""Put the results of `tests.judged.hub_names` into the rows of docs/hub-names.csv."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from tests.hub_page import AS_TRANSFORMERS, BETWEEN, FIELDS, STEPS
from tests.judges.hub_models import Case
from tests.judges.hub_proof import FRAMEWORKS, SAME


def list_rows(cases: Mapping[str, Case], found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the data: what transformers converts, other types, those not built."""
    built = [name for name, one in found.items() if one["steps"].get("build") == SAME]
    ordered = [name for name in built if cases[name].in_mapping]
    ordered += [name for name in built if not cases[name].in_mapping]
    ordered += [name for name in found if name not in built]
    return [_list_cells(cases[name], found[name]) for name in ordered]


def _list_cells(case: Case, found: Mapping[str, Any]) -> dict[str, str]:
    steps = found["steps"]
    row = dict.fromkeys(FIELDS, "") | {
        "type": case.name,
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "remarks": BETWEEN.join(_list_remarks(steps)),
    }
    if steps.get("build") != SAME:
        return row
    results = [_cell(steps, key, step) for key in FRAMEWORKS for step in ("merge", "load")]
    results.append("same" if steps["back"] == SAME else "differs")
    return row | {
        "model": found["model_class"],
        "converted": "yes" if case.in_mapping else "no",
        "loss": "output" if found["loss"] == "forward" else "parameters",
        **dict(zip(STEPS, results, strict=True)),
    }


def summarize(found: Mapping[str, Any]) -> str:
    """Return a line about one case."""
    seconds = sum(found["seconds"].values())
    problems = [
        f"{step}: {_shorten(said)}" for step, said in found["steps"].items() if said != SAME
    ]
    return f"{'; '.join(problems) or SAME} ({seconds:.0f} s)"


def _cell(steps: Mapping[str, str], key: str, step: str) -> str:
    """Return the result of a step of one framework."""
    if f"{key} train" not in steps:
        return ""
    if steps[f"{key} train"] != SAME:
        return "not trained"
    said = steps.get(f"{key} {step}", "")
    if said.startswith(AS_TRANSFORMERS):
        return "as transformers"
    return "same" if said == SAME else "differs"


def _list_remarks(steps: Mapping[str, str]) -> Iterator[str]:
    for step, said in steps.items():
        if said != SAME:
            yield f"{step}: {_shorten(said)}"


def _shorten(text: str) -> str:
    """Return the text on one line, without places of this machine, cut to 200 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]} ..."
