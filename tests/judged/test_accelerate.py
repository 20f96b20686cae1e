"""Real Accelerate runs at 2 ranks, split to other sizes, and resumed there by ``load_state``.

The global batch and the schedule per update are the same at every size, so the losses are, too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import reshard
from tests.judges import accelerate_worker as worker
from tests.judges import server

pytestmark = pytest.mark.slow

JUDGE = server.Judge("tests.judges.accelerate_worker", "Accelerate", {}, like=server.DEEPSPEED)
RUNS = {
    "fsdp2": {"version": 2, "type": "SHARDED"},
    "fsdp1": {"version": 1, "type": "SHARDED"},
    "fsdp1_full": {"version": 1, "type": "FULL"},
    "ddp": {},
    "zero2": {"stage": 2, "hook": True},
    "zero3": {"stage": 3},
}
MODEL = {
    "ddp": {"model": "tests.judges.library_models:net"}
}  # its optimizer is by number; a live model tells
ENGINES = {  # name -> run, ranks of the output, how it is written, how it is resumed
    "zero2 at 1": ("zero2", 1, {}, {"stage": 2}),
    "zero3 at 4": ("zero3", 4, {}, {"stage": 3}),
    "fsdp2 as zero3": (  # DCP does not tell buffers from parameters
        "fsdp2",
        1,
        {"to": "accelerate", "zero_stage": 3, "model": "tests.judges.library_models:net"},
        {"stage": 3},
    ),
}
RESUMED = [*((run, size) for run in ("fsdp2", "ddp") for size in (1, 4)), ("fsdp1_full", 1)]
LOST = "restore no Adam state"  # of the warning about FSDP 1
NOISE = 1e-6  # relative, of another order of summing gradients


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the directory of the runs, and what each saw."""
    place = tmp_path_factory.mktemp("saved")
    seen = JUDGE.run(place, {name: (2, told) for name, told in RUNS.items()})
    for name, found in seen.items():
        assert isinstance(found, dict), (name, found)
    return place, seen


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory):
    """Return what the resumed runs saw, by name and size, and the reports of the splits."""
    place = tmp_path_factory.mktemp("resumed")
    reports, jobs = {}, {}
    for run, size in RESUMED:
        out = place / f"{run} at {size} ranks"
        source = saved[0] / run / "saved"
        reports[run, size] = reshard.split(source, out, world_size=size, **MODEL.get(run, {}))
        jobs[f"{run}-{size}"] = size, {**RUNS[run], "resume": out}
        jobs[f"{run}-{size} live"] = (
            size,
            {**RUNS[run], "resume": source, "live": {}},
        )
    for name, (run, size, options, told) in ENGINES.items():
        out = place / f"{name} rewritten"
        reports[name] = reshard.split(saved[0] / run / "saved", out, world_size=size, **options)
        jobs[name] = size, {**told, "resume": out}
    own = {**RUNS["fsdp1"], "resume": saved[0] / "fsdp1" / "saved"}
    jobs |= {"own": (2, own), "own live": (2, {**own, "live": {}})}
    return JUDGE.run(place, jobs), reports


@pytest.mark.parametrize("how", ["", " live"])
@pytest.mark.parametrize(("run", "size"), RESUMED)
def test_the_run_continues_at_the_same_rates(run, size, how, saved, resumed):
    unbroken, seen = saved[1][run], resumed[0][f"{run}-{size}{how}"]
    assert isinstance(seen, dict), seen
    assert seen["seen"] == worker.SAVED  # the registered object
    assert seen["rates"] == unbroken["rates"][worker.SAVED :]
    assert seen["last_epoch"] == worker.SAVED * size
    assert seen["at_end"] == worker.STEPS * size
    assert seen["losses"] == pytest.approx(unbroken["losses"][worker.SAVED :], rel=NOISE)
    assert seen["moments"] > 0
    assert not [text for text in seen["warnings"] if LOST in text]


