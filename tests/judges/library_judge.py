"""Make checkpoints with training libraries, each with a file of the expected state.

``make_all(out)`` gives a directory per case::

    out/<case>/ckpt/        what the library wrote; a user gives ``ckpt/<case.source>``
    out/<case>/expected.pt  what the live objects held, see ``library_state.read_state``
    out/not_made.json       case -> the import that failed, where a library is not here

or ``python -m tests.judges.library_judge OUT [case ...]``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.judges import server
from tests.judges.library_cases import CASES
from tests.judges.server import NOT_HERE, CaseResult, JudgeError

__all__ = ["CASES", "NOT_HERE", "CaseResult", "JudgeError", "make_all"]

JUDGE = server.Judge("tests.judges.library_worker", "library", CASES, like=server.DEEPSPEED)


def make_all(out: Path, names: Iterable[str] | None = None) -> dict[str, CaseResult]:
    """Make the named cases, or all, without those that no library writes; see ``Judge.make``."""
    return JUDGE.make(out, [n for n in (CASES if names is None else names) if CASES[n].writable])


if __name__ == "__main__":
    server.main(make_all)
