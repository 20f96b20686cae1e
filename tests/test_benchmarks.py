"""Every program of `benchmarks/` runs on tiny input; what it measures there means nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.judges import server
from tests.support import forked

FOLDER = Path(__file__).parents[1] / "benchmarks"
PROGRAMS = {  # `{}` is a new directory
    "average": "--forms fp32 --count 2 --size 2 --rounds 1 --place {}",
    "casts": "",
    "crashes": "--kills 1 --only merge --out {}",
    "interrupts": "--points 1 --only diff --out {}",
    "latency": "--place {} --size 2 --ranks 2 --milliseconds 1 --rows hf-fp32 --storages shim s3",
    "live": "{} 64 1 1 live",
    "lora": "--hidden 64 --layers 1 --rounds 1 --place {}",
    "memory": "--place {} --sizes 2 --ranks 2",
    "plan_at_scale": "zero3 4 --simulated",
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
    """Run a program as a fork; it forks what it starts as ``python``, but not below LD_PRELOAD."""
    words = [word.format(tmp_path / "place") for word in PROGRAMS[name].split()]
    python = forked.write_python(server.start_fork_server(server.DEEPSPEED), tmp_path)
    done = subprocess.run(
        [python[forked.PYTHON], str(FOLDER / f"{name}.py"), *words],
        env={**os.environ, **python},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip()
