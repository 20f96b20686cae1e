"""A signal at any point of a command's main thread: nothing or all is there, and it says which.

`benchmarks/interrupts.py` strikes at every one of them, in more commands.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.engine.test_crashes import MERGE, Lab, shared  # noqa: F401
from tests.support.directories import read_files
from tests.support.signal_points import Point

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="/proc says which file a descriptor is of"
)
ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
# Where threads and locks are, and what has to be left in order.
SYSTEM = ["system/threads.py", "system/signals.py", "system/files.py"]
OURS = ["engine/output/commit.py", "engine/output/local.py", "engine/move/journal.py"]
OURS = [f"/reshard/{name}" for name in [*OURS, "engine/move/execute.py", *SYSTEM]]
FILES = [*OURS, "/threading.py", "/contextlib.py", "/weakref.py", "/_weakrefset.py"]


def points(lab: Lab, command: list[str], files: list[str], coin: random.Random) -> list[Point]:
    """Return each point at its first time and at one of its others, in random order."""
    assert lab.run(command, files=files) in (0, 1), lab.said
    found = []
    for *where, count in lab.calls:
        found += [[*where, 1]] + ([[*where, coin.randint(2, count)]] if count > 1 else [])
    coin.shuffle(found)
    return found


def struck(lab: Lab, command: list[str], at: Point, number: int) -> tuple[int, str]:
    """Return the exit code and the message, after checking that both make sense."""
    code = lab.run(command, files=[at[0]], strike=at, signal=number)
    said = lab.said.strip()
    if code == 130:
        assert said.startswith("reshard: interrupted"), said
        assert "\n" not in said
    else:  # it ended before the signal did anything, or while it ended
        assert code in (0, 1, -number), said  # 1: of `diff`, the files differ
        assert said == ""
    return code, said


def check(lab: Lab, command: list[str], at: Point, number: int) -> None:
    """Interrupt a command that writes, look at what is there, and run it again."""
    whole = lab.whole[command[0]]
    out, before = lab.directory / "out", read_files(lab.directory / "out")
    code, said = struck(lab, command, at, number)
    there = read_files(out)
    if there == whole:
        assert code != 130 or "out was already written completely" in said, said
    else:
        assert code == 130, said
        assert there == before
    assert lab.beside() <= {"out", ".out.partial", "page.html"}
    left = ".out.partial" in lab.beside()
    assert left == ("are kept in" in said), said
    assert not (left and there == whole)
    if left or (there != whole and coin_of(at).random() < 0.1):
        assert lab.run([*command, "--resume"]) == 0, lab.said
        assert read_files(out) == whole
        assert lab.beside() <= {"out", "page.html"}


def coin_of(at: Point) -> random.Random:
    return random.Random(repr(at[1:]))


@pytest.fixture
def lab(shared) -> Iterator[Lab]:  # noqa: F811 - pytest's way
    shared.clean()
    yield shared
    shared.clean()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_signal_at_any_point_leaves_nothing_or_all(lab, replaced):
    coin = random.Random(replaced)
    command = [*MERGE, "--overwrite"] if replaced else MERGE
    found = points(lab, command, FILES, coin)
    ours = [at for at in found if at[0].endswith(("/threads.py", "/output/commit.py"))]
    for at in (*ours[:8], *found[:8]):
        lab.clean()
        if replaced:
            (lab.directory / "out").mkdir()
            (lab.directory / "out" / "old.safetensors").write_bytes(b"old")
        check(lab, command, at, coin.choice(ENDING))


@pytest.mark.parametrize("command", [["diff", "x.pt", "merge"], ["inspect", "x.pt"]])
def test_a_signal_at_any_point_of_a_command_that_reads_is_told(lab, command):
    coin = random.Random(0)
    for at in points(lab, command, FILES, coin)[:8]:
        struck(lab, command, at, coin.choice(ENDING))
        assert lab.beside() == set()
