"""The job script of docs/jobs.md for elastic training, run with stand-ins for srun and torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.judges import server
from tests.support.programs import LIMIT_S
from tests.test_imports import ROOT
from tests.trainer import worlds

pytestmark = [pytest.mark.slow, pytest.mark.judge]

SMALL = ["--steps=6", "--global-batch=12", "--seq-len=8", "--save-every=1", "--device=cpu"]
SRUN = '#!/bin/bash\nexec "$@"\n'
# What torchrun does: start ranks, stop all when one dies, start those that are left.
TORCHRUN = """#!{executable}
import os, subprocess, sys, time

sys.path.insert(0, {root!r})
from tests.support.ports import find_free_port

flags = sys.argv[sys.argv.index("-m"):] + {small!r}
run = flags[flags.index("--save") + 1]
if not os.path.exists(run + ".met"):  # the first time, the agents do not meet
    open(run + ".met", "w").close()
    sys.exit("torch.distributed.DistStoreError: wait timeout after 60000ms")

def start(world):
    port = str(find_free_port())
    own = {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}}
    own["TORCHELASTIC_RUN_ID"] = "stand-in"
    return [
        subprocess.Popen([*{python!r}, *flags], env={{**os.environ, **own, "RANK": str(r)}})
        for r in range(world)
    ]

ranks = start(3)
while not os.path.exists(run + "/latest"):
    assert all(rank.poll() is None for rank in ranks)
    time.sleep(0.02)
ranks[1].kill()
for rank in ranks:
    rank.terminate()
    rank.wait()
sys.exit(max(rank.wait() for rank in start(2)))
"""


def test_the_elastic_job_goes_on_with_the_ranks_that_are_left(tmp_path):
    page = (ROOT / "docs/jobs.md").read_text()
    blocks = re.findall("```bash\n(.*?)```", page, re.DOTALL)
    (script,) = [block for block in blocks if "1:4" in block]
    programs = {
        "srun": SRUN,
        "torchrun": TORCHRUN.format(
            executable=sys.executable,
            python=server.fork_python(server.DEEPSPEED),
            small=SMALL,
            root=str(ROOT),
        ),
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {"RUN": str(tmp_path / "run"), "SLURM_JOB_ID": "1", "HEAD_NODE": "localhost"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, **variables, "PATH": path, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole = Path(tmp_path, "whole")
    job = {"steps": 6, "global_batch": 12, "seq_len": 8, "strategy": "ddp", "save": str(whole)}
    unbroken = worlds.train_on(1, [{**job, "log": f"{whole}.jsonl"}])[0][0]
    assert re.findall("parameters sha256 (.*)", done.stdout) == [unbroken.digest]
