"""Checkpoints of Megatron-LM and Megatron-core, in the torch and the torch_dist format.

    words       by which a user chooses among its forms
    directory   where they lie, which rank each folder is of
    arguments   the run's command line: sizes, the pipeline's layout
    names       local, global and stacked names
    order       where a parameter stands in the model
    grouped     tensors that hold several parameters, or one in an old order
    buckets     the distributed optimizer's flat buffers
    groups      which param group a parameter is in
    optimizer   every form of a rank's optimizer
    rank        one rank's files
    model       what a rank holds, where no file lists it
    legacy      the torch format: a folder a rank
    dist        the torch_dist format: DCP with Megatron's keys
    dist_flat   the distributed optimizer's buffers there
    grid        the ranks' parts made one
    train       what is no tensor

Facts: Megatron-LM core_v0.16.1; torch_dist of core 0.20 also.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.megatron import directory
from reshard.formats.place import Place
from reshard.manifest import Manifest

if TYPE_CHECKING:
    from reshard.model_parallel.rules import Table

NAME = "megatron"


def detect(place: Place) -> bool:
    """Whether a checkpoint of Megatron lies directly at a place."""
    return directory.detect(place)


def holds(place: Place) -> bool:
    """Whether it is a run directory of Megatron's, whatever else lies in it."""
    below = place.folders.values()
    return directory.TRACKER in place.files and any(map(directory.detect, below))


def read(place: Place, table: Table | None = None) -> Manifest:
    """The checkpoint in a directory ``iter_0000003`` or ``release``.

    Args:
        table: how parameters are cut; None: as Megatron's own are.

    Raises:
        IncompleteError: a rank's part is missing.
        CorruptError: files contradict each other.
        UsageError: one rank's part is given, or no rule says how a parameter is cut.
    """
    from reshard.formats.megatron import dist, legacy
    from reshard.model_parallel.rules import builtin

    place = directory.whole(place)
    table = table or builtin("megatron")
    return dist.read(place, table) if directory.is_dist(place) else legacy.read(place, table)
