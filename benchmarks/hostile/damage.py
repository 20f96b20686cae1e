"""Choose which file of a checkpoint to damage, and how, as a function of the seed alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.hostile import archives, pickles, values
from benchmarks.hostile.seeds import Seed

_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"


@dataclass
class Tree:
    """A checkpoint as a case finds it: what was altered, and what is linked from the seed."""

    seed: Seed
    names: list[str]
    origin: dict[str, str]  # name -> the seed's file of that content
    altered: dict[str, bytes] = field(default_factory=dict)
    odd: dict[str, Callable[[str], None]] = field(default_factory=dict)  # name -> what makes it
    log: list[str] = field(default_factory=list)

    def content(self, name: str) -> bytes:
        """Return the current bytes of a file."""
        if name in self.altered:
            return self.altered[name]
        return (self.seed.place / self.origin[name]).read_bytes()

    def lay_out(self, place: Path) -> Path:
        """Write the checkpoint into an empty directory; return the path that a user passes."""
        for name in self.names:
            path = os.path.join(place, name)  # noqa: PTH118 - a name need not be text
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
            if name in self.odd:
                self.odd[name](path)
            elif name in self.altered:
                with open(path, "wb") as file:  # noqa: PTH123
                    file.write(self.altered[name])
            else:
                os.link(self.seed.place / self.origin[name], path)
        return place / self.seed.given


def damaged(chance: Random, seed: Seed) -> Tree:
    """Damage a seed in one to three places."""
    tree = Tree(seed, list(seed.files), {name: name for name in seed.files})
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
        if chance.random() < 0.15 and len(tree.names) > 1:
            of_directory(chance, tree)
        else:
            _of_some_file(chance, tree)
    return tree


def of_content(  # noqa: PLR0911 - a return a format
    name: str, data: bytes
) -> Callable[[Random, bytes], bytes]:
    """Return damage that fits the type of a file."""
    base = name.rsplit("/", 1)[-1]
    if data.startswith(b"PK\x03\x04") and not base.endswith(".distcp"):
        return archives.damaged
    if base.endswith(".metadata") or data.startswith((_LEGACY, b"\x80")):
        return pickles.damaged
    if base.endswith(".safetensors"):
        return values.header
    if base.endswith(".json"):
        return values.document
    if base.endswith((".yml", ".yaml")):
        return values.settings
    if len(data) < 4096 and b"\0" not in data:
        return values.text
    return values.raw


def _of_some_file(chance: Random, tree: Tree) -> None:
    whole = [name for name in tree.names if name not in tree.odd]
    if not whole:
        return
    small = [n for n in whole if n.endswith((".json", ".metadata", "latest", ".txt", "common.pt"))]
    name = chance.choice(small if small and chance.random() < 0.3 else whole)
    of_file(chance, tree, name, inside=False)


def of_file(chance: Random, tree: Tree, name: str, *, inside: bool) -> None:
    """Damage one file.

    Args:
        inside: damage only its content, so that it usually remains a file of its format.
    """
    data = tree.content(name)
    change = of_content(name, data) if inside or chance.random() < 0.9 else values.raw
    if inside and change is archives.damaged:
        change = archives.of_pickle
    tree.altered[name] = change(chance, data)
    tree.log.append(f"{change.__module__.rsplit('.', 1)[-1]}.{change.__name__}({name})")


def of_directory(chance: Random, tree: Tree) -> None:
    """Remove, empty, exchange or rename a file, or put something else in its place."""
    if not tree.names:
        return
    at = chance.randrange(len(tree.names))
    name, other = tree.names[at], chance.choice(tree.names)
    change = chance.choice(_CHANGES)
    tree.log.append(f"{change.__name__.strip('_')}({name})")
    change(chance, tree, at, other)


def _removed(_chance: Random, tree: Tree, at: int, _other: str) -> None:
    del tree.names[at]


def _emptied(_chance: Random, tree: Tree, at: int, _other: str) -> None:
    tree.altered[tree.names[at]] = b""


def _exchanged(_chance: Random, tree: Tree, at: int, other: str) -> None:
    """Give one file the content of another."""
    name = tree.names[at]
    if name not in tree.odd and other not in tree.odd:
        tree.altered[name] = tree.content(other)


def _renumbered(chance: Random, tree: Tree, at: int, _other: str) -> None:
    """Replace a rank's number in a name."""
    name = tree.names[at]
    digits = [i for i, letter in enumerate(name) if letter.isdigit()]
    if digits:
        i = chance.choice(digits)
        number = chance.choice(("0", "1", "7", "00", "99999999", "-1", "\N{SUPERSCRIPT TWO}", ""))
        _move(tree, at, name[:i] + number + name[i + 1 :], keep=chance.random() < 0.5)


def _renamed(chance: Random, tree: Tree, at: int, _other: str) -> None:
    """Change the case of a name, add control characters, or make it invalid text."""
    name = tree.names[at]
    folder, slash, base = name.rpartition("/")
    odd = chance.choice(
        (base.upper(), base + "\x1b[2J", "\udcff\udcfe" + base, base + " ", base[:-1], "." + base)
    )
    _move(tree, at, folder + slash + odd, keep=chance.random() < 0.5)


def _made_odd(chance: Random, tree: Tree, at: int, other: str) -> None:
    """Replace a file by a link in a circle, to nowhere, to a device or out; by a folder or pipe."""
    target = chance.choice(
        (
            tree.names[at].rsplit("/", 1)[-1],
            "nowhere",
            "/dev/zero",
            "/etc",
            "/etc/passwd",
            "..",
            other,
        )
    )
    tree.odd[tree.names[at]] = chance.choice(
        (lambda path: os.symlink(target, path), os.mkdir, os.mkfifo)  # noqa: PTH211
    )
    tree.log[-1] += f" -> {target}"


def _move(tree: Tree, at: int, name: str, *, keep: bool) -> None:
    old = tree.names[at]
    inside = not name.startswith("/") and ".." not in name.split("/")
    if not inside or name in tree.names or len(name.rsplit("/", 1)[-1]) not in range(1, 200):
        return
    for held in (tree.altered, tree.odd, tree.origin):
        if old in held:
            held[name] = held[old]  # type: ignore[index]
    if keep:
        tree.names.append(name)
    else:
        tree.names[at] = name


_CHANGES = (_removed, _removed, _emptied, _exchanged, _renumbered, _renumbered, _renamed, _made_odd)
