"""Make checkpoints with real PyTorch: FSDP 1 and 2, DCP, DDP and plain files.

``make_all(out)`` gives a directory per case::

    out/<case>/ckpt/        what PyTorch wrote; a user gives ``ckpt/<case.source>``
    out/<case>/expected.pt  the same state as PyTorch reports it, see ``torch_worker.read_state``

or ``python -m tests.judges.torch_judge OUT [case ...]``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.judges import server
from tests.judges.server import CaseResult, JudgeError
from tests.judges.torch_cases import CASES, Case

__all__ = ["CASES", "CaseResult", "JudgeError", "make_all", "writable"]

JUDGE = server.Judge("tests.judges.torch_worker", "PyTorch", CASES, like=server.DEEPSPEED)


def make_all(out: Path, names: Iterable[str] | None = None) -> dict[str, CaseResult]:
    """Make the named cases, or all that can be; see ``server.Judge.make``."""
    return JUDGE.make(out, [n for n in CASES if writable(CASES[n])] if names is None else names)


def writable(case: Case) -> bool:
    """Return whether PyTorch can write the case at all."""
    return not case.expect.startswith("cannot be written")


if __name__ == "__main__":
    server.main(make_all)
