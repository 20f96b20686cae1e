"""Real torchrun agents are killed and added at random moments; the run ends with the same bits.

Each agent stands for a node with one rank. Nobody restarts anything: the agents form a new world of
those that are left, and ``--resume auto`` goes on from the last whole save. Agents and ranks are
forks of one process that has imported torch: what a restart costs is then not Python's imports.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.judges import server
from tests.support.programs import LIMIT_S
from tests.trainer import worlds

pytestmark = [pytest.mark.slow, pytest.mark.judge]

STEPS, EVERY = 32, 2
FLAGS = {
    "device": "cpu",
    "steps": STEPS,
    "global_batch": 4,  # three ranks do not divide it
    "seq_len": 8,
    "precision": "bf16",
    "dropout": 0.1,
}
RUNS = {
    "zero3": ({"strategy": "zero3"}, (3, 2, 0, 4)),
    "fsdp2": ({"strategy": "fsdp2", "reduction": "canonical"}, (2, 4, 1)),
}
"""Flags, and how many agents there are from one save to the next.

0: a rank dies, and its agent lives.
"""
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""By default torch 2.13 keeps the store of the first world's first agent, which may be killed."""
AGENT = """
import sys
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main

# torch 2.13 looks through all imported modules for the name of a function, in every sign of life,
# for messages that nobody asked for: agents of a busy machine would be taken for dead.
dynamic_rendezvous.get_method_name = lambda depth=2: "a function"
main(sys.argv[1:])
"""
PROGRAM = """
import os, sys, time
from pathlib import Path

Path(__file__).with_name(os.environ["AGENT"] + ".rank").write_text(str(os.getpid()))

from trainer.cli import main
from trainer.log import StepLog

GATE = Path(__file__).with_name("gate")  # the step up to which the test lets the ranks train
log_step = StepLog.step

def step(self, progress, *rest):
    log_step(self, progress, *rest)
    while int(GATE.read_text() or 0) < progress.step:
        time.sleep(0.01)

StepLog.step = step
if os.environ["RANK"] == "0":
    print("world", os.environ["WORLD_SIZE"], flush=True)
code = main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""


@dataclass
class Agents:
    """Agents of torchrun, one rank each, around a store that none of them owns.

    The first agent usually owns the store; without it the others cannot meet.
    """

    python: list[str]
    place: Path
    flags: list[str]
    chance: random.Random
    found: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (self.place / "agent.py").write_text(AGENT)
        (self.place / "program.py").write_text(PROGRAM)
        self.open_gate(0)

    def alive(self) -> list[int]:
        return [number for number, agent in enumerate(self.found) if agent.poll() is None]

    def add(self) -> None:
        # Agents of a busy machine come late, and show late that they live.
        rendezvous = "is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=9"
        command = [
            *(*self.python, str(self.place / "agent.py"), "--nnodes", "1:4", "--no-python"),
            *("--nproc-per-node", "1", "--max-restarts", "99", "--monitor-interval", "0.1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.store.port}"),
            *("--rdzv-id", "elastic", "--rdzv-conf", rendezvous),
            *(*self.python, str(self.place / "program.py"), *self.flags),
        ]
        name = f"agent{len(self.found)}"
        with (self.place / name).open("wb") as output:
            self.found.append(
                subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "AGENT": name, **NEW_STORE},
                )
            )

    def kill(self) -> None:
        """Kill one agent and its rank, whatever it is doing."""
        self._end(self.chance.choice(self.alive()))

    def _end(self, number: int) -> None:
        self.found[number].kill()  # whose fork ends with it
        self.found[number].wait()
        self._end_rank(number)

    def kill_rank(self) -> None:
        """Kill a rank whose agent lives, which starts it again."""
        numbers = self.chance.sample(self.alive(), len(self.alive()))
        assert any(self._end_rank(number) for number in numbers)

    def _end_rank(self, number: int) -> bool:
        """Kill the rank of an agent; tell whether there was one."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.place / f"agent{number}.rank").read_text())
            if b"tests.support.forked" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def open_gate(self, step: int) -> None:
        """Let the ranks train up to a step."""
        (self.place / "gate.new").write_text(str(step))
        (self.place / "gate.new").rename(self.place / "gate")

    def count_worlds(self, size: int) -> int:
        """Return how often so many ranks began together."""
        return self.read().count(f"world {size}\n")

    def resize(self, size: int) -> None:
        while len(self.alive()) > size:
            self.kill()
        while len(self.alive()) < size:
            self.add()

    def close(self) -> None:
        for number in self.alive():
            self._end(number)

    def read(self) -> str:
        places = [self.place / f"agent{number}" for number in range(len(self.found))]
        return "".join(place.read_text() for place in places)


def read_step(run: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((run / "latest").read_text().removeprefix("global_step"))
    return 0


def wait_for(condition, agents):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert agents.alive(), agents.read()
        assert time.monotonic() < deadline, agents.read()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the hash of the same training on one rank that nobody disturbs."""
    path = tmp_path_factory.mktemp("unbroken") / "run"
    job = {**FLAGS, "strategy": "ddp", "save": str(path), "log": f"{path}.jsonl"}
    return worlds.train_on(1, [job])[0][0].digest


@pytest.mark.parametrize("name", RUNS)
def test_ranks_come_and_go_and_the_run_ends_with_the_bits_of_the_unbroken_one(
    name, unbroken, tmp_path
):
    run = tmp_path / "run"
    python = server.fork_python(server.DEEPSPEED)
    changes, sizes = RUNS[name]
    chosen = {**FLAGS, **changes, "save": run, "save_every": EVERY, "keep": 3, "resume": "auto"}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in chosen.items()]
    agents = Agents(
        python, tmp_path, [*flags, "--async-save", "--no-progress"], random.Random(name)
    )
    size = 0
    try:
        for wanted in sizes:
            if wanted == size or not wanted:
                worlds_before = agents.count_worlds(size)
                agents.kill_rank()
            else:
                size, worlds_before = wanted, agents.count_worlds(wanted)
                agents.resize(size)
            # A kill while agents of torchrun look for each other can end them all.
            wait_for(lambda n=worlds_before: agents.count_worlds(size) > n, agents)  # noqa: B023
            before = read_step(run)
            agents.open_gate(before + 3 * EVERY)
            wait_for(lambda b=before: read_step(run) > b, agents)
            time.sleep(agents.chance.uniform(0, 0.3))
        agents.open_gate(STEPS)
        wait_for(lambda: "parameters sha256" in agents.read(), agents)
        assert read_step(run) == STEPS
        assert re.findall("parameters sha256 (.*)", agents.read()) == [unbroken]
        assert "saving in the background" in agents.read()
    finally:
        agents.close()
    assert not list(run.glob(".global_step*")), "what a kill left is removed"
