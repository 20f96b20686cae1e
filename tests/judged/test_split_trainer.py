"""``--to hf-trainer`` and ``--rng``: the real Trainer resumes at the new size and trains on.

Three real runs at 2 ranks (DDP, FSDP 2, DeepSpeed) save at step 3 and go on to step 6; reshard
makes a ``checkpoint-3`` of each for other ranks and other ways to shard, and real Trainers resume.
"""

from __future__ import annotations

import json
import random
import re
import shutil

import numpy as np
import pytest
import torch

import reshard
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.training import rng
from tests.judged.alike import assert_resumed_state
from tests.judged.trained import JUDGE, train
from tests.judges import resume_worker as worker

RUNS = {  # what saves
    "ddp": {"kind": "ddp"},
    "fsdp2": {"kind": "fsdp2", "type": "SHARDED_STATE_DICT"},
    "deepspeed": {"kind": "deepspeed", "stage": 2},
}
TRAINERS = [{"match": "^(?!.*norm)", "weight_decay": 0.1}, {"weight_decay": 0.0}]
RESUMED = {  # name -> which run, ranks, how it is written, how the Trainer resumes
    "ddp at 2": ("ddp", 2, {}, RUNS["ddp"]),
    "ddp at 2, no rng": ("ddp", 2, {"rng": "drop"}, RUNS["ddp"]),
    "ddp at 1": ("ddp", 1, {"rng": "derive"}, {"kind": "one"}),
    "ddp as fsdp2": ("ddp", 2, {"state_dict_type": "sharded"}, RUNS["fsdp2"]),
    "ddp as full": (
        "ddp",
        2,
        {"state_dict_type": "full"},
        {"kind": "fsdp2", "type": "FULL_STATE_DICT"},
    ),
    "fsdp2 at 4": ("fsdp2", 4, {}, RUNS["fsdp2"]),
    "fsdp2 at 1": ("fsdp2", 1, {"state_dict_type": "unsharded", "model": True}, {"kind": "one"}),
    "deepspeed at 2": ("deepspeed", 2, {}, RUNS["deepspeed"]),
    "deepspeed at 2, as saved": ("deepspeed", 2, {"to": None}, RUNS["deepspeed"]),
    "deepspeed at 1, as saved": ("deepspeed", 1, {"to": None}, RUNS["deepspeed"]),
    "deepspeed at 1": ("deepspeed", 1, {"zero_stage": 3}, {"kind": "deepspeed", "stage": 3}),
    "deepspeed as ddp": (
        "deepspeed",
        2,
        {"state_dict_type": "unsharded", "param_groups": TRAINERS},
        RUNS["ddp"],
    ),
    "ddp as deepspeed": (
        "ddp",
        2,
        {"zero_stage": 3},
        {**RUNS["deepspeed"], "stage": 3, "scheduler": "trainer", "optimizer": "trainer"},
    ),
    "deepspeed as fsdp2": ("deepspeed", 2, {"state_dict_type": "sharded"}, RUNS["fsdp2"]),
    "deepspeed as ddp, its own groups": (
        "deepspeed",
        2,
        {"state_dict_type": "unsharded"},
        RUNS["ddp"],
    ),
}
OTHER_GROUPS = "deepspeed as ddp, without a file of groups"
BARE = "deepspeed's own files as ddp"
UNBROKEN = ("ddp at 2", "deepspeed at 2", "deepspeed at 2, as saved")  # nothing has changed
SAME_GENERATORS = (*UNBROKEN, "ddp as fsdp2", "ddp as full", "deepspeed as ddp")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Train the real runs; return their paths, their state at step 3 and their next losses."""
    return train(tmp_path_factory.mktemp("saved"), RUNS)


@pytest.fixture(scope="module")
def written(saved, tmp_path_factory):
    """Split each run; return name -> the report and the run directory."""
    place = tmp_path_factory.mktemp("written")
    groups = place / "groups.json"
    groups.write_text(json.dumps(TRAINERS))
    made = {}
    for name, (run, ranks, how, _) in RESUMED.items():
        options = {"to": "hf-trainer", **how}
        if "param_groups" in options:
            options["param_groups"] = groups
        if options.pop("model", None):
            options["model"] = "tests.judges.resume_worker:model"
        out = place / name
        report = reshard.split(saved[run][0], out, world_size=ranks, **options)
        made[name] = report, out / "checkpoint-3" if options["to"] else out
    return made


@pytest.fixture(scope="module")
def resumed(written, tmp_path_factory):
    """Resume each output; return the state of the real Trainer then, and its next losses."""
    jobs = {
        name: (RESUMED[name][1], {**RESUMED[name][3], "resume": place})
        for name, (_, place) in written.items()
    }
    return JUDGE.run(tmp_path_factory.mktemp("resumed"), jobs)


@pytest.fixture(scope="module")
def live(saved, tmp_path_factory):
    """Resume without files: the Trainer reads what `split` would have written."""
    jobs = {}
    for name, (run, ranks, how, kind) in RESUMED.items():
        options = {key: how[key] for key in ("rng",) if key in how}
        if "param_groups" in how:
            options["param_groups"] = tmp_path_factory.getbasetemp() / "groups.json"
            options["param_groups"].write_text(json.dumps(TRAINERS))
        jobs[name] = (ranks, {**kind, "resume": saved[run][0], "live": options})
    jobs[OTHER_GROUPS] = (2, {**RUNS["ddp"], "resume": saved["deepspeed"][0], "live": {}})
    bare = tmp_path_factory.mktemp("bare")
    shutil.copytree(saved["deepspeed"][0] / "global_step3", bare / "global_step3")
    jobs[BARE] = (2, {**RUNS["ddp"], "resume": bare / "global_step3", "live": {}})
    return JUDGE.run(tmp_path_factory.mktemp("live"), jobs)


@pytest.mark.parametrize("name", RESUMED)
def test_the_trainer_resumes_with_every_bit(name, resumed, saved):
    assert_resumed(resumed[name], saved[RESUMED[name][0]][1])


@pytest.mark.parametrize("name", RESUMED)
def test_the_trainer_resumes_from_what_is_nowhere(name, live, resumed, saved):
    assert_resumed(live[name], saved[RESUMED[name][0]][1])
    assert live[name]["losses"] == resumed[name]["losses"]


def test_the_param_groups_of_the_trainer_need_no_file(live, saved):
    """One group becomes two, which keep the source's hyperparameters."""
    seen, expected = live[OTHER_GROUPS], saved["deepspeed"][1]
    assert_resumed(seen, expected)
    assert [group["weight_decay"] for group in seen["groups"]] == [0.1, 0.1]
    assert seen["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)


def test_a_trainer_without_an_earlier_state_logs_as_its_arguments_say(live):
    """The Trainer takes the interval from ``trainer_state.json``; the job needs every loss."""
    assert isinstance(live[BARE], dict), live[BARE]
    assert live[BARE]["step"] == worker.SAVED


def assert_resumed(seen, expected):
    assert_resumed_state(seen, expected, worker.SAVED)
    assert set(seen["steps"].values()) == set(expected["steps"].values()) == {3.0}
    if "groups" in seen and "groups" in expected:
        for group, wanted in zip(seen["groups"], expected["groups"], strict=True):
            assert sorted(group["params"]) == sorted(wanted["params"])
            for key in ("lr", "weight_decay", "eps"):
                assert group[key] == wanted[key], key
            assert tuple(group["betas"]) == tuple(wanted["betas"])
        assert seen["scheduler"]["last_epoch"] == expected["scheduler"]["last_epoch"]


@pytest.mark.parametrize("name", SAME_GENERATORS)
def test_its_losses_are_those_of_the_unbroken_run(name, resumed, saved):
    run, *_ = RESUMED[name]
    wanted = saved[run][1]["losses"]
    if name in UNBROKEN:
        assert resumed[name]["losses"] == wanted
    if name != "deepspeed as ddp":  # its schedule is made: only the next forward is the same
        assert resumed[name]["losses"] == pytest.approx(wanted, rel=1e-6)
    assert resumed[name]["losses"][0] == pytest.approx(wanted[0], rel=1e-6)


def test_a_run_without_random_states_has_other_losses(resumed, saved):
    """What shows that the losses above depend on them."""
    assert resumed["ddp at 2, no rng"]["losses"] != saved["ddp"][1]["losses"]


def test_the_report_states_what_happened_to_random_states(written):
    for name, kept in (("ddp at 2", "kept"), ("ddp at 1", "derived"), ("fsdp2 at 4", "dropped")):
        told = getattr(written[name][0], kept)
        assert any("random states" in text for text in told), (name, told)
    names = {path.name for path in written["ddp at 1"][1].iterdir()}
    assert "rng_state.pth" in names
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {
        path.name for path in written["ddp at 2"][1].iterdir()
    }


def test_the_batch_of_a_rank_is_adjusted(written):
    for name, batch, said in (("ddp at 1", 4, "2 -> 4"), ("fsdp2 at 4", 1, "2 -> 1")):
        report, place = written[name]
        assert json.loads((place / "trainer_state.json").read_text())["train_batch_size"] == batch
        assert any(said in text for text in report.derived), report.derived
    state = json.loads((written["fsdp2 at 4"][1] / "trainer_state.json").read_text())
    assert state["global_step"] == 3
    assert len(state["log_history"]) == 3


# The global batch

BATCHES = {  # name -> how it trains, micro batch, accumulation, ranks before and after
    "ddp 2 to 1": ("ddp", 3, 1, 2, 1),
    "ddp 2 to 3": ("ddp", 3, 1, 2, 3),
    "ddp 4 to 2": ("ddp", 1, 3, 4, 2),
    "ddp 2 to 3 with other accumulation": ("ddp", 1, 3, 2, 3),
    "fsdp2 4 to 2": ("fsdp2", 3, 1, 4, 2),  # whose files do not state the accumulation
    "deepspeed 2 to 1": ("deepspeed", 3, 2, 2, 1),
}
PRINTED, OLD, FILE = "printed", "old", "old, from the file"


def arguments(micro, steps, **others):
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": steps,
        **others,
    }


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """Return name -> the unbroken run, and what each continuation saw, and was told."""
    place = tmp_path_factory.mktemp("batches")
    jobs = {}
    for name, (run, micro, steps, before, _) in BATCHES.items():
        kind = {**RUNS[run], "family": "exact", "global_batch": micro * steps * before}
        jobs[name] = before, {**kind, "arguments": arguments(micro, steps)}
    unbroken = JUDGE.run(place, jobs)
    later, told = {}, {}
    for name, (_, micro, steps, _, after) in BATCHES.items():
        source, out = place / name / "run/checkpoint-3", place / f"{name} written"
        how = {"state_dict_type": "sharded"} if "fsdp2" in name else {}
        told[name] = reshard.split(source, out, world_size=after, to="hf-trainer", **how)
        (advice,) = [each for each in told[name].warnings if "keep the global batch" in each]
        pairs = re.search(r"per_device_train_batch_size (\d+) and (.*?) to the", advice)
        printed = int(pairs[1]), int((re.findall(r"\d+$", pairs[2]) or [steps])[0])
        file = json.loads((out / "checkpoint-3/trainer_state.json").read_text())
        assert file["train_batch_size"] == printed[0]
        kind = {**jobs[name][1], "resume": out / "checkpoint-3"}
        live = {**kind, "resume": source, "live": {}}
        ways = {PRINTED: arguments(*printed), OLD: arguments(micro, steps)}
        for way, chosen in ways.items():
            later[name, way] = after, {**kind, "arguments": chosen}
            if "ddp 2 to 3" not in name:
                later[name, f"live, {way}"] = after, {**live, "arguments": chosen}
        if printed[1] == steps and "ddp" in name:
            chosen = arguments(micro, steps, auto_find_batch_size=True)
            later[name, FILE] = after, {**kind, "arguments": chosen}
            later[name, f"live, {FILE}"] = after, {**live, "arguments": chosen}
    named = {" ".join(key): job for key, job in later.items()}
    found = JUDGE.run(place / "later", named)
    return unbroken, dict(zip(later, (found[" ".join(key)] for key in later), strict=True)), told


