"""Resumes that read through reshard: what they refuse, on every rank and without a hang.

tests/judged/test_trainer_resume.py proves, with real frameworks, that they have the right state.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import reshard
from tests.trainer import worlds

TINY = {"global_batch": 4, "seq_len": 8, "precision": "fp32", "steps": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Run directories of two ranks, by strategy."""
    base = tmp_path_factory.mktemp("saved")
    forms = {"zero2": {}, "fsdp": {"state_dict_type": "local"}, "fsdp2": {"sharded_files": "rank"}}
    jobs = [
        {**TINY, **form, "strategy": name, "save": f"{base}/{name}", "log": f"{base}/{name}.jsonl"}
        for name, form in forms.items()
    ]
    worlds.train_on(2, jobs)
    return base


def test_flat_parameters_of_two_ranks_go_on_at_three(saved, tmp_path):
    """The three strategies have seen the same samples; FSDP adds gradients in another order."""
    jobs = [
        {
            **TINY,
            "global_batch": 12,
            "resume": str(saved / name),
            "strategy": strategy,
            "steps": 2,
            "state_dict_type": "sharded",
            "sharded_files": "dcp",
            "save": f"{tmp_path}/{name}",
            "log": f"{tmp_path}/{name}.jsonl",
        }
        for name, strategy in (("zero2", "fsdp2"), ("fsdp", "zero3"), ("fsdp2", "fsdp"))
    ]
    for each in worlds.train_on(3, jobs):
        values = [run.values()[0] for run in each]
        assert values == pytest.approx([values[0]] * 3, rel=1e-6)


def damage(directory, name):
    """Flip a bit in the middle of a file, which is in the bytes of a tensor."""
    (path,) = directory.rglob(name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_reshard_refuses_is_an_error_on_every_rank(saved, tmp_path):
    reshard.merge(saved / "zero2", tmp_path / "weights")
    reshard.split(saved / "fsdp2", tmp_path / "damaged")
    damage(tmp_path / "damaged", "optimizer_0_rank1.bin")
    (tmp_path / "empty").mkdir()
    expected = {
        "weights": "optimizer",
        "damaged": "optimizer_0_rank1.bin",
        "empty": "is not a checkpoint, and has no file 'latest'",
        "nothing": "does not exist",
    }
    jobs = [
        {**TINY, "strategy": "zero2", "steps": 2, "resume": str(tmp_path / name), "log": None}
        for name in expected
    ]
    for each in worlds.run(2, worlds.try_to_train, jobs):
        for (code, message), words in zip(each, expected.values(), strict=True):
            assert code == 3
            assert words in message
            assert "/reshard-" not in message, "the names are in a temporary directory"


def test_the_state_of_another_optimizer_is_refused(saved, tmp_path):
    import torch

    pytest.importorskip("deepspeed")  # the files hold pickled objects of its classes
    run = tmp_path / "run"
    reshard.split(saved / "zero2", run)
    for path in Path(run).rglob("*_optim_states.pt"):
        state = torch.load(path, weights_only=False)
        for slot in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            del slot["exp_avg_sq"]
        torch.save(state, path)
    (each, _) = worlds.run(
        2, worlds.try_to_train, [{**TINY, "steps": 2, "resume": str(run), "log": None}]
    )
    assert each[0][0] == 3
    assert "AdamW needs" in each[0][1]
