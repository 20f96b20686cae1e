"""Training that stops at three ranks, is split, and goes on: every strategy into every strategy."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import reshard
from tests.trainer import worlds
from trainer.core.errors import SettingsError
from trainer.resolve import resolve

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
FLAT = {"strategy": "fsdp", "fsdp_use_orig_params": False}
RANKS = {"state_dict_type": "sharded", "sharded_files": "rank"}
FORMS = {  # those that stay as they are
    **RUNS,
    "fsdp ranks": {"strategy": "fsdp", **RANKS},
    "fsdp use local": {"strategy": "fsdp", "state_dict_type": "local"},
    "fsdp2 full": {"strategy": "fsdp2", "state_dict_type": "full"},
    "fsdp2 local": {"strategy": "fsdp2", "state_dict_type": "local"},
    "flat full": {**FLAT, "state_dict_type": "full"},
    "flat sharded": {**FLAT, "state_dict_type": "sharded"},
    "flat ranks": {**FLAT, **RANKS},
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
    """Return form -> what three ranks saved half-way, with one param group."""
    place = tmp_path_factory.mktemp("halves")
    jobs = {name: job(place, **run, steps=STEPS) for name, run in FORMS.items()}
    worlds.train_on(3, list(jobs.values()))
    return {name: chosen["save"] for name, chosen in jobs.items()}


def routes(world):
    """Return the pairs of strategies whose turn is at that number of ranks."""
    pairs = list(itertools.permutations(RUNS, 2))
    spread = {pair: TURNS[number % len(TURNS)] for number, pair in enumerate(pairs)}
    return [pair for pair, chosen in spread.items() if chosen == world]


def resumed(path, name=""):
    log = f"{path}{name}.jsonl"
    return {"resume": str(path), "steps": END, "save": f"{path}-on", "log": log, "is_saved": False}


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
        jobs[source, target] = {**resumed(place), **UNSAID, **RUNS[target]}
    reported = worlds.train_on(world, list(jobs.values()))[0]
    rest = [float.fromhex(loss) for loss in unbroken.losses[STEPS:]]
    for (source, target), run in zip(jobs, reported, strict=True):
        if source in EXACT and target in EXACT:
            assert run.losses == unbroken.losses[STEPS:], (source, target)
            assert run.digest == unbroken.digest, (source, target)
        else:
            assert run.values() == pytest.approx(rest, rel=NOISE), (source, target)


def test_a_run_of_the_trainer_stays_one_in_every_form(halves, unbroken, tmp_path):
    """Between the forms of FSDP the bits are equal, too: DCP, which needs no split, has them."""
    jobs = {}
    for name, run in halves.items():
        out = tmp_path / name.replace(" ", "_")
        report = reshard.split(run, out, world_size=2)
        assert report.load_line == f"python -m trainer --resume {out} --nproc 2", name
        assert (out / "latest").read_text() == f"global_step{STEPS}"
        assert (out / f"global_step{STEPS}" / "trainer_state.json").exists()
        assert reshard.diff(run, out).same, name
        jobs[name] = resumed(out)
    for name in ("fsdp sharded", "flat sharded", "fsdp2 sharded"):
        jobs[name.split()[0]] = resumed(halves[name], "-unsplit")
    ends = dict(zip(jobs, worlds.train_on(2, list(jobs.values()))[0], strict=True))
    rest = [float.fromhex(loss) for loss in unbroken.losses[STEPS:]]
    for name in FORMS:
        if name in EXACT:
            assert ends[name].losses == unbroken.losses[STEPS:], name
            assert ends[name].digest == unbroken.digest, name
        else:
            kind = "flat" if name == "fsdp local" else name.split()[0]
            assert ends[name].values() == pytest.approx(rest, rel=NOISE), name
            assert ends[name].digest == ends[kind].digest, name


@pytest.mark.parametrize(("name", "fits"), [("zero3", True), ("fsdp2 full", False)])
def test_a_batch_that_the_ranks_do_not_divide_is_told_where_the_trainer_refuses_it(
    name, fits, halves, tmp_path
):
    report = reshard.split(halves[name], tmp_path / "out", world_size=5)
    assert any("is not divisible by 5 ranks" in text for text in report.warnings) == (not fits)
    refused = contextlib.nullcontext() if fits else pytest.raises(SettingsError, match="by 5 ranks")
    with refused:
        resolve({**COMMON, **FORMS[name]}, 5)


def test_the_global_batch_of_a_run_with_idle_ranks_stays(tmp_path):
    """On 4 ranks, the second round of the 6 micro batches of a step has only 2."""
    run = job(tmp_path, strategy="zero2", steps=STEPS)
    worlds.train_on(4, [run])
    report = reshard.split(run["save"], tmp_path / "out", world_size=1)
    assert "gradient_accumulation_steps 2 -> 6: the global batch stays 6" in report.derived
    assert not report.warnings


@pytest.mark.parametrize("name", ["zero3", "fsdp local"])
def test_the_three_commands_as_typed(tmp_path, name):
    run, out = f"{tmp_path}/run", f"{tmp_path}/out"
    flags = [
        f"--{'' if value is not False else 'no-'}{key.replace('_', '-')}"
        + ("" if isinstance(value, bool) else f"={value}")
        for key, value in {**COMMON, **RUNS[name]}.items()
    ]
    worlds.command(2, [*flags, "--steps", "1", "--save", run])
    command = [sys.executable, "-m", "reshard", "split", run, out, "--world-size", "3"]
    subprocess.run(command, check=True, capture_output=True)
    printed = worlds.command(3, ["--resume", out, "--steps", "2"])
    assert f"saved {out}/global_step2" in printed
    document = json.loads(Path(out, "global_step1", "trainer_state.json").read_text())
    assert document["world_size"] == 3  # a resume without --nproc starts as many
    assert document["settings"]["strategy"] == RUNS[name]["strategy"]