@pytest.mark.parametrize("name", BATCHES)
def test_the_arguments_of_the_report_keep_samples_and_losses(name, batches):
    """The old arguments do not, unless the Trainer takes the batch from the file."""
    unbroken, continued, _ = batches
    wanted = unbroken[name]
    assert isinstance(wanted, dict), wanted
    for (run, way), seen in continued.items():
        if run != name:
            continue
        assert isinstance(seen, dict), (way, seen)
        is_kept = OLD not in way or FILE in way
        assert (seen["samples"] == wanted["samples"]) == is_kept, way
        if is_kept:
            assert seen["losses"] == pytest.approx(wanted["losses"], rel=1e-6), way
        is_told = any("global batch" in each for each in seen["warnings"])
        assert is_told == ("live" in way and not is_kept), way


def test_the_report_says_which_optimizer_deepspeed_may_not_make(written):
    report, _ = written["ddp as deepspeed"]
    assert any("leave optimizer and scheduler out" in text for text in report.notes)
    clips = {name: any("1.0 by default" in t for t in written[name][0].notes) for name in RESUMED}
    assert [name for name, is_told in clips.items() if is_told] == ["ddp as deepspeed"]


def test_a_missing_trainer_state_is_created(made, tmp_path):
    report = reshard.split(
        made / "z2_groups_decay/run", tmp_path / "out", to="hf-trainer", state_dict_type="unsharded"
    )
    state = json.loads((tmp_path / "out/checkpoint-3/trainer_state.json").read_text())
    assert (state["global_step"], state["train_batch_size"]) == (3, 6)
    for text in ("trainer_state.json is created", "scheduler.pt is created"):
        assert any(text in note for note in report.notes)


