"""Send a signal to merge, split, diff, verify and inspect at many points; check what remains.

    python benchmarks/interrupts.py --out /dev/shm/interrupts --points 500

A point is an instruction of the main thread at which Python may run a signal handler
(`tests.support.signal_points`), in modules of reshard or of the standard library, at its first or a
later execution. After each signal, the destination must be absent or complete, the message must say
which, and a resumed run must give the bytes of an uninterrupted run. The program prints one line
per command, and exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where the tests lie

from tests.engine import test_interrupts as interrupts
from tests.engine.test_crashes import MERGE, SPLIT, Lab

FILES = ["/reshard/", "/threading.py", "/contextlib.py", "/weakref", "/shutil.py", "/tempfile.py"]
ONE = ["--workers", "1"]
WRITING = {
    "merge": MERGE,
    "merge, one worker": [*MERGE, *ONE],
    "merge, with a page": [*MERGE, "--html", "page.html", "--overwrite"],
    "split": SPLIT,
}
READING = {
    "diff": ["diff", "x.pt", "merge"],
    "verify": ["verify", "merge", "--deep"],
    "inspect": ["inspect", "x.pt"],
}


def strike(lab: Lab, name: str, most: int, coin: random.Random) -> bool:
    """Interrupt one command again and again; return whether all checks passed."""
    command = WRITING.get(name) or READING[name]
    lab.clean()
    found = interrupts.points(lab, command, FILES, coin)
    bad = 0
    for at in found[:most]:
        lab.clean()
        number = coin.choice(interrupts.ENDING)
        try:
            if name in WRITING:
                interrupts.check(lab, command, at, number)
            else:
                interrupts.struck(lab, command, at, number)
        except AssertionError:
            bad += 1
            print(f"  {number.name} at {at}", flush=True)
            traceback.print_exc()
    print(f"{name}: {len(found)} points, {min(most, len(found))} struck, {bad} bad", flush=True)
    return not bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("/dev/shm/interrupts"))
    parser.add_argument(
        "--points", type=int, default=500, help="maximum number of points per command"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the names of the commands to run")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    lab = Lab(options.out)
    names = [name for name in (*WRITING, *READING) if options.only in name]
    good = [strike(lab, name, options.points, random.Random(options.seed)) for name in names]
    lab.end()
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
