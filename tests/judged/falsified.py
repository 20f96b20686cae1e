"""Falsify one value of one rank's file of a sound checkpoint, and see whether reading refuses it.

``python -m tests.judged.falsified CHECKPOINTS`` prints the table of docs/identity.md, "What is
stated twice". CHECKPOINTS is what ``--checkpoints`` of the test command keeps.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reshard import formats
from reshard.checks.identity import check_identity
from reshard.checks.identity.counters import find_counter_conflicts
from reshard.checks.train import find_differences
from reshard.core.manifest import Manifest
from reshard.errors import ReshardError
from tests.judged.mutations import Source, list_sources, say

_FILES = (".pt", ".pth", ".bin", ".ckpt")
_DIGITS = re.compile(r"\d+")
_RANDOM = re.compile(r"rng|random|seed|np_|torch_", re.IGNORECASE)
_DEPTH = 7
TRIED, REFUSED, REPORTED, UNUSED, ONCE, SILENT, FALSE_ALARM = COLUMNS = (
    *("tried", "refused", "reported", "not used", "stated once", "silent"),
    "false alarms",
)


class Trial(NamedTuple):
    """A value that was falsified, and what became of it.

    Args:
        path: the value's place in the file; for a false alarm, the message.
        refusal: the message, if reading refused it.
        file, key: whether the message has the file's name, and the key.
    """

    path: str
    outcome: str
    refusal: str = ""
    file: bool = False
    key: bool = False


@dataclass(frozen=True)
class Value:
    """A plain value in a file: the container that has it, its key there, and its path."""

    holder: Any
    key: Any
    path: str

    def get(self) -> Any:
        """Return the value."""
        if isinstance(self.holder, (dict, list)):
            return self.holder[self.key]
        return getattr(self.holder, self.key)

    def set(self, value: Any) -> None:
        """Replace the value."""
        if isinstance(self.holder, (dict, list)):
            self.holder[self.key] = value
        else:
            object.__setattr__(self.holder, self.key, value)


def list_values(root: Any) -> Iterator[Value]:
    """Yield one plain value of each name."""
    return (value for value in list_places(root) if falsify(value.get()) is not None)


def list_places(root: Any, path: str = "", depth: int = 0) -> Iterator[Value]:
    """Yield one value of each name, a container before what is in it.

    Names of parameters count as one, and so do numbers in names.
    """
    if isinstance(root, dict):
        items = list(root.items())
    elif isinstance(root, list):
        items = list(enumerate(root))[:1]
    elif hasattr(root, "__dict__") and not isinstance(root, (torch.Tensor, torch.nn.Module, type)):
        items = list(vars(root).items())
    else:
        return
    seen, told = set(), set()
    for key, value in items if depth < _DEPTH else ():
        name = "*" if "." in str(key) else _DIGITS.sub("#", str(key))
        if name in seen or _RANDOM.search(name):
            continue
        inside = f"{path}.{name}".lstrip(".")
        is_plain = falsify(value) is not None
        if is_plain or (value is not None and name not in told):
            yield Value(root, key, inside)
        deeper = [] if is_plain else list(list_places(value, inside, depth + 1))
        yield from deeper
        told.add(name)
        if is_plain or any(falsify(each.get()) is not None for each in deeper):
            seen.add(name)


def falsify(value: Any) -> Any:
    """Return another value of the same kind; None for a container, a tensor or None."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return type(value)(value + 1) if type(value) in (int, float) else None
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, (tuple, list)) and value and all(type(n) in (int, float) for n in value):
        return type(value)([value[0] + 1, *value[1:]])
    return None


def are_same(a: Manifest, b: Manifest) -> bool:
    """Return whether a conversion takes the same from both, apart from the places of tensors."""

    def describe(manifest: Manifest) -> Any:
        entries = {key: (entry.dtype, entry.shape) for key, entry in manifest.entries.items()}
        return entries, manifest.train.config, manifest.tied, manifest.frozen

    return describe(a) == describe(b) and not any(find_differences(a, b))


