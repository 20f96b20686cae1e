"""Save and load checkpoints with real Megatron-core on CPUs; record the expected state of each.

``make_all(out)`` trains every case and gives a directory a case::

    out/<case>/<form>/      what Megatron-core saved, in the forms of ``megatron_cases``
    out/<case>/expected.pt  what it holds when it loads that on one rank: see ``megatron_worker``
    out/not_made.json       case -> the import that failed, where Megatron-core is not installed

``load_all(out, {name: loading(...)})`` has it load checkpoints and go on from them: the same
``expected.pt``, and a ``rank<r>.pt`` of what each rank holds once it has loaded.

Or ``python -m tests.judges.megatron_judge OUT [case ...]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.judges import server
from tests.judges.megatron_cases import CASES, Case, Grid
from tests.judges.server import NOT_HERE, CaseResult, JudgeError

__all__ = [
    "CASES",
    "NOT_HERE",
    "Case",
    "CaseResult",
    "Grid",
    "JudgeError",
    "load_all",
    "loading",
    "make_all",
]

WORKER = "tests.judges.megatron_worker"


def make_all(out: Path, names: Iterable[str] | None = None) -> dict[str, CaseResult]:
    """Train and save the named cases, or all; see ``server.Judge.make``."""
    return _ask(out, {name: CASES[name] for name in (CASES if names is None else names)})


def loading(case: str, start: Path, form: str = "torch", **changes: Any) -> Case:
    """Return a run of that case's model that begins from a checkpoint, on any grid.

    Args:
        case: whose model, data and precision.
        start: the directory that has ``latest_checkpointed_iteration.txt``.
        form: one of ``megatron_cases``: how the model and optimizer lie there.
        changes: fields of ``Case``: ``grid``, ``distributed``, ``bucket``, ``adam``, ``padded``.
    """
    return dataclasses.replace(CASES[case], start=str(start), form=form, **changes)


def load_all(out: Path, cases: Mapping[str, Case]) -> dict[str, CaseResult]:
    """Have Megatron-core load checkpoints strictly and train on; see ``server.Judge.make``.

    Raises JudgeError, with the ranks' logs, for those that it cannot load.
    """
    return _ask(out, cases)


def _ask(out: Path, cases: Mapping[str, Case]) -> dict[str, CaseResult]:
    judge = server.Judge(WORKER, "Megatron-core", cases, like=WORKER)
    return judge.make(out, cases, table=dict(cases))


if __name__ == "__main__":
    server.main(make_all)
