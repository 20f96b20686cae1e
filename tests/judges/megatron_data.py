"""The training tokens of Megatron-core's runs and of the engines that continue them."""

from __future__ import annotations

import torch

from tests.judges.megatron_cases import SEQUENCE

SAMPLES = 8
MICRO = 2  # samples of a microbatch
EVALUATED = -1  # the step whose batch is never trained on


def batch(vocabulary: int, step: int) -> torch.Tensor:
    """Return tokens of a step (samples, SEQUENCE + 1), alike on every grid."""
    seed = torch.Generator().manual_seed(1000 + step)
    return torch.randint(vocabulary, (SAMPLES, SEQUENCE + 1), generator=seed)