def read(source: Source, root: Path) -> tuple[Manifest, set[str]]:
    """Read a checkpoint as every conversion does; return the manifest and its warnings."""
    manifest = formats.read(root / source.inside, **source.told)
    check_identity(manifest)
    return manifest, {*manifest.warnings, *find_counter_conflicts(manifest)}


def select_files(place: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the last file of each kind, and whether there are several of the kind.

    Args:
        place: what the user names; a file beside others that the user does not name is alone.
    """
    kinds = defaultdict(list)
    root = place if place.is_dir() else place.parent
    for path in sorted(root.rglob("*")):
        if path.suffix in _FILES and path.is_file():
            kinds[_DIGITS.sub("#", str(path.relative_to(root)))].append(path)
    for paths in kinds.values():
        yield paths[-1], len(paths) > 1


def load(path: Path) -> Any:
    """Load a file with all its objects, whose modules may warn when they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, weights_only=False, map_location="cpu")


def try_source(source: Source, every: int = 1) -> Iterator[Trial]:
    """Yield what became of each value that was falsified.

    Args:
        every: 2 tries every second value of a file.
    """
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(shutil.copytree(source.root, Path(scratch, source.root.name), symlinks=True))
        try:
            read(source, root)
        except ReshardError:
            return  # refused for another reason, such as a layout that is not supported
        for path, is_repeated in list(select_files(root / source.inside)):
            content = path.read_bytes()
            try:
                state = load(path)
            except Exception:  # noqa: BLE001 - a class that is not installed
                continue
            torch.save(state, path)
            try:
                known, said = read(source, root)
            except ReshardError as error:
                yield Trial(f"{path.name}: {error}", FALSE_ALARM)
                path.write_bytes(content)
                continue
            for value in islice(list_values(state), 0, None, every):
                true = value.get()
                value.set(falsify(true))
                torch.save(state, path)
                value.set(true)
                outcome, refusal = judge(source, root, known, said, is_repeated=is_repeated)
                has_file = re.search(rf"(?<![\w.]){re.escape(path.name)}", refusal) is not None
                keys = [key for key in value.path.split(".") if key.strip("#*_") == key] or [""]
                yield Trial(value.path, outcome, refusal, has_file, keys[-1] in refusal)
            path.write_bytes(content)


def judge(
    source: Source, root: Path, known: Manifest, said: set[str], *, is_repeated: bool
) -> tuple[str, str]:
    """Return what reading makes of a falsified file, and the message that refuses it."""
    try:
        found, warnings = read(source, root)
    except ReshardError as error:
        return REFUSED, str(error)
    if warnings - said:
        return REPORTED, ""
    if are_same(found, known):
        return UNUSED, ""
    return SILENT if is_repeated else ONCE, ""


def main() -> None:
    """Print the silent values, and the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("made", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    silent: Counter[tuple[str, str, str]] = Counter()
    for source in list_sources(given.made):
        if not source.root.is_dir() or not re.search(given.only, source.name):
            continue
        family = source.name.split()[0]
        counts[family]["checkpoints"] += 1
        for path, found, *_ in try_source(source, given.every):
            counts[family][TRIED] += found != FALSE_ALARM
            counts[family][found] += 1
            if found in (SILENT, ONCE, FALSE_ALARM):
                silent[family, found, path] += 1
    for (family, found, path), number in sorted(silent.items()):
        say(f"{family} {found}: {path} ({number})")
    say(f"| files of | checkpoints | {' | '.join(COLUMNS)} |")
    say("| --- |" + " ---: |" * (len(COLUMNS) + 1))
    for family, found in sorted(counts.items()):
        row = [str(found[name]) for name in ("checkpoints", *COLUMNS)]
        say(f"| {family} | {' | '.join(row)} |")


if __name__ == "__main__":
    sys.exit(main())
