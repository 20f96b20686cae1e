"""The command line is a promise: commands, options, exit codes and JSON keys are frozen here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from reshard.cli import cli
from tests.support.programs import run_reshard as run

SOURCE_OPTIONS = {
    *("--from", "--tag", "--step", "--key", "--model", "--wrap", "--json", "-v", "--verbose")
}
OUTPUT_OPTIONS = {
    *("--on-overflow", "--allow-pickle", "--workers", "--max-memory", "--overwrite"),
    *("--no-verify", "--dry-run", "-q", "--quiet", "--html", "--resume"),
}
SPLIT_OPTIONS = {
    *("--to", "--world-size", "--num-shards", "--zero-stage", "--dtype", "--weights-only"),
    *("--device", "--state-dict-type", "--rank-files", "--fsdp-version", "--use-orig-params"),
    *("--mesh", "--tp-plan"),
    *("--init-optimizer", "--param-groups", "--rng"),
}
FILES_OPTIONS = (SOURCE_OPTIONS - {"--json"}) | {
    *("--to", "--world-size", "--dtype", "--on-overflow", "--trust", "--replicas"),
    *("--allow-pickle", "--workers", "--max-memory"),
}
OPTIONS = {
    "inspect": SOURCE_OPTIONS | {"--tensors", "--html", "--overwrite"},
    "merge": SOURCE_OPTIONS
    | OUTPUT_OPTIONS
    | {
        *("--dtype", "--keep-fp32", "--max-shard-size", "--hf-dir", "--tied", "--no-strip"),
        *("--rename", "--include", "--exclude"),
        *("--names", "--family", "--vocab-size", "--keep-padding", "--adapter", "--schedule-free"),
    },
    "resume-check": SOURCE_OPTIONS
    | SPLIT_OPTIONS
    | {
        *("--steps", "--command", "--require", "--rtol", "--unbroken", "--control", "--timeout"),
        *("--keep", "--allow-pickle", "--workers", "--max-memory", "-q", "--quiet"),
        *("--html", "--overwrite"),
    },
    "demo": {"--keep", "-v", "--verbose"},
    "mount": FILES_OPTIONS,
    "split": SOURCE_OPTIONS | OUTPUT_OPTIONS | SPLIT_OPTIONS,
    "convert": SOURCE_OPTIONS | OUTPUT_OPTIONS | SPLIT_OPTIONS,
    "diff": SOURCE_OPTIONS
    | {
        *("--atol", "--rtol", "--ulp", "--exact", "--dtype", "--ignore", "--kind", "-q", "--quiet"),
        *("--max-memory", "--workers", "--allow-pickle", "--html", "--overwrite"),
    },
    "verify": SOURCE_OPTIONS
    | {
        *("--deep", "--quick", "--write-manifest", "--against", "--ignore", "--overwrite"),
        *("--allow-pickle", "--workers", "--max-memory", "-q", "--quiet", "--html"),
    },
}
VERIFY_KEYS = set(
    "schema command source format detail mode passed exit_code checks notes manifest bytes_read"
    " seconds".split()
)
CHECK_KEYS = set("status name looked_at failures warnings applies ran exit_code".split())
CHECKS = (
    "headers safe complete agreement index coverage ranks stale steps slots model"
    " crc replicas masters tied padding finite moments zeros against".split()
)
MERGE_KEYS = set(
    "schema command source format destination done verified files tensors parameters dtypes"
    " trained_in from_master from_copy buffers kept_fp32 dropped_aliases written_aliases stripped"
    " renamed excluded optimizer_tensors_left overflowed flushed changes warnings bytes_read"
    " bytes_written resumed_bytes peak_buffer_bytes seconds".split()
)
INSPECT_KEYS = set(
    "schema command path format detail versions precision mesh step parameters kinds files"
    " disk_bytes logical_bytes tied frozen never_updated optimizer param_groups scheduler"
    " scaler complete".split()
)


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "source.safetensors"
    save_file({"layer.0.weight": torch.ones(4, 3), "layer.0.bias": torch.zeros(4)}, path)
    return path


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "target.safetensors"


def held(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*")}


def show_help(*words):
    return CliRunner().invoke(cli, [*words], prog_name="reshard").output


@pytest.mark.parametrize("command", OPTIONS)
def test_every_frozen_option_is_there(command):
    params = [p for p in cli.commands[command].params if isinstance(p, click.Option)]
    names = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    assert names >= OPTIONS[command]
    assert [param.name for param in params if not param.help] == []


@pytest.mark.parametrize("command", OPTIONS)
def test_help_has_every_option_once_and_under_a_title(command):
    params = [p for p in cli.commands[command].params if isinstance(p, click.Option)]
    is_short = any("--help-all" in param.opts for param in params)
    shown = show_help(command, "--help-all" if is_short else "--help").split("\n\n")
    titles = [part.strip().splitlines()[0] for part in shown if part.strip().splitlines()[1:]]
    assert titles[-1] == "Options:"
    assert len(set(titles)) == len(titles)
    listed = re.findall(r"^  (-\S+)", "\n".join(shown), re.MULTILINE)
    assert sorted(name.rstrip(",") for name in listed) == sorted(
        ["-h", *(param.opts[0] for param in params)]
    )


@pytest.mark.parametrize("command", ["merge", "split", "convert", "resume-check"])
def test_the_short_help_has_the_common_options_and_says_how_to_see_the_others(command):
    short, full = show_help(command, "--help"), show_help(command, "--help-all")
    assert len(short.splitlines()) < 0.75 * len(full.splitlines())
    assert "Common options:" in short
    assert f"reshard {command} --help-all" in " ".join(short.split())
    assert "--trust" in full
    assert "--trust" not in short


@pytest.mark.parametrize("command", ["convert", "plan"])
def test_the_short_help_points_to_the_options_of_a_target_that_can_be_named(command):
    short = " ".join(show_help(command, "--help").split())
    advised = f"reshard {command} --to TARGET --help" in short
    named = CliRunner().invoke(cli, [command, "--to", "deepspeed", "--help"])
    assert advised == (named.exit_code == 0)


def test_the_help_of_a_target_has_its_options_and_no_others():
    shown = show_help("convert", "--to", "megatron", "--help")
    assert "Options of --to megatron:" in shown
    assert "--vpp" in shown
    assert "\n  --zero-stage" not in shown
    assert show_help("convert", "--to=megatron", "--help") == shown


@pytest.mark.parametrize("command", OPTIONS)
def test_the_examples_of_the_help_use_options_that_exist(command):
    examples = cli.commands[command].examples
    assert examples
    known = {name for param in cli.commands[command].params for name in param.opts}
    for line, purpose in examples:
        words = shlex.split(line)
        assert words[:2] == ["reshard", command]
        assert {word for word in words if word.startswith("--")} <= known
        assert purpose


def test_the_list_of_commands_cuts_no_sentence_off():
    assert "..." not in run("--help").stdout.partition("Commands:")[2]


def test_frozen_defaults():
    defaults = {param.name: param.default for param in cli.commands["merge"].params}
    frozen = {
        "on_overflow": "error",
        "max_shard_size": "5GB",
        "tied": "auto",
        "max_memory": "256MiB",
        "workers": 0,
    }
    assert {name: defaults[name] for name in frozen} == frozen


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("merge", "-h"), ("--version",)])
def test_help_and_version_succeed_on_stdout(arguments):
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("frobnicate",),
        ("merge",),
        ("merge", "only-one"),
        ("convert", "a", "b"),
        ("merge", "a", "b", "--no-such-option"),
        ("merge", "a", "b", "--tied", "maybe"),
        ("merge", "a", "b", "--on-overflow", "CLAMP"),
        ("merge", "a", "b", "--workers", "many"),
        ("merge", "a", "b", "--workers", "-3"),
        ("inspect", "a", "--from", "nowhere"),
        ("inspect", "a", "--dry-run"),
    ],
)
def test_misuse_is_2_and_shows_the_usage(arguments):
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert "Usage" in done.output


def test_misuse_says_nothing_on_stdout():
    done = run("frobnicate")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (("merge", "run"), "SOURCE... and DESTINATION are required"),
        (("diff", "run"), "A and B are required"),
        (("convert", "run", "out"), "Missing option '--to'"),
        (("merge", "run", "out", "--rename", "x"), "is not of the form REGEX=REPLACEMENT"),
    ],
)
def test_what_is_missing_is_named(arguments, missing):
    done = CliRunner().invoke(cli, arguments)
    assert missing in done.output + str(done.exception)


class Attack:
    def __reduce__(self):
        return os.system, ("true",)


CODES = {  # options -> the exit code, and what the message says
    "good.safetensors": (0, ""),
    "large.safetensors --dtype fp16": (1, "w (1)"),
    "nowhere": (2, "nowhere"),
    "nowhere --json": (2, "nowhere"),
    "good.safetensors --from deepspeed": (2, "deepspeed"),
    "good.safetensors --max-memory lots": (2, "--max-memory"),
    "broken.safetensors --json": (3, "broken.safetensors"),
    "broken.safetensors -q": (3, "broken.safetensors"),
    "good.safetensors --max-memory 1KiB": (4, "--max-memory"),
    "attack.pt": (5, "attack.pt"),
}


@pytest.mark.parametrize("words", CODES)
def test_errors_have_their_code_and_are_one_message_on_stderr_alone(tmp_path, words):
    save_file({"w": torch.ones(4)}, tmp_path / "good.safetensors")
    save_file({"w": torch.tensor([1e6])}, tmp_path / "large.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 40)
    torch.save({"w": Attack()}, tmp_path / "attack.pt")
    before, (code, says) = held(tmp_path), CODES[words]
    done = run("merge", *words.split()[:1], "out.pt", *words.split()[1:], cwd=tmp_path)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("reshard: " if code else "")
    assert bool(done.stdout) == (not code)
    assert held(tmp_path) == before | ({"out.pt"} if not code else set())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["inspect", "nowhere"], 2), (["inspect", "broken.safetensors"], 3)],
)
def test_verbose_shows_where_and_keeps_the_exit_code(tmp_path, arguments, code):
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 40)
    done = run(*arguments, "-v", cwd=tmp_path)
    assert done.returncode == code
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(("flags", "is_shown"), [((), False), (("-v",), True)])
def test_only_verbose_counts_the_values(source, flags, is_shown):
    assert ("  values  " in run("inspect", source, *flags).stdout) == is_shown


def test_json_of_a_merge_is_one_document_with_these_keys(source, target):
    done = run("merge", source, target, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert document.keys() >= MERGE_KEYS
    assert (document["schema"], document["command"], document["done"]) == (1, "merge", True)
    assert document["files"] == [{"name": target.name, "bytes": target.stat().st_size}]
    assert (document["tensors"], document["parameters"]) == (2, 16)
    assert document["bytes_written"] == target.stat().st_size


def test_json_of_inspect_is_one_document_with_these_keys(source):
    done = run("inspect", source, "--json")
    document = json.loads(done.stdout)
    assert document.keys() >= INSPECT_KEYS
    assert (document["schema"], document["command"]) == (1, "inspect")
    assert document["parameters"] == 16


def test_json_of_verify_is_one_document_with_these_keys(source):
    done = run("verify", source, "--deep", "--json")
    document = json.loads(done.stdout)
    assert document.keys() >= VERIFY_KEYS
    assert (document["schema"], document["command"], document["mode"]) == (1, "verify", "deep")
    assert [check["name"] for check in document["checks"]] == CHECKS
    assert all(check.keys() >= CHECK_KEYS for check in document["checks"])


def test_a_damaged_source_is_a_report_of_verify_with_its_code(source):
    source.write_bytes(source.read_bytes()[:-4])
    done = run("verify", source)
    assert (done.returncode, done.stderr) == (3, "")
    assert "FAILED headers" in done.stdout


def test_json_survives_quiet_and_names_in_any_script(tmp_path):
    save_file({"größe.模型": torch.ones(2)}, tmp_path / "x.safetensors")
    out = tmp_path / "模型.safetensors"
    done = run("merge", tmp_path / "x.safetensors", out, "--json", "-q")
    assert json.loads(done.stdout)["destination"] == str(out)


def test_quiet_says_nothing(source, target):
    done = run("merge", source, target, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert target.is_file()


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "model"])
def test_dry_run_tells_the_sizes_that_are_written(source, tmp_path, name):
    before = held(tmp_path)
    planned = json.loads(run("merge", source, tmp_path / name, "--dry-run", "--json").stdout)
    assert (planned["done"], planned["verified"], held(tmp_path)) == (False, False, before)
    written = json.loads(run("merge", source, tmp_path / name, "--json").stdout)
    for key in ("files", "bytes_written", "bytes_read", "dtypes", "tensors"):
        assert planned[key] == written[key], key


def test_dry_run_refuses_what_the_run_would_refuse(source, target):
    target.write_bytes(b"precious")
    assert run("merge", source, target, "--dry-run").returncode == 2
    assert target.read_bytes() == b"precious"


def test_underscores_spell_options_too(source, tmp_path):
    done = run(
        *("merge", source, tmp_path / "m", "--max_shard_size=1GB", "--keep_fp32", "layer"),
        *("--on_overflow", "clamp", "--no_strip", "--max_memory=1MiB", "--no_verify", "--dry_run"),
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_underscores_in_values_stay(tmp_path):
    save_file({"a_b": torch.ones(2), "c-d": torch.ones(2)}, tmp_path / "x_y.safetensors")
    out = tmp_path / "out_put.safetensors"
    done = run("merge", tmp_path / "x_y.safetensors", out, "--include", "a_b")
    assert done.returncode == 0
    assert load_file(out).keys() == {"a_b"}


def test_the_script_and_the_module_are_the_same(source):
    script = Path(sys.executable).with_name("reshard")
    if not script.exists():
        pytest.skip("the package is on the path, not installed")
    done = subprocess.run([script, "inspect", source], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, run("inspect", source).stdout)


def test_a_reader_that_stops_early_sees_no_traceback(source):
    command = f"{sys.executable} -m reshard inspect --tensors {source} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")
