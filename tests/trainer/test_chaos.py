"""A tool of others kills and tears saves at file boundaries; each resume ends with the same state.

ckpt-chaos records the file operations of a run, and repeats the run up to some of them: the rank
then dies before the operation, or when the file is half written. Ranks are forks of one process
that has imported torch, and each arms the tool itself.
"""

from __future__ import annotations

import shlex

import pytest

from tests.judges import server

byo = pytest.importorskip("ckpt_chaos.byo")

pytestmark = [pytest.mark.slow, pytest.mark.judge]

PROGRAM = """
import os, sys
from ckpt_chaos.targets.common import arm_from_env

if os.environ.get("CKPT_CHAOS_WATCH"):
    arm_from_env(int(os.environ["RANK"]), lazy=True)
from trainer.cli import main

code = main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""
HASH = """
import hashlib, sys
import reshard

digest = hashlib.sha256()
with reshard.open(sys.argv[1]) as checkpoint:
    for kind in (checkpoint, *map(checkpoint.optimizer, ("exp_avg", "exp_avg_sq"))):
        for name in sorted(kind):
            digest.update(name.encode() + kind[name][...].numpy().tobytes())
print(digest.hexdigest())
"""
RUNS = {  # the rank that dies, and flags; rank 0 also names the checkpoint
    "ddp": (0, "--strategy ddp"),
    "zero1": (1, "--strategy zero1"),
    "zero2": (0, "--strategy zero2"),
    "zero3": (1, "--strategy zero3"),
    "fsdp": (0, "--strategy fsdp --state-dict-type full"),
    "fsdp2": (1, "--strategy fsdp2"),
}
FLAGS = "--device cpu --steps 2 --save-every 1 --async-save --global-batch 4 --seq-len 8"
POINTS = 2


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_or_torn_save_is_resumed_to_the_same_state(name, tmp_path, monkeypatch):
    rank, strategy = RUNS[name]
    monkeypatch.setattr(byo, "PEER_GRACE_S", 0.2)  # the other rank dies with the first one
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "hash.py").write_text(HASH)
    flags = f"{FLAGS} --precision fp32 --param-groups single {strategy} --resume auto"
    python = server.fork_python(server.DEEPSPEED)
    command = [*python, str(tmp_path / "program.py")]
    command += [*flags.split(), "--save", "{out}/run", "--step-log", "{out}/log.jsonl"]
    rows = byo.run_byo(
        command,
        None,
        tmp_path / "work",
        ranks=2,
        crash_rank=rank,
        max_points=POINTS,
        result_cmd=shlex.join([*python, str(tmp_path / "hash.py"), "{out}/run"]),
    )
    assert len(rows) == 1 + POINTS
    assert {row.label: row.verdict for row in rows if row.verdict != "PASS"} == {}
    assert any("[torn]" in row.label for row in rows)
