"""Write docs/hub-names.md from docs/hub-names.csv: ``python -m tests.hub_page``.

`tests.judged.hub_names` writes the data, which takes hours; the page states totals and exceptions.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "docs" / "hub-names.csv"
PAGE = DATA.with_suffix(".md")
STEPS = ("fsdp2_merge", "fsdp2_load", "zero3_merge", "zero3_load", "back")
FIELDS = ("type", "model", "converted", "loss", *STEPS, "transformers", "torch", "remarks")
AS_TRANSFORMERS = "the same with what transformers saved itself"  # how a remark begins
PASSED = ("same", "as transformers")
BETWEEN = " // "  # the remarks of a row

_HEAD = """# Names of transformers models

This page is for users of transformers who want to know whether `reshard` converts the names of
their model. In memory, transformers 5 gives many models other parameter names and shapes than in
their published files: it stacks experts, joins projections and changes prefixes. Training
frameworks save the form in memory. `reshard merge` to a directory writes the published form. All
commands read both.

## Look up a model

[hub-names.csv](hub-names.csv) has one row for each `model_type` of `config.json`, and for each
model class that the mapping of transformers names:

```text
$ grep '^qwen3_moe,' docs/hub-names.csv
"""
_STEPS = """```

- `converted`: transformers itself converts names or shapes of this type between memory and files.
- `loss`: a tiny random model is trained for two steps of AdamW, under FSDP 2 (2 ranks, DCP
  checkpoint) and ZeRO-3 (DeepSpeed, 2 ranks). `output`: the loss is computed from the model's
  output. `parameters`: the test cannot create the model's inputs, and the loss is the sum of the
  squares of all parameters, each added in the forward call of its own module.
- `fsdp2_merge`, `zero3_merge`: the checkpoint is merged to a directory, which is compared with the
  output of `save_pretrained`: every name, dtype, shape and byte.
- `fsdp2_load`, `zero3_load`: `from_pretrained` loads the directory: no missing or unexpected key,
  every weight in memory bitwise equal, and equal outputs if the model runs.
- `back`: the output of `save_pretrained` is converted with `--to dcp --init-optimizer zeros` and
  loaded into a live model that was initialized with other values: every weight bitwise equal, every
  moment zero.
- `remarks`: why a step did not run or differs; `inputs`: why the loss is that of the parameters.

The models have the default configuration with fewer layers, heads, experts and a smaller
vocabulary, on CPU. `python -m tests.judged.hub_names OUT --page` runs the tests and writes the data
and this page.

## Results

"""
_NOT_BUILT = """more types cannot be built tiny on CPU: transformers has no model class for them, a
library is missing, or the configuration cannot be reduced. Their rows have no `model`, and
`remarks` states the reason."""
_WORDS = """*as transformers*: the directory that `save_pretrained` wrote has the same problem.
*not trained*: the model does not run under the framework, so there is no checkpoint to test. The
column `remarks` of the data states the reasons."""


def render(rows: Sequence[dict[str, str]]) -> str:
    """Return the page in Markdown."""
    built = [row for row in rows if row["model"]]
    example = next(row for row in rows if row["type"] == "qwen3_moe")
    lines = [
        f"{','.join(example[name] for name in FIELDS)}",
        _STEPS.rstrip("\n"),
        "",
        f"With transformers {example['transformers']} and torch {example['torch']}:",
        "",
        *_count(built),
        "",
        f"{len(rows) - len(built)} {_NOT_BUILT}",
        "",
        "## Exceptions",
        "",
        _WORDS,
        "",
        *_list_exceptions(built),
    ]
    return _HEAD + "\n".join(lines) + "\n"


def _count(built: Iterable[dict[str, str]]) -> list[str]:
    found = Counter((row["converted"], is_passed(row)) for row in built)
    lines = ["| types and classes | pass every step | exceptions |", "| --- | --- | --- |"]
    for converted, said in (("yes", "that transformers converts"), ("no", "others")):
        lines.append(f"| {said} | {found[converted, True]} | {found[converted, False]} |")
    return lines


def is_passed(row: dict[str, str]) -> bool:
    """Say whether the results of all steps are those of transformers."""
    return all(row[step] in PASSED for step in STEPS)


def _list_exceptions(built: Iterable[dict[str, str]]) -> list[str]:
    """Return a row for each combination of results, with all types that have it."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in built:
        results = [row[step] for step in STEPS]
        if set(results) != {"same"}:
            shown = (_join(results[:2]), _join(results[2:4]), results[4])
            groups.setdefault(shown, []).append(f"`{row['type']}`")
    lines = ["| types | FSDP 2 | ZeRO-3 | back |", "| --- | --- | --- | --- |"]
    return [
        *lines,
        *(f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in groups.items()),
    ]


def _join(results: Sequence[str]) -> str:
    """Return the results of merge and load as one."""
    return ", ".join(dict.fromkeys(results))


def read_rows() -> list[dict[str, str]]:
    """Read the data."""
    with DATA.open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows: Sequence[dict[str, str]]) -> None:
    """Write the data and the page."""
    with DATA.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    PAGE.write_text(render(rows))


if __name__ == "__main__":
    write(read_rows())
