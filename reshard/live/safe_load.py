"""Loading of a file of ``torch.save`` in which only classes of known frameworks are created."""

from __future__ import annotations

import argparse
import collections
import contextlib
import pickle
from typing import IO, Any

import torch

from reshard.containers import torch_writer
from reshard.core.manifest import Manifest
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.engine.planning.planner import Plan
from reshard.errors import UnsafeError
from reshard.state_dict import torch_state_dict
from reshard.system.files import SourceFiles
from reshard.training.copied_files import collect_own_tensors


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
                f"names a class that is not known to be safe: {_find_reason(error)}",
                "if the class is your own, allow it with"
                " torch.serialization.add_safe_globals([...])",
            ) from error


def _find_reason(error: pickle.UnpicklingError) -> str:
    text = str(error)
    _, is_found, reason = text.partition("WeightsUnpickler error: ")
    return (reason if is_found else text).splitlines()[0].partition(". Please use")[0]


def _list_safe_globals() -> list[Any]:
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


_NAME = "extra.pt"


def load_extra_state(manifest: Manifest) -> dict[str, Any]:
    """Return scheduler, scaler, step and the script's own values; no class of a file runs code.

    The values go through a file of ``torch.save`` in memory: enums, namespaces and tensors become
    objects as `load_safely` allows them.

    Raises:
        UnsafeError: a value has a class that is not known to be safe.
    """
    extra = torch_state_dict.collect_extra_state(manifest.train)
    skeleton = torch_writer.lay_out_object(_NAME, extra)
    entries = {entry.key: entry for entry in collect_own_tensors(manifest.train).values()}
    with SourceFiles(manifest.files) as pool:
        files = OnDemandFiles(Plan(entries, skeleton), manifest.files, pool)
        loaded: dict[str, Any] = load_safely(files.open(_NAME, checks=False), manifest.origin.path)
        files.check()
    return loaded
