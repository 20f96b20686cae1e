"""Distribute cases over processes; a worker that hangs or dies is a finding of its case."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from benchmarks.hostile import case
from benchmarks.hostile.case import Verdict
from benchmarks.hostile.seeds import Seed

WALL_SECONDS = 600.0  # of a worker that does not answer; the machine may be busy
_ADDRESS_SPACE = 6 << 30


@dataclass(slots=True)
class Finding:
    """A case that did not end as it should."""

    index: int
    told: str
    verdict: Verdict


@dataclass(slots=True)
class Result:
    """What all cases came to."""

    codes: Counter[int] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    tripped: Counter[str] = field(default_factory=Counter)  # where readers tripped over a type
    slowest: tuple[float, int] = (0.0, -1)  # seconds, index
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """Return how many cases were run."""
        return sum(self.codes.values())


class _Worker:
    """A process that runs every n-th case."""

    def __init__(self, seeds: list[Seed], seed: int, indices: range, scratch: Path) -> None:
        self.indices = indices
        self.began = time.monotonic()
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_work, args=(seeds, seed, indices, scratch, theirs))
        self.process.start()
        theirs.close()


def _work(seeds: list[Seed], seed: int, indices: range, scratch: Path, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    scratch.mkdir(parents=True, exist_ok=True)
    sys.dont_write_bytecode = True
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch)  # which torch makes where it is imported
    for index in indices:
        began = time.process_time()
        told, verdict = case.run(seeds, seed, index, scratch)
        pipe.send((index, told, verdict, time.process_time() - began))
    pipe.close()
    os._exit(0)


def run(
    seeds: list[Seed], seed: int, cases: range, scratch: Path, *, workers: int
) -> Iterator[Result]:
    """Run cases, and tell from time to time how far it came; the last is the whole result."""
    result, began, shown = Result(), time.monotonic(), 0.0
    shares = [cases[n::workers] for n in range(workers)]
    team = [_Worker(seeds, seed, s, scratch / str(n)) for n, s in enumerate(shares)]
    places = {worker.pipe: n for n, worker in enumerate(team)}
    while places:
        for pipe in wait(list(places), timeout=1.0):
            n = places[pipe]  # type: ignore[index]
            try:
                index, told, verdict, seconds = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                _replace(result, team, places, n, (seeds, seed, scratch))
                continue
            team[n].indices = team[n].indices[team[n].indices.index(index) + 1 :]
            team[n].began = time.monotonic()
            result.codes[verdict.code] += 1
            result.tripped.update([verdict.tripped] if verdict.tripped else [])
            result.slowest = max(result.slowest, (seconds, index))
            if verdict.wrong:
                result.findings.append(Finding(index, told, verdict))
        for worker in team:
            if worker.pipe in places and time.monotonic() - worker.began > WALL_SECONDS:
                worker.process.kill()  # which closes its pipe
        result.seconds = time.monotonic() - began
        if result.seconds - shown > 10:
            shown = result.seconds
            yield result
    yield result


def _replace(
    result: Result,
    team: list[_Worker],
    places: dict[Connection, int],
    n: int,
    what: tuple[list[Seed], int, Path],
) -> None:
    """Replace a worker that has ended: all is done, or its next case killed it."""
    ended = team[n]
    ended.process.join()
    del places[ended.pipe]
    if not ended.indices:
        return
    index, rest = ended.indices[0], ended.indices[1:]
    verdict = Verdict(70, f"its process ended with {ended.process.exitcode}: a crash or a hang")
    result.codes[70] += 1
    result.findings.append(Finding(index, "", verdict))
    seeds, seed, scratch = what
    team[n] = _Worker(seeds, seed, rest, scratch / str(n))
    places[team[n].pipe] = n
