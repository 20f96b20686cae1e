"""Make checkpoints with real DeepSpeed, and resume from them with real DeepSpeed.

``make_all(out)`` gives a directory per case::

    out/<case>/run/            what DeepSpeed saved (``latest`` and the tag directory)
    out/<case>/universal/      for some: DeepSpeed's own universal conversion of it
    out/<case>/reference.pt    what the live engine held, see ``deepspeed_train.describe``

or ``python -m tests.judges.deepspeed_judge OUT [case ...]``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.judges import server
from tests.judges.deepspeed_cases import CASES
from tests.judges.server import CaseResult, JudgeError
from tests.support.programs import LIMIT_S

__all__ = ["CASES", "CaseResult", "JudgeError", "deepspeed_load", "make_all"]

COMPILE_LIMIT_S = 1200.0
JUDGE = server.Judge(server.DEEPSPEED, "DeepSpeed", CASES, like=server.DEEPSPEED)


def make_all(out: Path, names: Iterable[str] | None = None) -> dict[str, CaseResult]:
    """Make the named cases, or all; see ``server.Judge.make``.

    Disk offload needs a compiled op: it is compiled, for minutes, only for cases asked for by name.
    """
    chosen = list(CASES if names is None else names)
    results = JUDGE.make(out, chosen, start_s=_start_s(chosen), compile_aio=names is not None)
    for name, result in results.items():
        if result.missing:
            print(f"DeepSpeed case {name} SKIPPED: {result.missing}", file=sys.stderr)  # noqa: T201
    return results


def deepspeed_load(
    run_dir: Path, case: str, world_size: int, steps: int
) -> tuple[list[float], dict[str, Any]]:
    """Resume ``run_dir`` with real DeepSpeed under the case's config and train ``steps`` more.

    Returns the losses (compare with ``reference["next"]["losses"]``) and a dict: ``loaded``, a
    reference as of right after loading, and ``params``, the fp32 parameters after the last step.
    """
    import torch

    with tempfile.TemporaryDirectory(prefix="deepspeed_load-") as scratch:
        told = {"compile_aio": True, "load": run_dir.resolve(), "steps": steps}
        job = JUDGE.job(case, Path(scratch, "out"), Path(scratch), world_size, **told)
        (report,) = JUDGE.ask([job], _start_s([case]))
        if report.missing or any(report.exits):
            raise JudgeError(report.missing or JUDGE.failure(job, report))
        found = torch.load(job.out / "reference.pt", weights_only=False)
    return found.pop("losses"), found


def _start_s(names: Iterable[str]) -> float:
    return LIMIT_S + COMPILE_LIMIT_S * any(CASES[name].nvme for name in names)


if __name__ == "__main__":
    server.main(make_all)
