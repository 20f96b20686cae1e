"""Saving whole or not at all; finding; refusing what does not fit, by name."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import pickle
import re
import resource
import shutil
import signal
import zipfile

import pytest
import torch

from tests.support.programs import LIMIT_S
from tests.trainer import worlds
from trainer import tokenizer
from trainer.checkpoint import directory, files, state
from trainer.checkpoint.directory import RunDirectory
from trainer.core.errors import (
    CheckpointError,
    SettingsError,
    TrainerError,
    TrainingError,
)
from trainer.core.scaling import LossScaler
from trainer.settings import Settings

PLAIN = dataclasses.asdict(Settings())
TINY = {"seq_len": 8, "global_batch": 2, "micro_batch": 1, "precision": "fp32"}


# The run directory, without training


def save_step(run, step):
    (run.prepare(step) / "data").write_text(f"weights after {step}")
    run.publish(step)


def assert_usable(path, steps):
    """Check that ``latest`` names a whole checkpoint, of one of these steps."""
    tag = (path / "latest").read_text().strip()
    assert tag in {directory.make_tag(step) for step in steps}
    assert (path / tag / "data").read_text() == f"weights after {tag.removeprefix('global_step')}"


def test_keep_removes_the_oldest_and_never_the_newest(tmp_path):
    run = RunDirectory(tmp_path / "run", continues=None, overwrite=False, keep=2)
    for step in (2, 9, 10, 11):
        save_step(run, step)
    assert directory.list_tags(tmp_path / "run") == ["global_step10", "global_step11"]
    back = RunDirectory(
        tmp_path / "run", continues=tmp_path / "run/global_step10", overwrite=False, keep=1
    )
    save_step(back, 5)
    assert (tmp_path / "run/global_step5/data").exists()
    assert_usable(tmp_path / "run", [5])


def test_another_runs_checkpoints_are_kept_unless_asked_and_go_only_after_the_new_one(tmp_path):
    save_step(RunDirectory(tmp_path / "run", continues=None, overwrite=False, keep=0), 7)
    with pytest.raises(SettingsError, match="already has the checkpoint global_step7"):
        RunDirectory(tmp_path / "run", continues=None, overwrite=False, keep=0)
    run = RunDirectory(tmp_path / "run", continues=None, overwrite=True, keep=0)
    assert directory.list_tags(tmp_path / "run") == ["global_step7"]
    save_step(run, 2)
    assert directory.list_tags(tmp_path / "run") == ["global_step2"]


def test_a_checkpoint_is_found_from_the_run_or_by_itself(tmp_path):
    run = RunDirectory(tmp_path, continues=None, overwrite=False, keep=0)
    save_step(run, 1)
    save_step(run, 2)
    assert directory.find_checkpoint(tmp_path, None) == tmp_path / "global_step2"
    assert directory.find_checkpoint(tmp_path, "global_step1") == tmp_path / "global_step1"
    (tmp_path / "global_step1" / directory.STATE).write_text("{}")
    assert directory.find_checkpoint(tmp_path / "global_step1", None) == tmp_path / "global_step1"


@pytest.mark.parametrize(
    "given",
    [
        "",
        "global_step2",
        "global_step2/trainer_state.json",
        "global_step2/pytorch_model_fsdp_0",
        "global_step2/pytorch_model_fsdp_0/.metadata",
    ],
)
def test_any_level_of_a_run_is_its_checkpoint(tmp_path, given):
    """As ``reshard`` takes them, whether a file ``latest`` is there or not."""
    (tmp_path / "global_step2/pytorch_model_fsdp_0").mkdir(parents=True)
    (tmp_path / "global_step1").mkdir()
    for tag in ("global_step1", "global_step2"):
        (tmp_path / tag / directory.STATE).write_text("{}")
    (tmp_path / "global_step2/pytorch_model_fsdp_0/.metadata").touch()
    assert directory.find_checkpoint(tmp_path / given, None) == tmp_path / "global_step2"


def test_a_checkpoint_is_found_by_its_step_and_by_hf_trainers_name(tmp_path):
    for name in ("checkpoint-2", "checkpoint-10", "checkpoint-11"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-2", "checkpoint-10"):
        (tmp_path / name / "pytorch_model_fsdp.bin").touch()
    assert directory.find_checkpoint(tmp_path, None) == tmp_path / "checkpoint-10"
    assert directory.find_checkpoint(tmp_path, "2") == tmp_path / "checkpoint-2"
    assert directory.find_checkpoint(tmp_path, "checkpoint-2") == tmp_path / "checkpoint-2"


@pytest.mark.parametrize(
    ("make", "tag", "message"),
    [
        (shutil.rmtree, None, "does not exist"),
        (lambda p: None, None, "no file 'latest'.*checkpoints there: global_step1"),
        (lambda p: None, "global_step5", "no checkpoint 'global_step5', which --tag names"),
        (
            lambda p: (p / "latest").write_text("gone"),
            None,
            "'gone', which the file .*/latest names",
        ),
        (lambda p: (p / "latest").write_text(""), None, "'', which the file .*/latest names"),
        (lambda p: (p / "latest").write_bytes(b"\xff\xfe"), None, "cannot read .*/latest"),
        (lambda p: None, "../run", "'../run', which --tag names"),
    ],
)
def test_what_cannot_be_found_is_told_with_what_is_there(tmp_path, make, tag, message):
    run = tmp_path / "run"
    (run / "global_step1").mkdir(parents=True)
    make(run)
    with pytest.raises(CheckpointError, match=message):
        directory.find_checkpoint(run, tag)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"progress": {"step": 1, "x": 2}}', "\x00", "[" * 100_000]
)
def test_a_damaged_state_file_is_refused_by_name(tmp_path, text):
    (tmp_path / directory.STATE).write_text(text)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        state.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format is 2, expected 1"),
        ({"world_size": "2"}, "world_size is '2'"),
        ({"settings": {**PLAIN, "lr": "0.1"}}, "setting lr is '0.1'"),
        (
            {"settings": {**dataclasses.asdict(Settings()), "freeze": None}},
            "setting freeze is None",
        ),
        ({"settings": {"lr": 0.1}}, "steps"),
        ({"settings": {**PLAIN, "strategy": "zero9"}}, "strategy is 'zero9', expected ddp or"),
        ({"progress": {"step": -1}}, "step is -1, expected a whole number, 0 or more"),
        ({"scaler": {**dataclasses.asdict(LossScaler()), "scale": "x"}}, "scaler.scale is 'x'"),
    ],
)
def test_a_state_file_of_other_types_is_refused_by_field(tmp_path, change, message):
    document = state.make_document(Settings(), state.Progress(), LossScaler(), "digest")
    document = json.loads(json.dumps(document))
    (tmp_path / directory.STATE).write_text(json.dumps(document))
    assert state.read(tmp_path) == document
    (tmp_path / directory.STATE).write_text(json.dumps({**document, **change}))
    with pytest.raises(CheckpointError, match=message):
        state.read(tmp_path)


def test_a_second_run_is_kept_out_of_the_directory(tmp_path):
    first = RunDirectory(tmp_path / "run", continues=None, overwrite=False, keep=0)
    first.claim()
    second = RunDirectory(tmp_path / "run", continues=None, overwrite=False, keep=0)
    with pytest.raises(SettingsError, match="another run is writing"):
        second.claim()
    first.close()
    second.claim()
    second.close()


@pytest.mark.parametrize(
    ("content", "message"), [([1], "contains a list"), ({"module": {}}, "has no dp_world_size")]
)
def test_a_foreign_file_is_refused_by_what_it_lacks(tmp_path, content, message):
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=f"{path} {message}"):
        files.check_keys(files.load(path), path, "module", "dp_world_size")


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/pwned",))

    path = tmp_path / "evil.pt"
    torch.save({"x": Evil()}, path)
    with pytest.raises(CheckpointError, match="cannot read"):
        files.load(path)
    path.write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(CheckpointError, match="cannot read"):
        files.load(path)
    assert not (tmp_path / "pwned").exists()


# With training


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return two steps of two ranks in each strategy, by name."""
    base = tmp_path_factory.mktemp("saved")
    jobs = [
        {
            **TINY,
            "strategy": strategy,
            "steps": 2,
            "save": f"{base}/{strategy}",
            "log": f"{base}/{strategy}.jsonl",
            "freeze": (r"layers\.0\.mlp\.up",),
        }
        for strategy in ("ddp", "zero2", "zero3")
    ]
    worlds.train_on(2, jobs)
    return base


