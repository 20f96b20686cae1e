"""Encode a case as a few bytes that a fuzzer varies: a command, and steps of damage.

A step names a file, or the files of one kind of all ranks, and the seed of the damage. Every
variation is therefore a checkpoint with damage where readers look: one step here does what
libFuzzer would find in the bytes of an archive only after hours. A recipe that reached a new branch
gets further steps.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from random import Random

from benchmarks.hostile import damage
from benchmarks.hostile.seeds import Seed

_COMMAND = struct.Struct("<I")  # the seed of its choice
_STEP = struct.Struct("<BHI")  # what is hurt, which file, the seed of its damage
_MOST = 6  # steps
_OF_DIRECTORY = 12  # of 256 steps; of the others every second hurts all files of a kind alike


def made(chance: Random, steps: int = 1) -> bytes:
    """Return a random recipe."""
    return _joined(_number(chance), [_step(chance) for _ in range(steps)])


def varied(chance: Random, recipe: bytes) -> bytes:
    """Return a recipe with one step more, less or changed, or another command."""
    command, steps = _parted(recipe)
    kind = chance.randrange(8)
    if kind == 0:
        command = _number(chance)
    elif kind == 1 and steps:
        del steps[chance.randrange(len(steps))]
    elif kind < 5 and steps:
        steps[chance.randrange(len(steps))] = _step(chance)
    else:
        steps.append(_step(chance))
    return _joined(command, steps)


def crossed(chance: Random, one: bytes, other: bytes) -> bytes:
    """Combine the steps of two recipes."""
    command, steps = _parted(one)
    steps += _parted(other)[1]
    return _joined(command, chance.sample(steps, min(len(steps), chance.randint(1, _MOST))))


def cooked(recipe: bytes, seed: Seed, files: Sequence[str]) -> tuple[Random, damage.Tree]:
    """Build the damaged checkpoint, and the seed that chooses the command.

    Args:
        files: of the checkpoint, those that steps may name.
    """
    command, steps = _parted(recipe)
    tree = damage.Tree(seed, list(seed.files), {name: name for name in seed.files})
    for kind, which, number in steps:
        if kind < _OF_DIRECTORY:
            damage.of_directory(Random(number), tree)
            continue
        named = files[which % len(files)]
        for name in [f for f in files if _kind(f) == _kind(named)] if kind % 2 else [named]:
            if name in tree.names and name not in tree.odd:
                damage.of_file(Random(number), tree, name, inside=kind % 16 > 1)
    return Random(command), tree


def _kind(file: str) -> str:
    """Return the part of a name that the files of all ranks share."""
    return re.sub(r"\d+", "#", file)


def _number(chance: Random) -> int:
    return chance.randrange(1 << 32)


def _step(chance: Random) -> tuple[int, int, int]:
    return chance.randrange(1 << 8), chance.randrange(1 << 16), _number(chance)


def _joined(command: int, steps: list[tuple[int, int, int]]) -> bytes:
    return _COMMAND.pack(command) + b"".join(_STEP.pack(*step) for step in steps[-_MOST:])


def _parted(recipe: bytes) -> tuple[int, list[tuple[int, int, int]]]:
    padded = recipe.ljust(_COMMAND.size, b"\0")
    held = padded[_COMMAND.size :]
    whole = len(held) // _STEP.size * _STEP.size
    return _COMMAND.unpack_from(padded)[0], list(_STEP.iter_unpack(held[:whole]))[:_MOST]
