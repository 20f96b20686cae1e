"""Coverage-guided fuzzing of one reader with atheris, which needs ``pip install atheris``.

    python -m benchmarks.hostile.fuzz torch --seconds 600 --corpus /tmp/corpus
    python -m benchmarks.hostile.fuzz checkpoint:verl_sample --file model_world_size_2_rank_0.pt

A reader may return or raise a `ReshardError` of bounded length; all else is a crash, of which
libFuzzer keeps the input. Half of the mutations are libFuzzer's, half those of this package.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["reshard"]):
    from reshard import formats
    from reshard.errors import ReshardError
    from reshard.formats import huggingface, safetensors, torch_file
    from reshard.formats.dcp import metadata
    from reshard.formats.place import Place
    from reshard.pickles.unpickle import loads

from benchmarks.hostile import archives, damage
from benchmarks.hostile.seeds import Seed, kept, made

_MOST_SHOWN = 10_000
_WHOLE = "checkpoint:"
_ENDS = {
    "pickle": (".pt", ".bin", ".pth"),
    "torch": (".pt", ".bin", ".pth"),
    "safetensors": (".safetensors",),
    "metadata": (".metadata",),
    "index": (".index.json",),
}
Read = Callable[[bytes, Path], object]


def _pickle(data: bytes, _place: Path) -> object:
    storages = torch_file._Storages("x")  # noqa: SLF001 - what the reader of files gives it
    return loads(data, where="x", builders=torch_file.TORCH_BUILDERS, persistent=storages)


def _of_file(name: str, read: Callable[[Path], object]) -> Read:
    def run(data: bytes, place: Path) -> object:
        (place / name).write_bytes(data)
        return read(place / name)

    return run


_READERS: dict[str, Read] = {
    "pickle": _pickle,
    "torch": _of_file("x.pt", torch_file.read),
    "safetensors": _of_file("x.safetensors", safetensors.read),
    "metadata": _of_file(".metadata", lambda path: metadata.read([path])),
    "index": _of_file(
        "model.safetensors.index.json", lambda path: huggingface.read(Place([path.parent]))
    ),
}


def main() -> None:
    """Fuzz until the time is over or something breaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", help=f"{', '.join(_READERS)} or {_WHOLE}NAME")
    parser.add_argument("--file", help="which file of a whole checkpoint is fuzzed")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path, help="kept from run to run")
    parser.add_argument("--checkpoints", type=Path, help="those of judges, beside the kept ones")
    asked = parser.parse_args()
    found = [*kept(), *(made(asked.checkpoints) if asked.checkpoints else [])]
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm") as name:
        place, corpus = Path(name, "in"), asked.corpus or Path(name, "corpus")
        place.mkdir()
        corpus.mkdir(parents=True, exist_ok=True)
        whole = asked.reader.startswith(_WHOLE)
        read, inputs = _checkpoint(found, asked, place) if whole else _one(found, asked.reader)
        for number, data in enumerate(inputs):
            (corpus / f"seed{number}").write_bytes(data)
        limits = [f"-max_total_time={asked.seconds}", "-timeout=20", "-rss_limit_mb=3000"]
        atheris.Setup(
            [
                sys.argv[0],
                *limits,
                "-max_len=200000",
                f"-artifact_prefix={os.curdir}/",
                str(corpus),
            ],
            lambda data: _run(read, data, place),
            custom_mutator=_mutated(asked.file or f"x{_ENDS.get(asked.reader, ('.pt',))[0]}"),
        )
        atheris.Fuzz()


def _run(read: Read, data: bytes, place: Path) -> None:
    try:
        read(data, place)
    except ReshardError as error:
        if len(str(error)) > _MOST_SHOWN:
            raise AssertionError("a message without end") from error


def _mutated(name: str) -> Callable[[bytes, int, int], bytes]:
    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        chance = Random(seed)
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, max_size))
        return damage.of_content(name, data)(chance, data)[:max_size]

    return mutate


def _one(found: list[Seed], reader: str) -> tuple[Read, list[bytes]]:
    """A reader of one file, and files of that kind to begin with; the smaller ones."""
    paths = {seed.place / file for seed in found for file in seed.files}
    ends = _ENDS[reader]
    held = sorted((path for path in paths if path.name.endswith(ends)), key=_size)[:60]
    inputs = [path.read_bytes() for path in held]
    if reader == "pickle":
        packed = [member for data in inputs for member in archives.unpacked(data)]
        inputs = [member.data for member in packed if member.name.endswith(b"data.pkl")]
    return _READERS[reader], inputs


def _size(path: Path) -> int:
    return path.stat().st_size


def _checkpoint(
    found: list[Seed], asked: argparse.Namespace, place: Path
) -> tuple[Read, list[bytes]]:
    """One file of a checkpoint, in the middle of its others."""
    name = asked.reader.removeprefix(_WHOLE)
    seed = next(s for s in found if name in s.name and ":" not in s.name)
    target = next(file for file in seed.files if file.endswith(asked.file or ""))
    for file in seed.files:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_bytes((seed.place / file).read_bytes())

    def read(data: bytes, _place: Path) -> object:
        (place / target).write_bytes(data)
        return formats.read(place / seed.given)

    return read, [(seed.place / target).read_bytes()]


if __name__ == "__main__":
    main()
