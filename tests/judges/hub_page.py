"""Write the documentation page with the results of `tests.judged.hub_names`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from tests.judges.hub_models import Case
from tests.judges.hub_proof import AS_TRANSFORMERS, FRAMEWORKS, SAME

HEAD = """# Names of transformers models

This page is for users of transformers who want to know whether `reshard` converts the names of
their model. In memory, transformers 5 gives many models other parameter names and shapes than in
their published files: it stacks experts, joins projections and changes prefixes. Training
frameworks save the form in memory. `reshard merge` to a directory writes the published form. All
commands read both.

The tables below have the test results of every model type. `python -m tests.judged.hub_names OUT
--page docs/hub-names.md` creates them. For each type it builds a tiny random model on CPU, in the
default configuration with fewer layers, heads, experts and a smaller vocabulary. Then it

1. trains the model for two steps with AdamW under **FSDP 2** (2 ranks, DCP checkpoint) and
   **ZeRO-3** (DeepSpeed, 2 ranks). The loss is computed from the model's output. If a model needs
   inputs that the test cannot create, the loss is the sum of the squares of all parameters, each
   added in the forward call of its own module;
2. merges each checkpoint to a directory and compares it with the output of `save_pretrained`:
   every name, dtype, shape and byte (column *merge*);
3. loads the directory with `from_pretrained`: no missing or unexpected key, every weight in
   memory bitwise equal, and equal outputs if the model runs (column *load*);
4. converts the output of `save_pretrained` to DCP with a new Adam (`--to dcp --init-optimizer
   zeros`), and loads it into a live model that was initialized with other values: every weight
   bitwise equal, every moment zero (column *back*).

"""


def render(cases: Mapping[str, Case], found: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    built = {name: one for name, one in found.items() if one["steps"].get("build") == SAME}
    failed = {name: one for name, one in found.items() if name not in built}
    converted = [name for name in built if cases[name].in_mapping]
    others = [name for name in built if not cases[name].in_mapping]
    lines = [
        _count(built, failed, len(cases) - len(found)),
        "",
        "## Types and classes that transformers converts",
        "",
        *_list_rows(converted, built),
        "",
        "## Other types",
        "",
        *_list_rows(others, built),
        "",
        "## Remarks",
        "",
        *_list_remarks(built),
        "",
        "## Types that are not built",
        "",
        *(f"- `{name}`: {_shorten(one['steps']['build'])}" for name, one in failed.items()),
    ]
    return HEAD + "\n".join(lines) + "\n"


def _count(built: Mapping[str, Any], failed: Mapping[str, Any], waiting: int) -> str:
    proved = sum(_is_proved(one) for one in built.values())
    return (
        f"Made with transformers {transformers.__version__} and torch"
        f" {torch.__version__.partition('+')[0]}: {len(built)} types and classes, of which {proved}"
        f" pass every step. {len(failed)} cannot be built tiny, for the reasons at the end."
        + (f" {waiting} other types were not run yet." if waiting else "")
    )


def summarize(found: Mapping[str, Any]) -> str:
    """Return a line about one case."""
    seconds = sum(found["seconds"].values())
    problems = [
        f"{step}: {_shorten(said)}" for step, said in found["steps"].items() if said != SAME
    ]
    return f"{'; '.join(problems) or SAME} ({seconds:.0f} s)"


def _is_proved(found: Mapping[str, Any]) -> bool:
    steps = {step: said for step, said in found["steps"].items() if step != "inputs"}
    return all(said == SAME or said.startswith(AS_TRANSFORMERS) for said in steps.values())


def _list_rows(names: list[str], found: Mapping[str, Any]) -> Iterator[str]:
    heads = [f"{name} {step}" for name in FRAMEWORKS.values() for step in ("merge", "load")]
    yield f"| type | model | loss | {' | '.join(heads)} | back |"
    yield "| --- " * (len(heads) + 4) + "|"
    for name in names:
        one = found[name]
        steps = one["steps"]
        cells = [_cell(steps, key, step) for key in FRAMEWORKS for step in ("merge", "load")]
        loss = "output" if one["loss"] == "forward" else "parameters"
        cells += ["same" if steps["back"] == SAME else "**differs**"]
        yield f"| {name} | {one['model_class']} | {loss} | {' | '.join(cells)} |"


def _cell(steps: Mapping[str, str], key: str, step: str) -> str:
    """Return the result of a step of one framework; the remarks say more."""
    if f"{key} train" not in steps:
        return ""
    if steps[f"{key} train"] != SAME:
        return "not trained"
    said = steps.get(f"{key} {step}", "")
    if said.startswith(AS_TRANSFORMERS):
        return "as transformers"
    return "same" if said == SAME else "**differs**"


def _list_remarks(found: Mapping[str, Any]) -> Iterator[str]:
    for name, one in found.items():
        for step, said in one["steps"].items():
            if said != SAME:
                yield f"- `{name}`, {step}: {_shorten(said)}"


def _shorten(text: str) -> str:
    """Return the text on one line, without places of this machine, cut to 200 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]} ..."
