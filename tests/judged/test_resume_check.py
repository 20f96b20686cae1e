"""`resume-check` with the real frameworks: the scripts in examples/resume_check.

Each trains at two ranks, saves, and goes on from what `split` wrote at one and at two. The ranks
are forks of a process that has imported the frameworks (`tests.support.forked`, in
torchrun's place).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import reshard
from tests.judges import server
from tests.support import forked
from tests.trainer import worlds

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "resume_check"
JUDGES = ROOT / "tests" / "judges"
STEP, MORE = 4, 4
OPTIONS = "--resume {checkpoint} --steps {steps} --losses {log} --zero-stage {zero_stage}"


@pytest.fixture(scope="module")
def launch():
    """Return (ranks, script, arguments) -> a command that runs the script on that many ranks."""
    path = server.start_fork_server(server.DEEPSPEED)
    return lambda ranks, *words: " ".join(map(str, [*forked.build_command(path, ranks), *words]))


@pytest.fixture(scope="module")
def trained(launch, tmp_path_factory):
    """Return script -> the directory where it saved after four steps, and the log of all eight."""

    def train(name, *words):
        place = tmp_path_factory.mktemp(name)
        options = f"--steps {STEP + MORE} --save {place}/run --save-after {STEP}"
        command = launch(2, *words, options, f"--losses {place}/log.jsonl")
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return place

    scripts = {
        "deepspeed": [SCRIPTS / "deepspeed_train.py"],
        "accelerate": [JUDGES / "on_cpu.py", SCRIPTS / "accelerate_train.py"],
        "trainer": [SCRIPTS / "trainer_train.py"],
    }
    kept: dict[str, Path] = {}
    return lambda name: (
        kept.setdefault(name, kept.get(name) or train(name, *scripts[name])),
        " ".join(map(str, scripts[name])),
    )


def levels(report):
    """Return target -> the levels that it reached; bitwise only where no sum changes its order."""
    found = {}
    for target in report.to_dict()["targets"]:
        reached = {level for level, is_reached in target["reached"].items() if is_reached}
        if target["ranks"] != 2 or "stage 3" in target["name"]:
            reached.discard("bitwise")  # another order of sums: equal by luck at most
        found[target["name"]] = reached
    return found


def find_worst(report, number):
    """Return the largest relative difference of a target's losses."""
    return report.targets[number].trajectory.loss.max_rel


ALL = {"state", "trajectory", "bitwise"}
MOST = {"state", "trajectory"}


def test_deepspeed_continues_at_other_ranks_and_stages(trained, launch):
    place, script = trained("deepspeed")
    options = {
        "command": launch("{world_size}", script, OPTIONS),
        "unbroken": place / "log.jsonl",
        "steps": MORE,
    }
    same = reshard.resume_check(place / "run", world_sizes=[1, 2], **options)
    assert levels(same) == {
        "deepspeed stage 2, 1 rank": MOST,
        "deepspeed stage 2, 2 ranks": ALL,
    }
    other = reshard.resume_check(
        place / "run", world_sizes=[2], zero_stage=3, control=True, **options
    )
    assert levels(other) == {"deepspeed stage 3, 2 ranks": MOST}
    assert find_worst(same, 0) < 5e-4  # bf16
    assert find_worst(other, 0) < 5e-4  # stage 3 adds a bias after rounding
    lost = other.control.trajectory.loss.max_rel
    assert (other.control.wiped, other.noise.rounded) == ("exp_avg of embed.weight", 15)
    assert 1e-4 <= other.rtol < 2e-3 < lost


def test_the_unbroken_run_continues_like_the_training(trained, launch):
    """Started without the training's log, which is then another witness."""
    place, script = trained("deepspeed")
    command = launch("{world_size}", script, OPTIONS)
    report = reshard.resume_check(place / "run" / f"global_step{STEP}", command=command)
    assert levels(report) == {"deepspeed stage 2, 2 ranks": ALL}
    log = reshard.checks.trajectory.read(place / "log.jsonl").between(STEP, STEP + MORE)
    assert report.unbroken.points == log.points