@pytest.mark.parametrize("name", ENGINES)
def test_deepspeed_continues_at_the_same_rates(name, saved, resumed):
    """Accelerate's own ``load_state`` finds scheduler, registered object and random states."""
    run, size, _, _ = ENGINES[name]
    unbroken, seen = saved[1][run], resumed[0][name]
    assert isinstance(seen, dict), seen
    assert seen["seen"] == worker.SAVED
    assert seen["rates"] == unbroken["rates"][worker.SAVED :]
    assert seen["last_epoch"] == worker.SAVED * size
    assert seen["losses"] == pytest.approx(unbroken["losses"][worker.SAVED :], rel=NOISE)
    assert "load_state" in resumed[1][name].load_line


def test_models_that_hooks_saved_are_copied(saved, tmp_path):
    """Check that ``load_state`` hooks find their folder, and that other layouts report its loss."""
    source = saved[0] / "zero2/saved"
    reshard.split(source, tmp_path / "three", world_size=3)
    names = {path.name for path in (source / "llama").iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    for name in names:
        copied = tmp_path / "three" / "llama" / name
        assert copied.read_bytes() == (source / "llama" / name).read_bytes()
    report = reshard.split(source, tmp_path / "dcp", to="dcp")
    assert any(text.startswith("llama/ was not copied") for text in report.notes)


def test_files_behind_links_out_of_the_checkpoint_are_not_copied(saved, tmp_path):
    source = Path(shutil.copytree(saved[0] / "zero2/saved", tmp_path / "saved"))
    names = ("custom_checkpoint_0.pkl", "llama/model.safetensors")
    for number, name in enumerate(names):
        (source / name).rename(tmp_path / str(number))
        (source / name).symlink_to(tmp_path / str(number))
    report = reshard.split(source, tmp_path / "three", world_size=3)
    for name in names:
        assert not (tmp_path / "three" / name).exists()
        assert any(f"{Path(name).name} was not copied" in text for text in report.warnings)


def test_the_report_states_what_was_copied_and_what_to_set(resumed):
    report = resumed[1]["fsdp2", 4]
    assert "custom_checkpoint_0.pkl: copied byte for byte" in report.kept
    assert any(text.startswith("scheduler.bin: last_epoch 6 -> 12") for text in report.notes)
    assert any("multiply constants by 2" in text for text in report.notes)


def test_another_framework_is_warned_of_lost_state(saved, tmp_path):
    report = reshard.split(saved[0] / "fsdp2/saved", tmp_path / "out", to="dcp")
    told = [text for text in report.notes if text.startswith("custom_checkpoint_0.pkl")]
    assert len(told) == 1
    assert "start anew" in told[0]


def test_files_of_accelerate_are_the_same_bytes_after_a_round_trip(saved, tmp_path):
    source = saved[0] / "fsdp2/saved"
    reshard.split(source, tmp_path / "three", world_size=3)
    reshard.split(tmp_path / "three", tmp_path / "two", world_size=2)
    name = "custom_checkpoint_0.pkl"
    assert (tmp_path / "two" / name).read_bytes() == (source / name).read_bytes()
    with reshard.open(source) as one, reshard.open(tmp_path / "two") as two:
        assert two.manifest.train.scheduler == one.manifest.train.scheduler
        assert two.manifest.train.client == one.manifest.train.client


def test_sharded_files_of_fsdp_1_lose_the_optimizer_and_the_report_warns(saved, resumed, tmp_path):
    """Accelerate's own directory does; the full form, which the warning names, does not.

    A live load, which has the same warning in its log, refuses to go on.
    """
    source, unbroken = saved[0] / "fsdp1/saved", saved[1]["fsdp1"]
    own, full = resumed[0]["own"], resumed[0]["fsdp1_full-1"]
    assert own["moments"] == 0
    assert own["losses"] != pytest.approx(unbroken["losses"][worker.SAVED :], rel=1e-4)
    assert full["losses"] == pytest.approx(unbroken["losses"][worker.SAVED :], rel=NOISE)
    assert "has no optimizer state in memory after the load" in resumed[0]["own live"]
    report = reshard.split(source, tmp_path / "sharded", world_size=4)
    assert any(LOST in text for text in report.warnings)
    report = reshard.split(source, tmp_path / "full", world_size=4, state_dict_type="full")
    assert not any(LOST in text for text in report.warnings)
    for path in (source, tmp_path / "sharded"):
        seen = reshard.verify(path)
        assert seen.passed
        assert any(LOST in text for text in seen.notes)