# Random states


def read_random_states():
    """Return the present random states of Python, numpy and torch."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - what the libraries save
    return random.getstate(), numpy, torch.get_rng_state()


@pytest.fixture
def loaded():
    """Load a rank's random states with Accelerate; restore those of this process."""
    from accelerate import PartialState
    from accelerate.checkpointing import load_accelerator_state

    PartialState(cpu=True)  # it logs
    before = read_random_states()

    def load(place, rank):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        told = load_accelerator_state(place, [], [], [], [], rank)
        return told, read_random_states()

    yield load
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])
    PartialState._reset_state()


def alike(one, other):
    return (
        one[0] == other[0]
        and one[1]["state"]["pos"] == other[1]["state"]["pos"]
        and np.array_equal(one[1]["state"]["key"], other[1]["state"]["key"])
        and torch.equal(one[2], other[2])
    )


def test_accelerate_loads_the_states_that_are_kept(libraries, tmp_path, loaded):
    source = libraries / "acc_fsdp2_sharded/ckpt"
    reshard.split(source, tmp_path / "out")
    for rank in range(2):
        told, found = loaded(tmp_path / "out", rank)
        wanted_told, wanted = loaded(source, rank)
        assert told == wanted_told
        assert alike(found, wanted)
    assert not alike(loaded(source, 0)[1], loaded(source, 1)[1])