def test_a_script_that_loads_no_optimizer_gets_no_verdict(trained, launch, tmp_path):
    place, _ = trained("deepspeed")
    text = (SCRIPTS / "deepspeed_train.py").read_text()
    loads = "engine.load_checkpoint(chosen.resume)"
    assert loads in text
    forgets = loads.replace(")", ", load_optimizer_states=False)")
    (tmp_path / "forgetful.py").write_text(text.replace(loads, forgets))
    (tmp_path / "common.py").write_text((SCRIPTS / "common.py").read_text())
    report = reshard.resume_check(
        place / "run",
        command=launch("{world_size}", tmp_path / "forgetful.py", OPTIONS),
        unbroken=place / "log.jsonl",
    )
    assert report.exit_code == 1
    assert levels(report) == {"deepspeed stage 2, 2 ranks": {"state"}}


LOST = {
    "nothing": "",
    "a moment": "[*optimizer.state.values()][5]['exp_avg'].zero_()",
    "the weight decay": "optimizer.param_groups[0]['weight_decay'] = 0.0",
}


def test_one_lost_moment_or_setting_is_noticed_in_fp32(trained, launch, tmp_path):
    """The script loses it after each resume, and the log is that of the run that continued."""
    place, _ = trained("accelerate")
    text = (SCRIPTS / "accelerate_train.py").read_text()
    loads = "accelerator.load_state(chosen.resume)  # accelerator.step too"
    assert loads in text
    (tmp_path / "common.py").write_text((SCRIPTS / "common.py").read_text())
    found = {}
    for name, line in LOST.items():
        lossy = tmp_path / f"{name.replace(' ', '_')}.py"
        lossy.write_text(text.replace(loads, f"{loads}\n        {line}"))
        found[name] = reshard.resume_check(
            place / "run",
            world_sizes=[1],
            steps=MORE,
            command=launch(
                "{world_size}", JUDGES / "on_cpu.py", lossy, OPTIONS.partition(" --zero")[0]
            ),
            unbroken=place / "log.jsonl",
        )
    assert {name: report.reached for name, report in found.items()} == {
        name: name == "nothing" for name in LOST
    }
    assert all(report.rtol < 5e-6 for report in found.values())


def test_accelerate_continues_with_fsdp_2_at_other_ranks(trained, launch):
    place, script = trained("accelerate")
    report = reshard.resume_check(
        place / "run",
        world_sizes=[1, 2],
        steps=MORE,
        command=launch("{world_size}", script, OPTIONS.partition(" --zero")[0]),
        unbroken=place / "log.jsonl",
        control=True,
    )
    # one rank loses "state" with the random states of two, from which nothing is drawn here
    assert levels(report) == {
        "accelerate sharded, 1 rank": {"trajectory"},
        "accelerate sharded, 2 ranks": ALL,
    }
    assert find_worst(report, 0) < 5e-7
    assert report.targets[0].tensors_equal


def test_the_trainer_of_transformers_continues_at_other_ranks(trained, launch):
    """Its configuration says nothing of clipping, and DeepSpeed clips to 1 all the same."""
    place, script = trained("trainer")
    report = reshard.resume_check(
        place / "run" / f"checkpoint-{STEP}",
        world_sizes=[1, 2],
        steps=MORE,
        command=launch("{world_size}", script, OPTIONS),
        unbroken=place / "log.jsonl",
    )
    assert levels(report) == {
        "deepspeed stage 2, 1 rank": {"trajectory"},
        "deepspeed stage 2, 2 ranks": ALL,
    }
    assert find_worst(report, 0) < 1e-6


def test_our_trainer_continues_with_its_own_settings(tmp_path, monkeypatch):
    """Saved by two ranks; DeepSpeed's layout and FSDP's whole files, each at one."""
    python = forked.write_python(server.start_fork_server(server.DEEPSPEED), tmp_path)
    log = tmp_path / "log.jsonl"
    settings = {
        "strategy": "zero2",
        "steps": STEP + 2,
        "save_every": STEP,
        "save": str(tmp_path / "run"),
        "log": str(log),
        "global_batch": 4,
        "seq_len": 16,
    }
    worlds.train_on(2, [settings])
    monkeypatch.setattr(sys, "executable", python[forked.PYTHON])
    monkeypatch.setenv(forked.PYTHON, python[forked.PYTHON])
    report = reshard.resume_check(
        tmp_path / "run",
        tag=f"global_step{STEP}",
        world_sizes=[1],
        to=["deepspeed", "fsdp"],
        state_dict_type="full",
        steps=2,
        unbroken=log,
    )
    native, whole = report.targets
    assert all(report.reaches(native, level) for level in ALL)  # the trainer's canonical sums
    assert native.trajectory.parameters is True
    assert report.reaches(whole, "trajectory")
