"""Find the checkpoints to damage: real frameworks wrote them, for tests/data or for a judge."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 6 << 20
MAX_FILES = 150
_KEPT = (
    "examples/llama-zero3-4ranks",
    "tests/data/bloom/*/run",
    "tests/data/colossalai/*/ckpt",
    "tests/data/fairscale/*/ckpt",
    "tests/data/gpt_neox/*/run",
    "tests/data/megatron/*/torch",
    "tests/data/megatron/*/torch_dist",
    "tests/data/megatron/*/ckpt",
    "tests/data/megatron_deepspeed/*/run",
    "tests/data/meta/*",
    "plugins/nanotron/tests/data/*/ckpt",
    "tests/data/torchtitan/*/ckpt",
    "tests/data/verl/*/ckpt",
)
_MADE = ("ckpt", "run", "universal", "torch", "torch_dist*")  # below a judge's folder of a case


@dataclass(frozen=True, slots=True)
class Seed:
    """One checkpoint: its files by relative path, and where below it a user's path points."""

    name: str
    place: Path
    files: tuple[str, ...]
    given: str = "."


def kept() -> list[Seed]:
    """Return the checkpoints in the repository."""
    found = [place for pattern in _KEPT for place in sorted(ROOT.glob(pattern))]
    return [seed for place in found for seed in _seeds(place, str(place.relative_to(ROOT)))]


def made(checkpoints: Path) -> list[Seed]:
    """Return the checkpoints that judges made below a directory (the tests' ``--checkpoints``)."""
    found = [place for name in _MADE for place in sorted(checkpoints.glob(f"**/{name}"))]
    return [s for place in found for s in _seeds(place, str(place.relative_to(checkpoints)))]


def private(seeds: list[Seed], place: Path) -> list[Seed]:
    """Make copies that cases can link to, on the file system of the scratch directory."""
    copied = []
    for number, seed in enumerate(seeds):
        target = place / str(number)
        for file in seed.files:
            path = target / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((seed.place / file).read_bytes())
        copied.append(Seed(seed.name, target, seed.files, seed.given))
    return copied


def _seeds(place: Path, name: str) -> list[Seed]:
    """Return the directory, and a file of it that can be a checkpoint by itself."""
    if not place.is_dir():
        return []
    files = tuple(
        sorted(
            os.path.relpath(Path(folder, file), place)
            for folder, _, names in os.walk(place)
            for file in names
        )
    )
    small = sum((place / file).stat().st_size for file in files) < MAX_BYTES
    if not files or not small or len(files) > MAX_FILES:
        return []
    alone = [f for f in files if f.endswith((".pt", ".bin", ".safetensors", ".pth", ".ckpt"))][:1]
    return [
        Seed(name, place, files),
        *(Seed(f"{name}:{file}", place, (file,), file) for file in alone),
    ]
