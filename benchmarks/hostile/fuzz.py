"""Fuzz the readers with atheris, guided by coverage; needs ``pip install atheris``.

    python -m benchmarks.hostile.fuzz --all --seconds 180 --checkpoints DIR
    python -m benchmarks.hostile.fuzz zero3 dcp --seconds 600 --corpus DIR
    python -m benchmarks.hostile.fuzz zero3 --replay 0123456789abcdef

For a whole checkpoint, the input bytes are a recipe (see `recipes`): a command runs on the damaged
checkpoint, and `case` checks it. A reader of a single file gets the input bytes. A finding does not
stop the run: each place is printed once, with the recipe or the bytes that lead to it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["reshard"], exclude=["reshard.__main__"]):
    import reshard
    from reshard.containers import safetensors, torch_objects, torch_reader
    from reshard.containers.pickles.unpickle import loads
    from reshard.core.location import Location
    from reshard.errors import ReshardError, understood
    from reshard.formats.huggingface import reader as of_huggingface

    for module in pkgutil.walk_packages(reshard.__path__, "reshard."):
        if module.name not in ("reshard.__main__", "reshard.dcp", "reshard.system.ranks.torchrun"):
            importlib.import_module(module.name)

from benchmarks.hostile import archives, campaign, case, damage, recipes, targets
from benchmarks.hostile.case import Verdict
from benchmarks.hostile.seeds import Seed, private
from benchmarks.hostile.targets import Target

_MOST_SHOWN = 10_000
_LONGEST = 200_000  # bytes of a file by itself
Read = Callable[[bytes, Path], object]


@dataclass(frozen=True, slots=True)
class _Fuzzed:
    """What libFuzzer is given: where to begin, what an input does, how one becomes another."""

    inputs: list[bytes]
    run: Callable[[bytes], tuple[str, Verdict]]
    varied: Callable[[Random, bytes], bytes]
    crossed: Callable[[Random, bytes, bytes], bytes] | None = None


def main() -> int:
    """Run the fuzzer; return 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = {target.name: target for target in targets.TARGETS}
    parser.add_argument("target", nargs="*", metavar="TARGET", help=", ".join(known))
    parser.add_argument("--all", action="store_true", help="fuzz every target")
    parser.add_argument("--seconds", type=int, default=180, help="time per target")
    parser.add_argument("--corpus", type=Path, help="directory that keeps inputs for later runs")
    parser.add_argument("--checkpoints", type=Path, help="further checkpoints, which judges wrote")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))
    parser.add_argument(
        "--replay", metavar="HEX", help="repeat one input; keep its files in --scratch"
    )
    asked = parser.parse_args()
    names = list(known) if asked.all else asked.target
    if not names or any(name not in known for name in names):
        parser.error(f"targets are {', '.join(known)}")
    found = targets.seeds(asked.checkpoints)
    if asked.replay:
        place = Path(tempfile.mkdtemp(prefix="replay-", dir=asked.scratch))
        told, verdict = _fuzzed(known[names[0]], found, place).run(bytes.fromhex(asked.replay))
        print(told, verdict.trace, f"exit code {verdict.code} {verdict.wrong}", place, sep="\n")
        return int(bool(verdict.wrong))

    def fuzz(name: str, scratch: Path, findings: Path) -> None:
        corpus = asked.corpus / name if asked.corpus else scratch / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        _fuzz(_fuzzed(known[name], found, scratch), corpus, asked.seconds, findings)

    return campaign.run(names, asked.seconds, asked.scratch, fuzz)


def _fuzzed(target: Target, found: list[Seed], scratch: Path) -> _Fuzzed:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch)  # which torch makes where it is imported
    seed = targets.seed_of(target, found)
    if target.checkpoint and seed is None:
        raise SystemExit(f"{target.name}: {target.checkpoint} is not here: --checkpoints DIR")
    if seed is None:
        return _alone(target, found, scratch)
    (held,) = private([seed], scratch / "seed")
    files = target.files(held)

    def run(recipe: bytes) -> tuple[str, Verdict]:
        return case.ran(*recipes.cooked(recipe, held, files), scratch, headers=True)

    begin = [recipes.made(Random(n), steps) for n in range(40) for steps in (0, 1)]
    return _Fuzzed(begin, run, recipes.varied, recipes.crossed)


def _pickle(data: bytes, _place: Path) -> object:
    storages = torch_objects.Storages("x")
    return loads(data, where="x", builders=torch_objects.TORCH_BUILDERS, persistent=storages)


def _of_file(name: str, read: Callable[[Path], object]) -> Read:
    def run(data: bytes, place: Path) -> object:
        (place / name).write_bytes(data)
        return read(place / name)

    return run


_READERS: dict[str, Read] = {
    "pickle": _pickle,
    "torch_file": _of_file("x.pt", torch_reader.read),
    "safetensors": _of_file("x.safetensors", safetensors.read),
    "index": _of_file(
        "model.safetensors.index.json", lambda path: of_huggingface.read(Location([path.parent]))
    ),
}


def _alone(target: Target, found: list[Seed], place: Path) -> _Fuzzed:
    """Fuzz a reader of one file; half of the mutations are libFuzzer's, half from this package."""
    read, begin = _READERS[target.name], targets.inputs(target, found)
    if target.name == "pickle":
        packed = [member for data in begin for member in archives.unpacked(data)]
        begin = [member.data for member in packed if member.name.endswith(b"data.pkl")]

    def run(data: bytes) -> tuple[str, Verdict]:
        return target.name, _read(read, data, place)

    def varied(chance: Random, data: bytes) -> bytes:
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, _LONGEST))
        return damage.of_content(f"x{target.ends[0]}", data)(chance, data)

    return _Fuzzed(begin, run, varied)


def _read(read: Read, data: bytes, place: Path) -> Verdict:
    try:
        with understood(place):
            read(data, place)
    except ReshardError as error:
        wrong = "a message without end" if len(str(error)) > _MOST_SHOWN else ""
        return Verdict(error.exit_code, wrong, tripped=case.tripped(error))
    except Exception as error:  # noqa: BLE001 - this is what is judged
        return Verdict(70, f"{type(error).__name__}: {error!s:.200}", case.frames(error))
    return Verdict(0)


def _fuzz(fuzzed: _Fuzzed, corpus: Path, seconds: int, findings: Path) -> None:
    """Fuzz for some seconds; libFuzzer then ends the process."""
    for number, data in enumerate(fuzzed.inputs):
        (corpus / f"seed{number}").write_bytes(data)
    seen: set[tuple[str, str]] = set()

    def run(data: bytes) -> None:
        told, verdict = fuzzed.run(data)
        kind, where = (verdict.wrong, verdict.where) if verdict.wrong else ("", verdict.tripped)
        if (kind or where) and (kind[:30], where) not in seen:
            seen.add((kind[:30], where))
            line = {"wrong": kind, "where": where, "told": told, "input": data.hex()}
            with findings.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        return fuzzed.varied(Random(seed), data)[:most]

    def cross(one: bytes, other: bytes, most: int, seed: int) -> bytes:
        return fuzzed.crossed(Random(seed), one, other)[:most] if fuzzed.crossed else one

    limits = [f"-max_total_time={seconds}", "-timeout=60", "-rss_limit_mb=6000"]
    shown = ["-print_final_stats=1", f"-max_len={_LONGEST}", f"-artifact_prefix={corpus.parent}/"]
    more = {"custom_crossover": cross} if fuzzed.crossed else {}
    words = [sys.argv[0], *limits, *shown, str(corpus)]
    atheris.Setup(words, run, custom_mutator=mutate, **more)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
