"""Short digests of tensors, which samples in `tests/data` keep instead of the tensors."""

from __future__ import annotations

import hashlib

import torch

import reshard
from reshard.tensors.lazy import LazyTensor


def compute_digest(tensor: torch.Tensor) -> str:
    """Return 16 digits of the SHA-256 of a tensor's bytes."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()[:16]


def compute_digests(checkpoint: reshard.Checkpoint) -> dict[str, dict[str, str]]:
    """Return fqn -> kind -> digest of each tensor of a checkpoint."""
    found: dict[str, dict[str, str]] = {}
    for (kind, fqn), entry in checkpoint.manifest.entries.items():
        digest = compute_digest(LazyTensor(entry, checkpoint._pool)[...])
        found.setdefault(fqn, {})[kind] = digest
    return found
