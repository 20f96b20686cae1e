"""Every program of `benchmarks/` runs on tiny input; what it measures there means nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
PROGRAMS = {  # `{}` is a new directory
    "average": "--forms fp32 --count 2 --size 2 --rounds 1 --place {}",
    "casts": "",
    "crashes": "--kills 1 --only merge --out {}",
    "interrupts": "--points 1 --only diff --out {}",
    "latency": (
        "--place {} --size 2 --ranks 2 --milliseconds 1 --rows zero2-bf16 hf-fp32"
        " --storages shim s3"
    ),
    "live": "{} 64 1 1 live",
    "lora": "--layers 1 --rounds 1 --place {}",
    "memory": "--place {} --sizes 2 --ranks 2",
    "plan_at_scale": "fsdp2 2 --simulated",
    "quantised": "{} 1 1",
    "reduction": "--rounds 1 --strategies zero2",
    "run": "--size 2 --ranks 4 --rounds 1 --only merge-megatron --place {}",
}
PARTS = {  # programs and modules that those above use
    *("bare_loop", "contest", "equal", "make_dcp", "make_megatron", "make_zero", "merge", "peers"),
    *("proof", "slow_mount", "slow_store", "sources", "split", "storages"),
}
BY_HAND = {  # programs that need gigabytes, a GPU or a model of the hub
    *("dcp_again", "gpu_memory", "plan", "strided"),
}


def test_every_program_is_listed():
    found = {path.stem for path in FOLDER.glob("*.py")}
    assert found == {*PROGRAMS, *PARTS, *BY_HAND}


@pytest.mark.slow
@pytest.mark.judge
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, tmp_path):
    words = [word.format(tmp_path / "place") for word in PROGRAMS[name].split()]
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip()
