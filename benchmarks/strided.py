"""Compare matrices that tensor-parallel ranks share by columns with matrices shared by rows.

    python benchmarks/strided.py --place /dev/shm

Six bf16 matrices of 4096 x 11008 (541 MB) are planned and copied from one number of ranks to
another by one worker. The result is CPU seconds, the smallest of three. The data are random bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from reshard.core import dtypes
from reshard.core.box import Box
from reshard.core.chunks import contiguous
from reshard.core.manifest import Entry, OutputFile, Skeleton, SourceFile
from reshard.engine.move.execute import execute
from reshard.engine.move.options import MoveOptions
from reshard.engine.planning.planner import Plan

ROWS, COLUMNS, MATRICES, ROUNDS = 4096, 11008, 6, 3


@dataclass(frozen=True)
class Cut:
    """Over how many ranks, along which dim."""

    ranks: int
    dim: int

    def __str__(self) -> str:
        way = ("rows", "columns")[self.dim]
        return f"{self.ranks} by {way}" if self.ranks > 1 else "whole"

    def boxes(self) -> list[Box]:
        """Return the box of each rank."""
        shape = [ROWS, COLUMNS]
        step = shape[self.dim] // self.ranks
        shape[self.dim] = step
        origins = [(n * step, 0) if self.dim == 0 else (0, n * step) for n in range(self.ranks)]
        return [Box(origin, (shape[0], shape[1])) for origin in origins]

    def entries(self, prefix: str) -> list[Entry]:
        """Return the matrices, one after the other in each rank's file."""
        found = []
        for number in range(MATRICES):
            chunks = [
                contiguous(f"{prefix}{rank}", number * box.volume * 2, dtypes.BFLOAT16, box)
                for rank, box in enumerate(self.boxes())
            ]
            name = f"layers.{number}.weight"
            found.append(Entry(name, "param", dtypes.BFLOAT16, (ROWS, COLUMNS), tuple(chunks)))
        return found

    def files(self, prefix: str) -> dict[str, int]:
        """Return the ranks' files and their sizes."""
        nbytes = MATRICES * ROWS * COLUMNS * 2 // self.ranks
        return {f"{prefix}{rank}": nbytes for rank in range(self.ranks)}


CASES = (
    (Cut(4, 0), Cut(1, 0)),
    (Cut(4, 1), Cut(1, 0)),
    (Cut(16, 1), Cut(1, 0)),
    (Cut(1, 0), Cut(4, 0)),
    (Cut(1, 0), Cut(4, 1)),
    (Cut(1, 0), Cut(16, 1)),
    (Cut(8, 1), Cut(4, 1)),
    (Cut(4, 0), Cut(8, 1)),
)


def seconds(source: Cut, target: Cut, place: Path) -> float:
    """Return the CPU seconds of one conversion."""
    files = source.files(f"{place}/source")
    entries = {entry.key: entry for entry in source.entries(f"{place}/source")}
    for name, nbytes in files.items():
        Path(name).write_bytes(os.urandom(1 << 16) * (nbytes >> 16))
        os.truncate(name, nbytes)
    outputs = tuple(OutputFile(name, nbytes) for name, nbytes in target.files("made").items())
    skeleton = Skeleton(outputs, tuple(target.entries("made")))
    known = {name: SourceFile(name, nbytes) for name, nbytes in files.items()}
    taken = []
    for number in range(ROUNDS):
        out = place / f"out{number}"
        out.mkdir()
        began = time.process_time()
        execute(Plan(entries, skeleton), known, out, MoveOptions())
        taken.append(time.process_time() - began)
        shutil.rmtree(out)
    for name in files:
        Path(name).unlink()
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", type=Path, help="directory for the matrices, best in memory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        whole = 0.0
        for source, target in CASES:
            taken = seconds(source, target, Path(place))
            whole = whole or taken
            print(f"{source!s:12} -> {target!s:12} {taken:6.2f} s {taken / whole:6.2f}", flush=True)


if __name__ == "__main__":
    main()
