"""A sum of squares that has the same bits in any order of addition and over any cut into ranks.

Clipping multiplies every gradient by a number that depends on the norm, so its last bit matters.
Floating-point addition depends on the order only through rounding. So each square (exact in
float64) is split into parts, one for each level. The parts of a level are multiples of its quantum,
a power of two, with so few bits that no sum of them rounds: it is exact, in any order. (The idea is
pre-rounding: Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

LEVELS = 3
"""Parts of a square, each of 52 - log2(elements) bits.

With 1e9 elements, the last bit is 66 bits below the largest square.
"""
CHUNK = 1 << 20
"""Elements that are squared at a time."""


def compute_norm(pieces: Sequence[Tensor], numel: int, *, reduce_on: torch.device | None) -> float:
    """Return the 2-norm of all ranks' pieces together; inf if an element is not finite.

    Args:
        pieces: this rank's float tensors, 1-D.
        numel: elements of all ranks together without padding; the same for any number of ranks.
        reduce_on: the device for the collectives, which is that of the pieces (a rank may have
            none); None if this rank's pieces already are everything.
    """
    device = reduce_on or (pieces[0].device if pieces else torch.device("cpu"))
    # Padding is zero, so it changes neither the largest element nor a sum.
    peaks = [piece.abs().amax().double() for piece in pieces if piece.numel()]
    largest = torch.stack([*peaks, torch.zeros((), dtype=torch.float64, device=device)])
    peak = torch.where(largest.isfinite(), largest, math.inf).amax()
    if reduce_on:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    top = peak.item()
    if top == 0.0 or math.isinf(top):
        return top
    sums = _sum_levels(pieces, top, numel, device)
    if reduce_on:
        dist.all_reduce(sums)
    return math.sqrt(math.fsum(sums.tolist()))


def _sum_levels(pieces: Sequence[Tensor], top: float, numel: int, device: torch.device) -> Tensor:
    bits = 52 - max(1, math.ceil(math.log2(numel + 1)))
    exponent = math.frexp(top * top)[1]
    quanta = [math.ldexp(1.0, exponent - bits * level) for level in range(1, LEVELS + 1)]
    sums = torch.zeros(LEVELS, dtype=torch.float64, device=device)
    for piece in pieces:
        for chunk in piece.split(CHUNK):
            rest = chunk.double().square_()
            for level, quantum in enumerate(quanta):
                # Adding and subtracting 1.5 x 2^52 quanta rounds to a multiple of the quantum.
                shift = 1.5 * 2.0**52 * quantum
                part = (rest + shift).sub_(shift)
                rest.sub_(part)
                sums[level] += part.sum()
    return sums
