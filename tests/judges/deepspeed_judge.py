"""Make checkpoints with real DeepSpeed.

``make_all(out)`` gives a directory per case::

    out/<case>/run/         what DeepSpeed saved (``latest`` and the tag directory)
    out/<case>/universal/   for some: DeepSpeed's own universal conversion of it
    out/<case>/expected.pt  what the live engine held, see ``deepspeed_train.describe``

or ``python -m tests.judges.deepspeed_judge OUT [case ...]``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tests.judges import server
from tests.judges.deepspeed_cases import CASES
from tests.judges.server import CaseResult, JudgeError
from tests.support.programs import LIMIT_S

__all__ = ["CASES", "CaseResult", "JudgeError", "make_all"]

COMPILE_LIMIT_S = 1200.0
JUDGE = server.Judge(
    server.DEEPSPEED, "DeepSpeed", CASES, like=server.DEEPSPEED, result=server.EXPECTED
)


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


def _start_s(names: Iterable[str]) -> float:
    return LIMIT_S + COMPILE_LIMIT_S * any(CASES[name].nvme for name in names)


if __name__ == "__main__":
    server.main(make_all)
