"""The command line: a flag a setting, one message a failure, and no torch before it is needed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.support.programs import run_python
from trainer import cli
from trainer.checkpoint import directory
from trainer.settings import Settings

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


@pytest.fixture(autouse=True)
def _plainly_started(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TRAINER_STARTED_BY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys):
    def run(*arguments):
        code = cli.main([str(each) for each in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def config(run):
    """Return the settings that --print-config prints."""

    def config(*arguments):
        code, out, err = run(*arguments, "--print-config")
        assert (code, "error" in err) == (0, False), err
        return json.loads(out)

    return config


def test_every_setting_is_a_flag_with_help(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    for name, field in FIELDS.items():
        assert "--" + name.replace("_", "-") in out
        assert field.metadata["help"]


def test_without_choices_the_settings_are_the_defaults(config):
    shown = config()
    assert shown.pop("origins") == {}
    default = json.loads(json.dumps(dataclasses.asdict(Settings())))
    settled = {"accumulation": 1, "global_batch": 1, "reduction": "canonical", "schedule_steps": 20}
    assert shown == {**default, **settled}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--micro-batch", "4"], {"micro_batch": 4}),
        (["--lr", "3e-4"], {"lr": 3e-4}),
        (["--no-progress", "--async-save"], {"progress": False, "async_save": True}),
        (["--tie-embeddings"], {"tie_embeddings": True}),
        (["--no-tie-embeddings"], {"tie_embeddings": False}),
        (["--freeze", "a", "--freeze", "b.*"], {"freeze": ["a", "b.*"]}),
        (["--dropout", "0.1"], {"dropout": 0.1}),
        (["--log", "steps.jsonl"], {"log": "steps.jsonl"}),
        (["--step-log", "steps.jsonl"], {"log": "steps.jsonl"}),
        (
            ["--strategy", "fsdp", "--fsdp-sharding-strategy", "_HYBRID_SHARD_ZERO2"],
            {"fsdp_sharding_strategy": "_HYBRID_SHARD_ZERO2", "reduction": "fast"},
        ),
        (["--nproc", "2", "--global-batch", "8", "--micro-batch", "2"], {"accumulation": 2}),
        (["--nproc", "3", "--global-batch", "8"], {"accumulation": 3, "micro_batch": 1}),
    ],
)
def test_flags_become_settings(config, arguments, expected):
    shown = config(*arguments)
    assert {name: shown[name] for name in expected} == expected


def test_origins_say_who_chose(config):
    shown = config("--deepspeed", CONFIGS / "zero2_fp16_auto.json", "--lr", "5e-4", "--nproc", 2)
    assert shown["origins"]["lr"] == "--lr"
    assert shown["origins"]["precision"] == "fp16.enabled in zero2_fp16_auto.json"
    assert set(shown["origins"]) <= set(FIELDS)


def test_notes_are_one_paragraph_on_stderr(run):
    code, out, err = run("--deepspeed", CONFIGS / "zero2_bf16.json", "--print-config")
    assert code == 0
    assert json.loads(out)
    assert err == ("note: zero2_bf16.json: no effect here: zero_optimization.overlap_comm\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batch", "x"], "not a valid integer"),
        (["--strategy", "zero4"], "zero4"),
        (["--stratgy", "zero2"], "--strategy"),
        (["extra"], "extra"),
        (["--lr", "-1"], "lr"),
        (["--nproc", "3", "--global-batch", "8", "--accumulation", "2"], "global batch"),
        (["--nproc", "3", "--global-batch", "8", "--reduction", "fast"], "--reduction canonical"),
        (["--nproc", "3", "--global-batch", "9", "--micro-batch", "2"], "global batch"),
        (["--nproc", "0", "--global-batch", "8"], "nproc is 0: expected a positive number"),
        (["--deepspeed", "nope.json"], "nope.json"),
        (["--accelerate", "nope.yaml"], "nope.yaml"),
        (["--deepspeed", CONFIGS / "zero2_bf16.json", "--clip", "0.5"], "--clip"),
        (
            ["--strategy", "zero2", "--accelerate", CONFIGS / "accelerate_fsdp.yaml"],
            "accelerate_fsdp.yaml",
        ),
        (["--accelerate", CONFIGS / "accelerate_fsdp.yaml", "--nproc", "4"], "num_processes"),
    ],
)
def test_bad_settings_end_with_one_message_and_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("rank", "printed"), [("0", True), ("1", False)])
def test_all_ranks_fail_and_the_first_says_why(run, monkeypatch, rank, printed):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("--nproc", "4")
    assert code == 2
    assert ("nproc is 4 by --nproc, and the launcher started 2 ranks" in err) is printed


def test_the_launcher_gives_the_number_of_ranks(config, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert config()["nproc"] == 3
    assert config("--nproc", "3")["nproc"] == 3
    assert config("--accelerate", CONFIGS / "accelerate_fsdp.yaml")["nproc"] == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--lr", "-1"],
        ["--print-config", "--accelerate", str(CONFIGS / "accelerate_deepspeed.yaml")],
    ],
)
def test_an_answer_without_training_does_not_import_torch(arguments):
    code = f"import sys; from trainer.cli import main; main({arguments}); print(*sys.modules)"
    done = run_python("-c", code, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert loaded.isdisjoint({"torch", "numpy", "transformers", "accelerate", "deepspeed"})


def test_a_path_that_may_not_be_read_is_an_error_of_the_settings(run, monkeypatch, tmp_path):
    def refuse(path):
        raise PermissionError(13, "Permission denied", f"{path}/latest")

    monkeypatch.setattr(directory, "has_checkpoint", refuse)
    code, out, err = run("--save", tmp_path, "--resume", "auto")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {tmp_path}/latest cannot be accessed: Permission denied\n")


def test_torchrun_leaves_every_flag_to_the_trainer():
    """Its parser takes a prefix of its own options for the option, even after the program."""
    from torch.distributed.run import get_args_parser

    from trainer.cli import make_command

    flags = [o for param in make_command().params for o in param.opts if o.startswith("--")]
    assert "--step-log" in flags
    for flag in flags:
        if flag not in ("--log", "--nproc"):  # which are for runs without torchrun
            parsed = get_args_parser().parse_args(["-m", "trainer", flag, "x"])
            assert parsed.training_script_args == [flag, "x"]
