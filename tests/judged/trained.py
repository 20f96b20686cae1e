"""Runs of the real Trainer of transformers, which the tests resume."""

from __future__ import annotations

from tests.judges import server

JUDGE = server.Judge("tests.judges.resume_worker", "Trainer", {}, like=server.DEEPSPEED)
SAVED = 3  # as `resume_worker.SAVED`, which imports transformers


def train(place, runs):
    """Train each run at two ranks.

    Returns:
        name -> the checkpoint, and the run's state there and its next losses.
    """
    found = JUDGE.run(place, {name: (2, told) for name, told in runs.items()})
    for name, seen in found.items():
        assert isinstance(seen, dict), (name, seen)
    return {name: (place / name / "run" / f"checkpoint-{SAVED}", found[name]) for name in runs}
