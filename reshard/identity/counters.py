"""Compare the counters of a run with one another: a part that was saved at another step differs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from reshard.manifest import Manifest

_NAMED_STEP = re.compile(r"(?:global_step|checkpoint-|iter_)(\d+)")


def find_counter_conflicts(manifest: Manifest) -> list[str]:
    """Return a sentence for each counter that does not fit the step of the run.

    These are warnings, because a script can have its own way to count: it may skip updates, train a
    part of the model later than the rest, or step its scheduler once an epoch.
    """
    train = manifest.train
    expected = train.updates
    if expected is None:
        return []
    problems = []
    applied = set(train.optimizer_step.values())
    if applied and max(applied) - expected not in train.updates_at_start:
        problems.append(
            f"the optimizer was updated {max(applied):g} times, the run counts {expected}"
        )
    named = _NAMED_STEP.fullmatch(PurePath(manifest.origin.path).name)
    if named and int(named[1]) != train.step:
        problems.append(f"{manifest.origin.path} by its name, step {train.step} inside")
    scheduled = train.scheduler.get("last_epoch") if isinstance(train.scheduler, Mapping) else None
    # HF Trainer steps its scheduler once with each update (transformers 5.23 trainer.py).
    if train.trainer_state is not None and type(scheduled) is int and scheduled != expected:
        problems.append(f"the scheduler is at step {scheduled}, the run counts {expected}")
    return problems
