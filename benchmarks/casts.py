"""Measure casts in memory, in millions of elements per second: compiled module, numpy, torch.

    python benchmarks/casts.py

A block has the size that a merge casts at a time, so it stays in the cache. One thread runs; the
result is the best of several rounds. The compiled module is measured if it is installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from reshard.engine.move import compiled
from reshard.engine.move.cast import cast, get_numpy_dtype

BLOCK = 1 << 18  # elements
ROUNDS = 300
PAIRS = (
    (FLOAT32, BFLOAT16),
    (FLOAT32, FLOAT16),
    (BFLOAT16, FLOAT32),
    (FLOAT16, FLOAT32),
    (FLOAT16, BFLOAT16),
    (BFLOAT16, FLOAT16),
)


def rate(act: Callable[[], object]) -> float:
    """Return the elements of the fastest round, in millions a second."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return BLOCK / min(seconds) / 1e6


def rates(dtype: DType, target_dtype: DType) -> Iterator[tuple[str, float]]:
    """Yield what casts, and how fast."""
    values = torch.randn(BLOCK) * 0.02
    held = values.to(getattr(torch, dtype.name))
    made = torch.empty(BLOCK, dtype=getattr(torch, target_dtype.name))
    raw = held.view(torch.uint8).numpy()
    source = raw.view(get_numpy_dtype(dtype, casting=True))
    target = np.empty(BLOCK, get_numpy_dtype(target_dtype, casting=True))

    def ours() -> None:
        cast(source, target, dtype, target_dtype, clamp=False)

    found = compiled._compiled  # noqa: SLF001 - the only way to do without it
    if found is not None:
        yield "compiled", rate(ours)
    compiled._compiled = None  # noqa: SLF001
    yield "numpy", rate(ours)
    compiled._compiled = found  # noqa: SLF001
    yield "torch (counts nothing)", rate(lambda: made.copy_(held))


def main() -> None:
    torch.set_num_threads(1)
    for pair in PAIRS:
        found = ", ".join(f"{name} {value:.0f}" for name, value in rates(*pair))
        print(f"{pair[0]} to {pair[1]}: {found}", flush=True)


if __name__ == "__main__":
    main()
