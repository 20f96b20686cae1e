"""Put files of another rank, step or run into a valid checkpoint, and see how commands react.

``python -m tests.judged.mutations CHECKPOINTS [--seed DIR] [--step DIR]`` prints the table of
docs/identity.md. CHECKPOINTS is what ``--checkpoints`` of the test command keeps; the other two are
the same cases made with ``JUDGE_SEED_SHIFT=100`` and with ``JUDGE_MORE_STEPS=2``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import reshard
from reshard import formats
from reshard.errors import ReshardError
from tests.judges import deepspeed_cases, library_cases, torch_cases

STATES = (".pt", ".pth", ".bin", ".pkl", ".distcp", ".safetensors", ".ckpt")
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Source:
    """A sound checkpoint, and what the user says of it.

    Args:
        name: its row in the table.
        root: the directory that is copied and changed.
        inside: the part of it that the user names.
    """

    name: str
    root: Path
    inside: str = ""
    told: dict[str, Any] = field(default_factory=dict)


def list_sources(made: Path) -> Iterator[Source]:
    """Yield every checkpoint of several files that the tests' frameworks wrote."""
    for name in deepspeed_cases.CASES:
        yield Source(f"deepspeed {name}", made / name / "run")
    for name, case in torch_cases.CASES.items():
        told = {"model": case.model, "wrap": case.wrap, "key": case.key}
        yield Source(f"torch {name}", made / "torch" / name / "ckpt", case.source, _given(told))
    for name, case in library_cases.CASES.items():
        told = {"model": case.model, "wrap": case.wrap}
        yield Source(
            f"library {name}", made / "libraries" / name / "ckpt", case.source, _given(told)
        )
    for place in sorted((made / "megatron").glob("*/*")):
        if place.is_dir():
            yield Source(f"megatron {place.parent.name} {place.name}", place)


def _given(told: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in told.items() if value is not None}


def families(root: Path) -> list[list[Path]]:
    """Return files whose names or folders differ in their numbers alone, and in their bytes."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in STATES and path.stat().st_size:
            found[_DIGITS.sub("#", str(path.relative_to(root)))].append(path.relative_to(root))
    pairs = [files for files in found.values() if len(files) > 1]
    return [f for f in pairs if (root / f[0]).read_bytes() != (root / f[1]).read_bytes()]


def swap(root: Path, files: list[Path]) -> None:
    """Give two files each other's name."""
    a, b = root / files[0], root / files[1]
    held = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(held)


def copy_over(root: Path, files: list[Path]) -> None:
    """Write one rank's file over another's."""
    shutil.copyfile(root / files[0], root / files[1])


def swap_all(root: Path, groups: list[list[Path]]) -> None:
    """Exchange all the files of two ranks."""
    for files in groups:
        swap(root, files)


def take_from(other: Path) -> Callable[[Path, list[Path]], None]:
    """Take one file from another save of the same case."""

    def mutate(root: Path, files: list[Path]) -> None:
        mine = sorted(p.relative_to(root) for p in root.rglob("*") if p.is_file())
        theirs = sorted(p.relative_to(other) for p in other.rglob("*") if p.is_file())
        alike = {_DIGITS.sub("#", str(a)) for a in mine} == {
            _DIGITS.sub("#", str(b)) for b in theirs
        }
        if len(mine) != len(theirs) or not alike:
            raise NotApplicableError
        (root / files[1]).write_bytes((other / theirs[mine.index(files[1])]).read_bytes())

    return mutate


def exchange_names(root: Path, files: list[Path]) -> None:
    """Exchange two names of one shape in the ``param_shapes`` of one rank."""
    path = root / files[-1]
    if "model_states" not in path.name:
        raise NotApplicableError
    state = torch.load(path, weights_only=False)
    for number, group in enumerate(state.get("param_shapes") or ()):
        by_shape: dict[Any, list[str]] = defaultdict(list)
        for name, shape in group.items():
            by_shape[tuple(shape)].append(name)
        pair = next((names for names in by_shape.values() if len(names) > 1), None)
        if pair:
            other = {pair[0]: pair[1], pair[1]: pair[0]}
            items = [(other.get(name, name), shape) for name, shape in group.items()]
            state["param_shapes"][number] = type(group)(items)
            torch.save(state, path)
            return
    raise NotApplicableError


