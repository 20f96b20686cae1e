"""What works where neither torch nor transformers is installed, and what the others say."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from safetensors.numpy import load_file

LLAMA = Path(__file__).resolve().parents[2] / "examples" / "llama-zero3-4ranks"
BLOCKED = """
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
from reshard.cli import main
main()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a command in a directory that has a run of DeepSpeed."""
    place = tmp_path_factory.mktemp("without")
    shutil.copytree(LLAMA, place / "run")

    def call(line, *, hidden="", code=BLOCKED):
        if hidden:
            code = code.replace('"torch", "transformers"', f'"{hidden}",')
        return subprocess.run(
            [sys.executable, "-c", code, *line.split()],
            cwd=place,
            check=False,
            capture_output=True,
            text=True,
        )

    call.place = place
    return call


def test_a_run_is_merged_split_converted_and_checked(run):
    for line in (
        "inspect run/",
        "merge run/ model.safetensors --dtype fp16",
        "merge run/ whole.pt",
        "split run/ run2/ --world-size 2",
        "convert run/ dcp/ --to dcp",
        "diff run2/ dcp/",
        "verify run2/ --deep",
    ):
        done = run(line)
        assert done.returncode == 0, (line, done.stderr)


def test_the_model_of_a_trainer_is_merged_without_its_optimizer(run, tmp_path):
    """``optimizer.pt`` numbers its states, and only transformers knows the order."""
    archive = Path(__file__).resolve().parents[1] / "data" / "h100" / "hf_trainer.tar.xz"
    with tarfile.open(archive) as stored:
        stored.extractall(tmp_path, filter="data")
    source = tmp_path / "hf_trainer" / "run"
    for line in (f"inspect {source}", f"verify {source}", f"merge {source} {tmp_path}/model"):
        done = run(line)
        assert done.returncode == 0, (line, done.stderr)
    assert "needs transformers, which is not installed" in done.stdout
    done = run(f"split {source} {tmp_path}/split --world-size 2")
    assert done.returncode == 1
    assert "cannot be assigned to parameters" in done.stderr
    assert "-> pip install torch transformers, or leave out the optimizer" in done.stderr


def test_a_directory_has_the_names_of_the_source_and_says_so(run):
    done = run("merge run/ model/")
    assert done.returncode == 0, done.stderr
    assert "transformers is not installed" in done.stdout


def test_a_table_names_the_weights_of_megatron(run, tmp_path):
    source = Path(__file__).resolve().parents[1] / "data" / "megatron" / "llama_tp2pp2"
    done = run(f"merge {source} {tmp_path}/model")
    assert done.returncode == 0, done.stderr
    assert "not installed" not in done.stdout
    assert "model.layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model/model.safetensors")


@pytest.mark.parametrize(
    ("line", "lacking"),
    [("merge run/ named/ --names hf", "torch transformers"), ("demo", "torch")],
)
def test_what_needs_a_library_names_it_and_how_to_install_it(run, line, lacking):
    done = run(line)
    assert done.returncode == 2
    assert f"pip install {lacking}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("hidden", "line", "packages"),
    [
        ("fsspec", "inspect s3://bucket/run", "fsspec s3fs"),
        ("s3fs", "merge s3://bucket/run out", "fsspec s3fs"),
        ("gcsfs", "inspect gs://bucket/run", "fsspec gcsfs"),
        ("adlfs", "inspect az://container/run", "fsspec adlfs"),
        ("huggingface_hub", "inspect hf://me/model", "fsspec huggingface_hub"),
        ("huggingface_hub", "merge run/ hf://me/model", "huggingface_hub"),
        ("diffusers", "verify run/ --model unet/config.json", "diffusers"),
        ("numpy", "verify run/ --deep", "numpy"),
        ("jinja2", "inspect run/ --html page.html", "jinja2"),
        ("mfusepy", "mount run/ place", "mfusepy"),
    ],
)
def test_a_missing_library_is_named_with_the_command_that_installs_it(run, hidden, line, packages):
    for folder in ("place", "unet"):
        (Path(run.place) / folder).mkdir(exist_ok=True)
    (Path(run.place) / "unet/config.json").write_text('{"_diffusers_version": "0.35"}')
    done = run(line, hidden=hidden)
    assert done.returncode == 2, done.stderr
    assert f"needs {hidden}, which is not installed\n  -> pip install {packages}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("hidden", ["isal", "blake3", "peft"])
def test_what_is_only_faster_or_elsewhere_is_not_needed(run, hidden):
    done = run("verify run/ --deep", hidden=hidden)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["accelerate", "dcp", "deepspeed", "transformers", "torchtitan"])
def test_a_module_for_programs_says_that_it_needs_torch(run, name):
    done = run("", code=BLOCKED.partition("from reshard")[0] + f"import reshard.{name}")
    assert "program: needs torch, which is not installed\n  -> pip install torch" in done.stderr


def test_a_tensor_without_torch_is_an_error_of_reshard(run):
    code = BLOCKED.partition("from reshard")[0] + (
        "import reshard\nfrom reshard.errors import UsageError\n"
        "try:\n    reshard.open('run')['lm_head.weight'][:2]\n"
        "except UsageError as error:\n    print(error)"
    )
    done = run("", code=code)
    assert "a tensor in memory: needs torch, which is not installed" in done.stdout, done.stderr


def test_the_trainer_names_what_it_needs(tmp_path):
    code = BLOCKED.replace("reshard.cli", "trainer.cli").replace("main()", "sys.exit(main())")
    command = [sys.executable, "-c", code, "--nproc", "2"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "torch is not installed\n  -> pip install torch" in done.stderr
    assert "Traceback" not in done.stderr