def test_accelerate_loads_the_states_of_a_trainer(libraries, tmp_path, loaded):
    source = libraries / "trainer_fsdp2_sharded/ckpt/checkpoint-4"
    reshard.split(source, tmp_path / "out", to="accelerate")
    for rank in range(2):
        _, found = loaded(tmp_path / "out", rank)
        saved = torch.load(source / f"rng_state_{rank}.pth", weights_only=False)
        assert found[0] == saved["python"]
        assert np.array_equal(found[1]["state"]["key"], saved["numpy"][1])
        assert torch.equal(found[2], saved["cpu"])


def test_random_states_are_derived_for_other_ranks(libraries, tmp_path, loaded):
    source = libraries / "acc_fsdp2_sharded/ckpt"
    for name in ("a", "b"):
        reshard.split(source, tmp_path / name, world_size=3, rng="derive")
    (first, *_) = rng.read([str(source / "random_states_0.pkl")])
    states = []
    for rank in range(3):
        _, found = loaded(tmp_path / "a", rank)
        assert alike(found, loaded(tmp_path / "b", rank)[1])
        seed = rng.derive_seed(first, rank)
        assert torch.equal(found[2], torch.Generator().manual_seed(seed).get_state())
        assert found[0] == random.Random(seed).getstate()
        states.append(found[2])
    assert len({state.numpy().tobytes() for state in states}) == 3