class NotApplicableError(Exception):
    """The mutation means nothing for these files."""


def list_mutations(
    source: Source, seed: Path | None = None, step: Path | None = None
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield every mutation of a checkpoint, with its name."""
    groups = families(source.root)
    for files in groups:
        kind = _DIGITS.sub("#", files[0].name if files[0].name != files[1].name else str(files[0]))
        yield f"swap {kind}", lambda root, f=files: swap(root, f)
        yield f"copy {kind}", lambda root, f=files: copy_over(root, f)
        for what, other in (("seed", seed), ("step", step)):
            if other is not None and other.is_dir():
                yield f"{what} {kind}", lambda root, f=files, o=other: take_from(o)(root, f)
    if len(groups) > 1:
        yield "both", lambda root: swap_all(root, groups)
    for path in sorted(source.root.rglob("*model_states.pt"))[-1:]:
        yield "names", lambda root, p=path: exchange_names(root, [p.relative_to(source.root)])


REFUSED, REPORTED, HARMLESS, SILENT = "refused", "reported", "harmless", "SILENT"


def run_mutated(source: Source, mutate: Callable[[Path], None], command: str) -> tuple[str, str]:
    """Run a command on the mutated checkpoint; return its result and its message.

    ``harmless``: the state that is read is the same bit by bit, because the files themselves say
    what they hold.
    """
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(shutil.copytree(source.root, Path(scratch, source.root.name), symlinks=True))
        mutate(root)
        place = root / source.inside
        Path(scratch, "out").mkdir()
        try:
            report = run(command, place, Path(scratch, "out"), source.told)
        except ReshardError as error:
            return REFUSED, str(error)
        known = run(command, source.root / source.inside, Path(scratch, "out"), source.told)
        said = set(report) - {text.replace(str(source.root), str(root)) for text in known}
        if said:
            return REPORTED, "; ".join(said)
        try:
            if not reshard.diff(place, source.root / source.inside, **source.told).exit_code:
                return HARMLESS, ""
        except ReshardError as error:
            return REFUSED, str(error)
        return SILENT, ""


def run(command: str, place: Path, out: Path, told: dict[str, Any]) -> list[str]:
    """Run a command dry; its warnings and notes."""
    if command == "merge":
        report = reshard.merge(place, out / "model.safetensors", dry_run=True, **told)
        return list(report.warnings)
    if command == "reader":
        from reshard.dcp import StorageReader

        key = told.get("key")
        manifest = formats.read(place, **told) if told else place
        return list(StorageReader(manifest, key=None if told else key).manifest.warnings)
    to = None if command == "split" else "dcp"
    report = reshard.split(place, out / "split", dry_run=True, to=to, **told)
    return [*report.warnings, *report.notes, *report.derived]


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")


def main() -> None:
    """Print a line for each row that is not refused, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("made", type=Path)
    parser.add_argument("--seed", type=Path)
    parser.add_argument("--step", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--commands", default="merge,split,convert,reader")
    given = parser.parse_args()
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for source in list_sources(given.made):
        if not source.root.is_dir() or given.only not in source.name:
            continue
        others = [
            other and other / source.root.relative_to(given.made)
            for other in (given.seed, given.step)
        ]
        for name, mutate in list_mutations(source, *others):
            for command in given.commands.split(","):
                try:
                    found, text = run_mutated(source, mutate, command)
                except NotApplicableError:
                    continue
                counts[source.name.split()[0], name.split()[0]][found] += 1
                if found in (SILENT, REPORTED):
                    say(f"{source.name:<40} {name:<50} {command:<8} {found} {text[:150]}")
    say("| files of | mutation | refused | reported | harmless | silent |")
    say("| --- | --- | ---: | ---: | ---: | ---: |")
    for (kind, name), found in sorted(counts.items()):
        row = [found[each] for each in (REFUSED, REPORTED, HARMLESS, SILENT)]
        say(f"| {kind} | {name} | " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
