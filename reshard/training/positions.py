"""Find the positions in the data that each rank saved, which fit no other number of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from reshard.core.manifest import Manifest
from reshard.units import counted, some

# torchtitan 0.3 ``components/dataloader.py`` (``ParallelAwareDataloader.state_dict``): a key
# ``dp_rank_N`` for each data-parallel rank.
_OF_RANK = re.compile(r"(?:dp_?)?rank[-_]?\d+")


def describe_positions(manifest: Manifest, ranks: int) -> Iterator[str]:
    """Yield a warning for each value of the run that has a part for each of its own ranks.

    Args:
        ranks: number of ranks of the output; nothing is yielded if the source has as many.
    """
    if manifest.origin.world == ranks:
        return
    for name, value in manifest.train.client.items():
        parts = [str(key) for key in value] if isinstance(value, Mapping) else []
        parts = [key for key in parts if _OF_RANK.fullmatch(key)]
        if parts:
            yield (
                f"{name} has a state for each of {counted(len(parts), 'rank')} ({some(parts)}),"
                f" which fit no other number: a run of {counted(ranks, 'rank')} has to start its"
                " data loader anew (torchtitan: exclude_from_loading), and repeats or skips samples"
            )
