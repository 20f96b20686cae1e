"""Training that stops at three ranks, is split, and goes on: every strategy into every strategy."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import reshard
from tests.trainer import worlds

STEPS, END = 2, 3
COMMON = {
    "global_batch": 6,
    "micro_batch": 1,
    "seq_len": 8,
    "schedule_steps": END,
    "param_groups": "single",
}
TURNS = (1, 2, 3) * 3 + (6,)  # many ranks are slow on few cores
RUNS = {  # flags of the trainer
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "fsdp full": {"strategy": "fsdp", "state_dict_type": "full"},
    "fsdp sharded": {"strategy": "fsdp", "state_dict_type": "sharded"},
    "fsdp local": {
        "strategy": "fsdp",
        "state_dict_type": "local",
        "fsdp_use_orig_params": False,
    },
    "fsdp2 sharded": {"strategy": "fsdp2", "state_dict_type": "sharded"},
    "fsdp2 ranks": {"strategy": "fsdp2", "state_dict_type": "sharded", "sharded_files": "rank"},
}
UNSAID = {"fsdp_use_orig_params": True, "sharded_files": "dcp"}  # or a resumed run inherits them
WRITTEN = {  # options of reshard for what that resumes from
    **{f"zero{stage}": {"to": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)},
    "ddp": {"to": "deepspeed", "zero_stage": 0},
    "fsdp full": {"to": "fsdp", "state_dict_type": "full"},
    "fsdp sharded": {"to": "fsdp", "state_dict_type": "sharded"},
    "fsdp local": {"to": "fsdp", "state_dict_type": "local"},
    "fsdp2 sharded": {"to": "fsdp", "state_dict_type": "sharded"},
    "fsdp2 ranks": {"to": "fsdp", "rank_files": True, "device": "cpu"},
}
EXACT = ("ddp", "zero1", "zero2", "zero3")  # their sums do not depend on the number of ranks
NOISE = 1e-5  # relative: torch's FSDP adds in another order
WRAP = "LlamaDecoderLayer"

pytestmark = pytest.mark.judge


def job(place, **changes):
    name = f"{place}/{'-'.join(map(str, changes.values())).replace('/', '_')}"
    return {**COMMON, "precision": "fp32", "save": name, "log": f"{name}.jsonl", **changes}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return all steps, on one rank."""
    place = tmp_path_factory.mktemp("unbroken")
    return worlds.train_on(1, [job(place, strategy="ddp", steps=END)])[0][0]


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Return strategy -> what three ranks saved half-way, with one param group."""
    place = tmp_path_factory.mktemp("halves")
    jobs = {name: job(place, **run, steps=STEPS) for name, run in RUNS.items()}
    worlds.train_on(3, list(jobs.values()))
    return {name: chosen["save"] for name, chosen in jobs.items()}


def routes(world):
    """Return the pairs of strategies whose turn is at that number of ranks."""
    pairs = list(itertools.permutations(RUNS, 2))  # test_split_stays has those of one strategy
    spread = {pair: TURNS[number % len(TURNS)] for number, pair in enumerate(pairs)}
    return [pair for pair, chosen in spread.items() if chosen == world]


@pytest.mark.parametrize("world", sorted(set(TURNS)))
def test_every_strategy_into_every_other(halves, unbroken, tmp_path, world):
    jobs = {}
    for source, target in routes(world):
        place = tmp_path / f"{source}-{target}".replace(" ", "_")
        options = {}
        if "local" in source or "local" in target:
            (config,) = {path.parent for path in Path(halves[source]).rglob("config.json")}
            options = {"model": str(config), "wrap": WRAP}
        reshard.split(halves[source], place, world_size=world, **WRITTEN[target], **options)
        jobs[source, target] = {
            "resume": str(place),
            "steps": END,
            "save": f"{place}-on",
            "is_saved": False,
            "log": f"{place}.jsonl",
            **UNSAID,
            **RUNS[target],
        }
    reported = worlds.train_on(world, list(jobs.values()))[0]
    rest = [float.fromhex(loss) for loss in unbroken.losses[STEPS:]]
    for (source, target), run in zip(jobs, reported, strict=True):
        if source in EXACT and target in EXACT:
            assert run.losses == unbroken.losses[STEPS:], (source, target)
            assert run.digest == unbroken.digest, (source, target)
        else:
            assert run.values() == pytest.approx(rest, rel=NOISE), (source, target)