def break_file(path, how):
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-2000])


BREAKS = [
    ("zero2", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "missing", "of 2 ranks are expected"),
    ("zero2", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "cut", "cannot read .*rank_1"),
    ("zero2", "mp_rank_00_model_states.pt", "missing", "model_states.pt.* is missing|known layout"),
    ("zero3", "zero_pp_rank_1_mp_rank_00_model_states.pt", "missing", "rank_1|2 ranks"),
    ("zero3", "zero_pp_rank_0_mp_rank_00_model_states.pt", "cut", "cannot read"),
    ("ddp", "mp_rank_00_model_states.pt", "missing", "missing|no checkpoint|no known layout"),
]


@pytest.mark.slow
def test_what_does_not_fit_is_an_error_on_every_rank_and_no_hang(saved, tmp_path):
    jobs, expectations = [], []
    for number, (strategy, name, how, message) in enumerate(BREAKS):
        source = tmp_path / f"{number}"
        shutil.copytree(saved / strategy, source)
        break_file(source / "global_step2" / name, how)
        jobs.append({"resume": str(source)})
        expectations.append(message)
    for change, message in [
        ({"model": "tiny-gpt2", "freeze": ()}, "absent"),
        ({"tie_embeddings": True}, "lm_head.weight is"),
        ({"freeze": ()}, "in this run"),
    ]:
        jobs.append({"resume": str(saved / "zero2"), **change})
        expectations.append(message)
    common = {
        "steps": 4,
        "save": str(tmp_path / "out"),
        "log": str(tmp_path / "log"),
        "timeout": LIMIT_S,
    }
    reported = worlds.run(2, worlds.try_to_train, [{**job, **common} for job in jobs])
    for job, message, *errors in zip(jobs, expectations, *reported, strict=True):
        for code, said in errors:
            assert code == 3, job
            assert re.search(message, said.replace("\n", " ")), said
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    job = {**TINY, "lr": 1e30, "clip": 0.0, "steps": 4, "strategy": "zero2"}
    job |= {"save": f"{tmp_path}/run", "log": f"{tmp_path}/run.jsonl"}
    for ((code, message),) in worlds.run(2, worlds.try_to_train, [job]):
        assert code == 1
        assert "of step 2 " in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        {"strategy": "fsdp2", "state_dict_type": "sharded", "sharded_files": "rank"},
        {"strategy": "fsdp", "state_dict_type": "local"},
    ],
    ids=lambda chosen: chosen["strategy"],
)
def test_a_run_that_is_repeated_writes_the_same_bytes(tmp_path, chosen):
    jobs = [
        {
            **TINY,
            **chosen,
            "steps": 1,
            "save": f"{tmp_path}/{name}",
            "log": f"{tmp_path}/{name}.log",
        }
        for name in "ab"
    ]
    worlds.train_on(2, jobs)
    for path in sorted(tmp_path.glob("a/global_step1/*")):
        if path.suffix not in (".pt", ".bin"):
            continue
        again = tmp_path / "b/global_step1" / path.name
        assert path.read_bytes() == again.read_bytes()
        with zipfile.ZipFile(path) as archive:
            assert {name.partition("/")[0] for name in archive.namelist()} == {path.stem}


