"""Keep a run of our trainer one: its account of itself, and its run directory."""

from __future__ import annotations

from dataclasses import replace

from reshard.commands.split.options import SplitOptions
from reshard.containers.skeletons import LaidOut
from reshard.formats import megatron
from reshard.formats.targets import Target
from reshard.formats.targets.request import Request
from reshard.manifest import Manifest
from reshard.training import trainer_run


def account(manifest: Manifest, request: Request, target: Target) -> Manifest:
    """Return the manifest with the account of the same run on the new ranks.

    A resume takes the number of ranks from it, unless the user gives another one.
    """
    run = request.run
    if run is None:
        return manifest
    changed = {}
    if target.name == trainer_run.NAME:
        files = "rank" if request.rank_files else "dcp"
        changed = {"state_dict_type": request.state_dict_type, "sharded_files": files}
    document = run.resized(request.world_size, **changed)
    return replace(manifest, train=replace(manifest.train, trainer_state=document))


def directory(laid: LaidOut, request: Request, target: Target, options: SplitOptions) -> LaidOut:
    """Return Megatron's files of our trainer's run in the directory where the trainer has them.

    Where the user asks for Megatron's layout, Megatron-LM is to load it, which has no such place.
    """
    is_kept = target.name == megatron.NAME and options.to is None
    if request.run is None or not is_kept:
        return laid
    return laid._replace(skeleton=request.run.directory(laid.skeleton))
