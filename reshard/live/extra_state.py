"""The part of a checkpoint that is no weight and no optimizer state, as objects of this process."""

from __future__ import annotations

from typing import Any

from reshard.containers import torch_writer
from reshard.core.manifest import Manifest
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.engine.planning.planner import Plan
from reshard.live.safe_load import load_safely
from reshard.state_dict import torch_state_dict
from reshard.system.files import SourceFiles
from reshard.training.copied_files import collect_own_tensors

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
    with SourceFiles() as pool:
        files = OnDemandFiles(Plan(entries, skeleton), manifest.files, pool)
        loaded: dict[str, Any] = load_safely(files.open(_NAME, checks=False), manifest.origin.path)
        files.check()
    return loaded
