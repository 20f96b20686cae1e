"""Load any checkpoint with `torch.distributed.checkpoint.load`, at any number of ranks.

    import reshard.dcp

    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, adamw)}
    torch.distributed.checkpoint.load(state, storage_reader=reshard.dcp.StorageReader("run/"))

No file is written: every rank reads its own blocks of the checkpoint's files into its own tensors.
DCP (torch 2.13, ``torch/distributed/checkpoint/state_dict_loader.py``) requests the metadata before
it passes the target's keys, so a key is resolved when the planner looks it up.
"""

from __future__ import annotations

from reshard.live.dcp.reader import StorageReader

__all__ = ["StorageReader"]