def test_impossible_choices_of_random_states_are_refused(libraries, made, tmp_path):
    source = libraries / "acc_fsdp2_sharded/ckpt"
    with pytest.raises(UsageError, match="do not fit the 3 ranks"):
        reshard.split(source, tmp_path / "out", world_size=3, rng="keep")
    with pytest.raises(UnsupportedError, match="has no place"):
        reshard.split(source, tmp_path / "out", to="dcp", rng="keep")
    with pytest.raises(IncompleteError, match="random states"):
        reshard.split(made / "z2_bf16/run", tmp_path / "out", to="accelerate", rng="derive")
    with pytest.raises(UsageError, match="local"):
        reshard.split(source, tmp_path / "out", to="hf-trainer", state_dict_type="local")
    with pytest.raises(UsageError, match="unsharded"):
        reshard.split(source, tmp_path / "out", to="fsdp", state_dict_type="unsharded")
    with pytest.raises(UsageError, match="exclude each other"):
        reshard.split(
            source, tmp_path / "out", to="hf-trainer", state_dict_type="full", zero_stage=2
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_trainer_with_deepspeed_gets_no_weights_alone(made, tmp_path, stage):
    """Check the refusal: a resume of the Trainer asks DeepSpeed for the optimizer."""
    choice = {"to": "hf-trainer", "zero_stage": stage, "weights_only": True}
    with pytest.raises(UsageError, match="only from a checkpoint with an optimizer"):
        reshard.split(made / "trainer_zero2_fp16/run", tmp_path / "out", **choice)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("random_state", (3, (1, 2), None)),
        ("numpy_random_seed", ("PCG64", 1, 2, 3, 4)),
        ("torch_manual_seed", torch.zeros(3)),
    ],
)
def test_malformed_random_states_are_refused(key, value, libraries, tmp_path):
    source = libraries / "acc_fsdp2_sharded/ckpt/random_states_0.pkl"
    held = torch.load(source, weights_only=False) | {key: value}
    torch.save(held, tmp_path / "random_states_0.pkl")
    with pytest.raises(UnsupportedError, match="--rng drop"):
        rng.read([str(tmp_path / "random_states_0.pkl")])


BEGUN = {  # name -> how a published model is written, how the Trainer starts from it
    "ddp": ({"state_dict_type": "unsharded"}, RUNS["ddp"]),
    "fsdp2": ({"state_dict_type": "sharded"}, RUNS["fsdp2"]),
    "deepspeed": ({"zero_stage": 2}, RUNS["deepspeed"]),
    "deepspeed, the Trainer's schedule": (
        {"zero_stage": 3},
        {**RUNS["deepspeed"], "stage": 3, "scheduler": "trainer"},
    ),
}


@pytest.mark.slow
def test_a_run_that_begins_from_a_published_model_is_a_new_run(tmp_path):
    worker.model().save_pretrained(tmp_path / "model")
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps([{"lr": 0.0, "weight_decay": 0.1}]))  # its schedule warms up
    options = {"to": "hf-trainer", "init_optimizer": "zeros", "param_groups": groups}
    jobs = {}
    for name, (how, told) in BEGUN.items():
        out = tmp_path / name
        reshard.split(tmp_path / "model", out, world_size=2, dtype="fp32", **options, **how)
        account = out / "checkpoint-0" / "trainer_state.json"
        intervals = {"logging_steps": 1, "save_steps": worker.SAVED}  # the Trainer obeys the file
        account.write_text(json.dumps({**json.loads(account.read_text()), **intervals}))
        assert not (account.parent / "model").exists()  # the source's own directory, once more
        jobs[f"{name}, new"] = 2, told
        jobs[name] = 2, {**told, "resume": out / "checkpoint-0"}
    found = JUDGE.run(tmp_path / "runs", jobs)
    for name in BEGUN:
        begun, new = found[name], found[f"{name}, new"]
        assert isinstance(begun, dict), (name, begun)
        assert begun["losses"] == new["losses"], name
