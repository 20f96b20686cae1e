"""Saves in the background write the same bytes, of the step at which they were asked for."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import reshard
from tests.trainer import worlds

TINY = {
    "global_batch": 4,
    "seq_len": 8,
    "steps": 3,
    "save_every": 1,
    "precision": "bf16",
    "tie_embeddings": True,
}
FORMS = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3", "freeze": (r"layers\.0\.mlp\.up",)},
    "fsdp dcp": {"strategy": "fsdp", "state_dict_type": "sharded"},
    "fsdp full": {"strategy": "fsdp", "state_dict_type": "full"},
    "fsdp local": {"strategy": "fsdp", "state_dict_type": "local", "tie_embeddings": False},
    "fsdp2 dcp": {"strategy": "fsdp2", "state_dict_type": "sharded"},
    "fsdp2 ranks": {"strategy": "fsdp2", "sharded_files": "rank"},
}


def job(place, name, **changes):
    path = f"{place}/{name}"
    return {**TINY, **FORMS[name], **changes, "save": path, "log": f"{path}.jsonl"}


def save_at_once(ranks, jobs):
    """Train with the random states, which Megatron-LM's files have, that `save_slowly` sets."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - what Megatron-LM saves
    return worlds.train(ranks, jobs)


def save_slowly(ranks, jobs):
    """Train with saves that are still being written while later steps run."""
    from trainer.checkpoint import contents

    write = contents.TorchFile.write

    def write_later(self, directory, ranks):
        time.sleep(0.05)
        write(self, directory, ranks)

    contents.TorchFile.write = write_later
    return save_at_once(ranks, jobs)


@pytest.mark.slow
def test_the_files_are_those_of_a_save_that_training_waits_for(tmp_path):
    waiting = [job(tmp_path / "a", name) for name in FORMS]
    background = [job(tmp_path / "b", name, async_save=True) for name in FORMS]
    ends = worlds.run(2, save_at_once, waiting)
    assert worlds.run(2, save_slowly, background) == ends
    for name in FORMS:
        for step in range(1, TINY["steps"] + 1):
            one, other = (tmp_path / each / name / f"global_step{step}" for each in "ab")
            assert {path.name for path in one.rglob("*")} == {p.name for p in other.rglob("*")}
            assert reshard.diff(one, other).same, (name, step)
            for path in one.glob("*.pt"):  # DeepSpeed's; others may refer to one list twice
                assert path.read_bytes() == (other / path.name).read_bytes(), path
    assert not list(tmp_path.rglob(".global_step*"))


def test_a_save_is_of_its_own_step(tmp_path):
    """A run that goes on from each of its saves ends as it did itself."""
    (whole,) = worlds.run(2, save_slowly, [job(tmp_path, "fsdp2 dcp", async_save=True)])[0]
    jobs = []
    for step in (1, 2):
        path = Path(tmp_path, f"from {step}")
        shutil.copytree(tmp_path / "fsdp2 dcp", path)
        jobs.append(
            {"resume": str(path), "tag": str(step), "steps": TINY["steps"], "log": f"{path}.jsonl"}
        )
    for rest in worlds.run(2, worlds.train, jobs)[0]:
        assert rest.digest == whole.digest


def fail_at(ranks, job, step):
    """Return the error of a run whose rank 1 cannot write one of its saves."""
    from trainer.checkpoint import files

    save = files.save

    def save_or_fail(value, path, **options):
        if ranks.rank == 1 and f"global_step{step}." in str(path):
            raise OSError(28, "No space left on device")
        save(value, path, **options)

    files.save = save_or_fail
    return worlds.try_to_train(ranks, [job])


def test_a_save_that_fails_ends_the_run_on_every_rank_and_the_one_before_is_whole(tmp_path):
    chosen = job(tmp_path, "zero2", async_save=True)
    for ((_, message),) in worlds.run(2, fail_at, chosen, 3):
        assert "rank 1 could not write its part of the checkpoint" in message
    assert (tmp_path / "zero2/latest").read_text() == "global_step2"
