"""Train, ``reshard split``, resume: a run of the trainer stays one, in every form that it saves."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import reshard
from tests.trainer import worlds
from trainer.core.errors import SettingsError
from trainer.resolve import resolve

STEPS, END = 1, 2
COMMON = {
    "global_batch": 6,
    "micro_batch": 1,
    "seq_len": 8,
    "schedule_steps": END,
    "precision": "fp32",
}
FLAT = {"fsdp_use_orig_params": False, "param_groups": "single"}
RANKS = {"state_dict_type": "sharded", "sharded_files": "rank"}
FORMS = {
    "full": {"state_dict_type": "full"},
    "sharded": {"state_dict_type": "sharded"},
    "ranks": RANKS,
    "local": {"state_dict_type": "local"},
}
ZERO = {name: {"strategy": name} for name in ("ddp", "zero1", "zero2", "zero3")}
RUNS = {
    **ZERO,
    **{f"fsdp {form}": {"strategy": "fsdp", **chosen} for form, chosen in FORMS.items()},
    **{f"flat {form}": {"strategy": "fsdp", **chosen, **FLAT} for form, chosen in FORMS.items()},
    **{f"fsdp2 {form}": {"strategy": "fsdp2", **chosen} for form, chosen in FORMS.items()},
}
OLD, NEW = 2, 3  # ranks; test_split has more, from three ranks
NOISE = 1e-6  # relative, of losses: torch's FSDP adds in another order at another number of ranks

pytestmark = pytest.mark.judge


def job(place, name, **changes):
    path = f"{place}/{name.replace(' ', '_')}"
    return {**COMMON, **RUNS[name], "save": path, "log": f"{path}.jsonl", **changes}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return whether there is one param group -> all steps, on one rank."""
    groups = {False: {}, True: {"param_groups": "single"}}
    jobs = [
        job(tmp_path_factory.mktemp("unbroken"), "ddp", steps=END, **each)
        for each in groups.values()
    ]
    return dict(zip(groups, worlds.train_on(1, jobs)[0], strict=True))


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Return form -> the run that was saved half-way."""
    place = tmp_path_factory.mktemp("halves")
    jobs = {name: job(place, name, steps=STEPS) for name in RUNS}
    worlds.train_on(OLD, list(jobs.values()))
    return {name: Path(chosen["save"]) for name, chosen in jobs.items()}


def resumed(path, log):
    return {"resume": str(path), "steps": END, "log": f"{log}.jsonl", "is_saved": False}


def test_every_form_is_split_and_goes_on(halves, unbroken, tmp_path):
    """The end is that of the whole run: bitwise for ZeRO, within FSDP's noise for FSDP.

    Between FSDP's forms it is bitwise, too: DCP, which needs no split, says what it is.
    """
    jobs = {}
    for name, run in halves.items():
        out = tmp_path / name.replace(" ", "_")
        report = reshard.split(run, out, world_size=NEW)
        assert report.load_line == f"python -m trainer --resume {out} --nproc {NEW}", name
        assert (out / "latest").read_text() == f"global_step{STEPS}"
        assert (out / f"global_step{STEPS}" / "trainer_state.json").exists()
        assert reshard.diff(run, out).same, name
        jobs[name] = resumed(out, out)
    for name in ("fsdp sharded", "flat sharded", "fsdp2 sharded"):
        kind = name.split()[0]
        jobs[kind] = resumed(halves[name], tmp_path / kind) | {"save": f"{tmp_path}/{kind}"}
    ends = dict(zip(jobs, worlds.train_on(NEW, list(jobs.values()))[0], strict=True))
    for name in RUNS:
        whole = unbroken[name.startswith("flat")]
        if name in ZERO:
            assert ends[name].losses == whole.losses[STEPS:], name
            assert ends[name].digest == whole.digest, name
        else:
            assert ends[name].values() == pytest.approx(whole.values()[STEPS:], rel=NOISE), name
            assert ends[name].digest == ends[name.split()[0]].digest, name


@pytest.mark.parametrize(("name", "fits"), [("zero3", True), ("fsdp2 full", False)])
def test_a_batch_that_the_ranks_do_not_divide_is_told_where_the_trainer_refuses_it(
    name, fits, halves, tmp_path
):
    report = reshard.split(halves[name], tmp_path / "out", world_size=5)
    assert any("is not divisible by 5 ranks" in text for text in report.warnings) == (not fits)
    refused = contextlib.nullcontext() if fits else pytest.raises(SettingsError, match="by 5 ranks")
    with refused:
        resolve({**COMMON, **RUNS[name]}, 5)


def test_the_global_batch_of_a_run_with_idle_ranks_stays(tmp_path):
    """On 4 ranks, the second round of the 6 micro batches of a step has only 2."""
    run = job(tmp_path, "zero2", steps=STEPS)
    worlds.train_on(4, [run])
    report = reshard.split(run["save"], tmp_path / "out", world_size=1)
    assert "gradient_accumulation_steps 2 -> 6: the global batch stays 6" in report.derived
    assert not report.warnings


@pytest.mark.parametrize("name", ["zero3", "flat local"])
def test_the_three_commands_as_typed(tmp_path, name):
    run, out = f"{tmp_path}/run", f"{tmp_path}/out"
    flags = [
        f"--{'' if value is not False else 'no-'}{key.replace('_', '-')}{_of(value)}"
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


def _of(value):
    return "" if isinstance(value, bool) else f"={value}"
