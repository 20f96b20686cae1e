"""Make model-parallel checkpoints with real DeepSpeed, and resume from them with it.

``make_all(out)`` gives a directory a case: ``run/``, and ``expected.pt``, which the ranks gathered
from one another in training; or ``python -m tests.judges.parallel_judge OUT [case ...]``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.judges import server
from tests.judges.parallel_cases import CASES
from tests.judges.server import CaseResult, JudgeError

JUDGE = server.Judge(
    *("tests.judges.parallel_worker", "DeepSpeed", CASES),
    like=server.DEEPSPEED,
    result=server.EXPECTED,
)


def make_all(out: Path, names: Iterable[str] | None = None) -> dict[str, CaseResult]:
    """Make the named cases, or all; see ``server.Judge.make``."""
    return JUDGE.make(out, list(CASES if names is None else names))


def load_all(
    runs: Iterable[tuple[Path, str, dict[str, Any]]], steps: int, **how: Any
) -> list[dict[str, Any]]:
    """Have real DeepSpeed go on from directories.

    Args:
        runs: of each the directory, the case, and what of it is another there (tp, pp, dp ...).
        how: options of ``load_checkpoint``.

    Returns:
        of each ``loaded`` (the state right after loading), ``losses`` and ``params``.
    """
    jobs = {}
    for number, (run, name, other) in enumerate(runs):
        case = replace(CASES[name], **other)
        told = {"case": case, "load": run.resolve(), "how": how, "steps": steps}
        jobs[f"{name}-{number}"] = case.world, told
    with tempfile.TemporaryDirectory(prefix="parallel_load-") as scratch:
        found = JUDGE.run(Path(scratch), jobs)
    if failures := [result for result in found.values() if isinstance(result, str)]:
        raise JudgeError("\n\n".join(failures))
    return [found[name] for name in jobs]


if __name__ == "__main__":
    server.main(make_all)