def full_disk(ranks, job):
    if ranks.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    return worlds.try_to_train(ranks, [job])


def test_a_rank_that_cannot_write_fails_all_and_leaves_nothing_half(tmp_path):
    job = {
        **TINY,
        "strategy": "zero1",
        "steps": 1,
        "save": f"{tmp_path}/run",
        "log": f"{tmp_path}/l",
    }
    for errors in worlds.run(2, full_disk, job):
        assert errors[0][0] == 1
        assert "rank 1 could not write its part" in errors[0][1]
    assert list((tmp_path / "run").iterdir()) == []


@contextlib.contextmanager
def short_files(limit):
    """Let this process write no file of more bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_a_library_in_rust_cannot_write_is_an_error_of_the_system(tmp_path):
    """``raise_on_all`` passes such errors to all ranks, and no others."""
    with short_files(1000), pytest.raises(OSError, match="too large"):
        tokenizer.save(tmp_path)


def memory(ranks, strategies):
    """Return parameters, and bytes of all tensors that exist after a micro batch."""
    from trainer.core.strategies import build_engine
    from trainer.resolve import resolve

    found = []
    for strategy in strategies:
        chosen = {"precision": "bf16", "grad_dtype": "bf16", "reduction": "fast"}
        settings = resolve({"strategy": strategy, **chosen}, ranks.world)
        before = measure_tensors()
        engine = build_engine(settings, ranks)
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        engine.run_microbatch(tokens, active_ranks=ranks.world, last=False)
        buffers = sum(buffer.nbytes for buffer in engine.model.buffers())
        after = measure_tensors()
        numel = sum(value.numel() for _, value in engine.parameters())
        found.append((numel, after - before - buffers))
        del engine
    return found


def measure_tensors():
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    tensors += [each.grad for each in tensors if each.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@pytest.mark.parametrize("world", [2, 3])
def test_memory_is_what_the_textbook_says(world):
    """Beside it, ddp and ZeRO 1 keep the sums of the gradients of one piece at its owner."""
    expectations = {
        "ddp": 16 + 2 / world,
        "zero1": 4 + 12 / world + 2 / world,
        "zero2": 2 + 14 / world,
        "zero3": 16 / world,
    }
    reported = worlds.run(world, memory, list(expectations))[0]
    for (strategy, factor), (numel, measured) in zip(expectations.items(), reported, strict=True):
        assert measured == pytest.approx(factor * numel, rel=5e-2), strategy


def test_an_error_raised_on_one_rank_is_raised_on_all():
    (said, *others) = worlds.run(3, one_fails, OSError("no"))
    assert said[0].startswith("rank 1 could not try: no\n")
    assert others == [said, said]
    known = CheckpointError("damaged", "copy it again", one_rank=True)  # so that rank 1 prints it
    assert worlds.run(3, one_fails, known) == [("damaged\n  -> copy it again", False)] * 3


def different_layers(ranks):
    import torch

    from trainer.core.partition import partition_groups
    from trainer.core.reduce import Reducer

    shapes = {"a": (4,), "b": (4,)}
    partition = partition_groups([["a", "b"]], shapes, ranks.world)
    reducer = Reducer(partition, ranks, torch.float32, canonical=True)
    try:
        reducer.add([("ab"[ranks.rank], torch.ones(4))], ranks.world)
    except TrainingError as error:
        return str(error)
    return None


def test_gradients_of_different_layers_are_never_added_up():
    for message in worlds.run(2, different_layers):
        assert "the backward passes of the ranks differ" in message


def one_fails(ranks, error):
    try:
        with ranks.raise_on_all("try"):
            if ranks.rank == 1:
                raise error
    except TrainerError as found:
        return str(found), found.one_rank
    return None
