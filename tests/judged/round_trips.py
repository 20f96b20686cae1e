"""Split real checkpoints to another size and back, and list the differences.

``python -m tests.judged.round_trips OUT [WORD ...]`` makes every checkpoint of the PyTorch and
library judges in OUT (those whose names have one of the words), runs ``verify --deep`` on each,
splits it N -> M -> N in its own framework, and prints a line for each: ``same``, or what differs.
It takes some minutes, and ends with 1 where anything differs that is not told in ``KNOWN``.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import reshard
from tests.judges import library_judge, torch_judge

KNOWN = {
    "rng": "random states of ranks that are gone are dropped, or made anew with --rng derive",
}
OTHER, USUAL = 2, 3  # ranks in between


@dataclass(frozen=True)
class Trip:
    """One checkpoint to send there and back; ``told`` is what its files do not say."""

    name: str
    source: Path
    told: dict[str, Any] = field(default_factory=dict)


def of_library(name: str, made: Path) -> Trip:
    """Return the trip of a library case in the directory of those that were made."""
    case = library_judge.CASES[name]
    needed = case.model if name.startswith(("acc_ddp", "acc_single", "acc_auto")) else None
    return Trip(name, made / name / "ckpt" / case.source, {"model": needed} if needed else {})


def of_torch(name: str, made: Path) -> Trip:
    """Return the trip of a PyTorch case in the directory of those that were made."""
    case = torch_judge.CASES[name]
    told = {"model": case.model, "wrap": case.wrap} if "local" in name else {}
    return Trip(
        name, made / name / "ckpt" / case.source, {k: v for k, v in told.items() if v is not None}
    )


def differences(trip: Trip, place: Path) -> list[str]:
    """Split there and back, and return what is not the same in words.

    Raises:
        ReshardError: it is refused.
    """
    with reshard.open(trip.source, **trip.told) as checkpoint:
        world = checkpoint.manifest.origin.world
    between = OTHER if world == USUAL else USUAL
    reshard.split(trip.source, place / "there", world_size=between, **trip.told)
    reshard.split(place / "there", place / "back", world_size=world, **trip.told)
    found = reshard.diff(trip.source, place / "back", **trip.told)
    told = [each.describe() for each in found.unequal]
    told += [f"{kind} {fqn} is lost" for kind, fqn in found.only_a]
    told += [f"{kind} {fqn} is new" for kind, fqn in found.only_b]
    told += [f"{value.name}: {value.a} and {value.b}" for value in found.train]
    told += _alarms(place / "there", trip) + _alarms(place / "back", trip)
    return [text for text in told if text.split(":")[0] not in KNOWN]


def _alarms(path: Path, trip: Trip) -> list[str]:
    """Return what ``verify --deep`` has against a sound checkpoint."""
    report = reshard.verify(path, deep=True, **trip.told)
    return [
        f"verify: {check.name}: {text}"
        for check in report.checks
        for text in (*check.failures, *check.warnings)
    ]


def check(trip: Trip, place: Path) -> None:
    """Fail with all that is not the same."""
    assert _failures(trip.source, trip) == []
    assert differences(trip, place) == []


def _failures(path: Path, trip: Trip) -> list[str]:
    report = reshard.verify(path, deep=True, **trip.told)
    return [f"{check.name}: {text}" for check in report.checks for text in check.failures]


def main() -> None:
    """Make all, send all, print a line for each."""
    out, words = Path(sys.argv[1]), sys.argv[2:]
    wrong = 0
    for trip in _all(out, words):
        place = out / "trips" / trip.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        try:
            found = _failures(trip.source, trip) + differences(trip, place)
        except reshard.ReshardError as error:
            print(f"{trip.name:45} refused: {str(error).splitlines()[0]}")  # noqa: T201
            continue
        wrong += bool(found)
        print(f"{trip.name:45} {json.dumps(found) if found else 'same'}", flush=True)  # noqa: T201
        shutil.rmtree(place)
    sys.exit(bool(wrong))


def _all(out: Path, words: list[str]) -> list[Trip]:
    trips = []
    for judge, folder, of in (
        (library_judge, "libraries", of_library),
        (torch_judge, "torch", of_torch),
    ):
        place = out / folder
        place.mkdir(parents=True, exist_ok=True)
        names = [n for n in judge.CASES if not words or any(word in n for word in words)]
        if judge is torch_judge:
            names = [n for n in names if torch_judge.writable(torch_judge.CASES[n])]
        judge.make_all(place, [n for n in names if not (place / n).is_dir()])
        trips += [of(n, place) for n in names if (place / n).is_dir()]
    return [t for t in trips if _expected(t.name)]


def _expected(name: str) -> bool:
    """Return whether the case is one that is read."""
    case = library_judge.CASES.get(name) or torch_judge.CASES[name]
    return case.expect == "read"


if __name__ == "__main__":
    main()
