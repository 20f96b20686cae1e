"""``reshard plan``: the command, its documents, and the files that it writes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

import reshard
from reshard import units
from reshard.cli import cli
from reshard.errors import ExistsError, UsageError
from tests.sizing.test_sizing import DEEPSEEK_V3, LLAMA_2_7B
from tests.support.programs import run_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "llama-zero3-4ranks"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_2_7B))
    return path


def run(*arguments):
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


def test_the_table_names_every_strategy_and_the_reason():
    done = run("--params", "7B", "--gpus", "8x80GB")
    assert done.exit_code == 0
    for word in (
        "ddp",
        "fsdp",
        "zero1",
        "zero2-offload",
        "zero3-offload-optimizer",
        "states",
        "total+ckpt",
    ):
        assert word in done.output
    assert "fsdp is the first that fits" in done.output


def test_the_states_of_a_7b_model_on_one_gpu_are_those_of_the_papers():
    rows = reshard.plan(params="7B").to_dict()["rows"]
    states = {row["strategy"]: row["states"] for row in rows}
    assert {states[name] for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")} == {112 * 10**9}


@pytest.mark.parametrize(
    "options",
    [
        *("--params 7B", "--params 7B --gpus 4x49GB", "--params 7B --gpus 4x49GB --strategy zero2"),
        *("--params 13B --gpus 24GB", "--params 13B --gpus 24GB --host-memory 128GB"),
        "--params 671B --gpus 8x80GB --nodes 4 --host-memory 2TB",
        "--params 1B --gpus 2x16GB --seq-len 512",
    ],
)
def test_no_line_but_notes_is_wider_than_80_columns(options):
    lines = run(*options.split()).output.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("note ")] == []


def test_the_exit_code_is_1_if_nothing_fits():
    done = run("--params", "70B", "--gpus", "1x12GB", "--host-memory", "3TB")
    assert done.exit_code == 1
    assert "none fits   zero3-offload comes closest, but lacks GPU memory" in done.output
    assert "compute the loss in chunks" in done.output


def test_the_verdict_says_what_the_host_and_the_disk_need():
    report = reshard.plan(params="13B", gpus="1x80GB")
    assert "234 GB" in repr(report)
    assert "182 GB of disk" in repr(report)
    needs = report.to_dict()["recommended"]["needs"]
    assert (needs["host"], needs["disk"]) == (234 * 10**9, 182 * 10**9)
    refused = reshard.plan(params="13B", gpus="1x80GB", host_memory_bytes=128 * 10**9)
    assert "lacks host memory" in repr(refused)
    assert refused.exit_code == 1


def test_a_wrong_regular_expression_is_an_error_of_the_user():
    done = run("--params", "7B", "--freeze", "(")
    assert isinstance(done.exception, UsageError)
    assert "--freeze: '(' is not a regular expression" in str(done.exception)


def test_the_document_has_every_size(config):
    document = json.loads(run("--model", config, "--gpus", "8x80GB", "--json").output)
    assert document["model"]["parameters"] == 6_738_415_616
    row = next(row for row in document["rows"] if row["strategy"] == "zero3")
    parts = ("parameters", "gradients", "masters", "moments", "margin")
    backward = ("gathered", "buckets", "activations", "logits")
    assert row["total"] == sum(row[part] for part in (*parts, *backward))
    assert document["recommended"]["strategy"] == "fsdp"
    assert document == json.loads(
        json.dumps(reshard.plan(model=str(config), gpus="8x80GB").to_dict())
    ) | {"options": document["options"]}


def test_a_checkpoint_states_everything():
    report = reshard.plan(EXAMPLE, gpus="4x24GB", strategy="zero2")
    assert report.model.numel == 25_344
    assert report.model.counted_by == "the tensors of the checkpoint"
    assert (report.training.precision, report.training.optimizer) == ("bf16", "adamw")
    assert (report.training.micro_batch, report.training.global_batch) == (1, 4)
    assert report.split.bytes_written > 0
    assert "it takes about" in report.next_steps[1]
    assert "reshard.deepspeed.load_checkpoint" in report.next_steps[2]


def test_the_disk_is_that_of_the_checkpoint_itself():
    row = next(r for r in reshard.plan(EXAMPLE).rows if r.strategy.name == "zero3")
    assert row.disk == pytest.approx(reshard.inspect(EXAMPLE).to_dict()["disk_bytes"], rel=0.05)


@pytest.mark.parametrize("strategy", ["zero1", "zero3-offload", "fsdp"])
def test_the_printed_split_runs(tmp_path, strategy):
    source = tmp_path / "my run"
    shutil.copytree(EXAMPLE, source)
    report = reshard.plan(source, gpus="2x24GB", strategy=strategy)
    words = shlex.split(report.next_steps[0])
    done = CliRunner().invoke(cli, words[1:])
    assert done.exit_code == 0, done.output
    written = sum(path.stat().st_size for path in Path(words[3]).rglob("*") if path.is_file())
    assert written == report.split.disk


def test_a_plan_needs_one_model(config):
    for options in ({}, {"params": "7B", "model": str(config)}):
        with pytest.raises(UsageError):
            reshard.plan(**options)
    with pytest.raises(UsageError, match="states the number"):
        reshard.plan(EXAMPLE, params="7B")


def write(config, path, strategy, **options):
    reshard.plan(model=str(config), gpus="8x80GB", strategy=strategy, write=path, **options)
    return path.read_text()


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero2-offload", "zero3", "zero3-offload"])
def test_a_deepspeed_configuration_is_written(config, tmp_path, strategy):
    written = json.loads(write(config, tmp_path / "ds.json", strategy, global_batch=32))
    assert written["zero_optimization"]["stage"] == int(strategy[4])
    assert written["gradient_accumulation_steps"] == 4
    assert ("offload_optimizer" in written["zero_optimization"]) == ("offload" in strategy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3-offload"])
def test_our_trainer_reads_what_is_written_for_accelerate(config, tmp_path, strategy):
    from trainer.choices import Choices
    from trainer.config_files import read_accelerate

    path = tmp_path / "accelerate.yaml"
    document = yaml.safe_load(write(config, path, strategy))
    assert document["num_processes"] == 8
    choices = Choices()
    read_accelerate(path, choices)
    expected = {"fsdp": "fsdp2", "zero3-offload": "zero3"}.get(strategy, strategy)
    assert choices.values["strategy"] == expected


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "zero2-offload", "zero3-offload"])
def test_our_trainer_accepts_the_written_command(config, tmp_path, strategy):
    from trainer.cli import make_command

    nodes = 2 if strategy == "hsdp" else 1
    text = write(config, tmp_path / "run.sh", strategy, nodes=nodes, seq_len=128)
    words = shlex.split(text.split("-m trainer ")[1])
    if nodes > 1:
        words += ["--nproc", "16"]
    make_command().main([*words, "--print-config"], standalone_mode=False)


@pytest.mark.parametrize(("kind", "stated"), [("AdamW", "AdamW"), ("Adam", None), ("SGD", None)])
def test_only_an_adamw_is_stated_as_adamw(tmp_path, kind, stated):
    layer = torch.nn.Linear(4, 2)
    extra = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=0.1, **extra)
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, path)
    reshard.plan(path, strategy="zero1", write=tmp_path / "ds.json")
    document = json.loads((tmp_path / "ds.json").read_text())
    assert document.get("optimizer", {}).get("type") == stated


def test_no_command_is_written_for_a_model_that_is_only_a_number(tmp_path):
    path = tmp_path / "run.sh"
    with pytest.raises(UsageError, match=r"--params 7B: is not a model that python -m trainer"):
        reshard.plan(params="7B", gpus="8x80GB", write=path)
    assert not path.exists()


def test_the_command_for_the_run_of_another_program_names_the_model(tmp_path):
    reshard.plan(EXAMPLE, strategy="zero1", write=tmp_path / "run.sh")
    assert f"--model {EXAMPLE / 'config.json'} " in (tmp_path / "run.sh").read_text()
    tag = shutil.copytree(EXAMPLE, tmp_path / "run", ignore=shutil.ignore_patterns("*.json"))
    with pytest.raises(UsageError, match="no file states the model"):
        reshard.plan(tag, write=tmp_path / "other.sh")


def test_nothing_is_overwritten_and_other_suffixes_are_refused(config, tmp_path):
    path = tmp_path / "ds.json"
    write(config, path, "zero2")
    with pytest.raises(ExistsError):
        write(config, path, "zero2")
    with pytest.raises(UsageError, match="no known suffix"):
        write(config, tmp_path / "ds.toml", "zero2")
    for suffix in ("json", "yaml", "sh"):
        with pytest.raises(UsageError, match="leave out --write or --tp"):
            write(config, tmp_path / f"tp.{suffix}", "ddp", tp=2)
    assert not list(tmp_path.glob("tp.*"))


def test_the_page_draws_the_totals_of_the_document(tmp_path):
    report = reshard.plan(params="7B", gpus="4x49GB", html=tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    drawn = re.findall(r'class="bar-total( bad)?">(.*?)<', text)
    rows = report.to_dict()["rows"]
    totals = [row[key] for key in ("total", "total_with_checkpointing") for row in rows]
    assert drawn == [
        (" bad" if total > 49 * 10**9 else "", units.show_bytes(total)) for total in totals
    ]
    assert "Memory of a GPU with activation" in text
    assert (" bad", "49.4 GB") in drawn  # zero2, whose step needs more than the backward pass


def test_a_plan_of_671_billion_parameters_imports_no_torch(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    probe = (
        "import sys, time\n"
        "began = time.process_time()\n"
        "from reshard.cli import cli\n"
        f"words = ['plan', '--model', {str(path)!r}, '--gpus', '8x80GB', '--nodes', '64']\n"
        "cli([*words, '--ep', '64'], standalone_mode=False)\n"
        "spent = time.process_time() - began\n"
        "assert spent < 2, spent\n"
        "loaded = {'torch', 'numpy', 'transformers', 'jinja2'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = run_python("-c", probe, check=True, cwd=ROOT)
    assert "671 B parameters" in done.stdout
