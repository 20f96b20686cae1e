"""Loading of a file of ``torch.save`` in which only classes of known frameworks are created."""

from __future__ import annotations

import argparse
import collections
import contextlib
import pickle
from typing import IO, Any

import torch

from reshard.errors import UnsafeError


def load_safely(file: IO[bytes], name: str, map_location: Any = None) -> Any:
    """Return the object in a file.

    Raises:
        UnsafeError: the file names a class that is not known to be safe.
    """
    with torch.serialization.safe_globals(_list_safe_globals()):
        try:
            return torch.load(file, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeError(
                name,
                f"names a class that is not known to be safe: {str(error).splitlines()[0]}",
                "if the class is your own, allow it with"
                " torch.serialization.add_safe_globals([...])",
            ) from error


def _list_safe_globals() -> list[Any]:
    """Return classes and functions of training states, none of which runs code."""
    import numpy as np

    dtypes = ("bool", "uint8", "uint32", "uint64", "int32", "int64", "float32", "float64")
    safe: list[Any] = [
        *(collections.defaultdict, collections.deque, argparse.Namespace),
        *(dict, list, set, frozenset, tuple, int, float, complex),
        *(np.ndarray, np.dtype, np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]),
        *(type(np.dtype(name)) for name in (*dtypes, "U1")),
    ]
    with contextlib.suppress(ImportError):
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        safe += [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    return safe
