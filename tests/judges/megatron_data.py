"""The training tokens of Megatron-core's runs and of the engines that continue them."""

from __future__ import annotations

import torch

from tests.judges.megatron_cases import FAMILIES, SEQUENCE, Case

SAMPLES = 8
MICRO = 2  # samples of a microbatch in engines; at least so many in Megatron-core
EVALUATED = -1  # the step whose batch is never trained on


def choose_micro_batch(case: Case) -> int:
    """Return the samples of a microbatch: as many as possible, because each costs the same time.

    A pipeline needs two microbatches in a step. Experts are balanced within a microbatch, so that
    runs of the same model have the same microbatches on every grid with as many replicas.
    """
    samples = SAMPLES // case.grid.dp
    is_split = case.grid.pp > 1 or "num_moe_experts" in FAMILIES[case.family]
    return max(MICRO, samples // 2) if is_split else samples


def batch(vocabulary: int, step: int) -> torch.Tensor:
    """Return tokens of a step (samples, SEQUENCE + 1), alike on every grid."""
    seed = torch.Generator().manual_seed(1000 + step)
    return torch.randint(vocabulary, (SAMPLES, SEQUENCE + 1), generator=seed)
