"""Whether two objects are equal in every respect that a file keeps."""

from __future__ import annotations

import torch


def is_same(one, two):
    """Return whether two objects are equal in types, order of keys, and all bits of tensors."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape, one.requires_grad) == (
            two.dtype,
            two.shape,
            two.requires_grad,
        )
        return alike and torch.equal(one, two) and one.storage_offset() == two.storage_offset()
    if isinstance(one, dict):
        return list(one) == list(two) and all(is_same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(is_same, one, two))
    return one == two
