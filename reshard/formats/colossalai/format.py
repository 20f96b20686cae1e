"""ColossalAI's checkpoints as one format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.location import Location
from reshard.core.manifest import Manifest
from reshard.formats.base import Format, ReadHints, Source, Writer
from reshard.formats.colossalai.directory import NAME, detect

if TYPE_CHECKING:
    from reshard.containers.skeletons import LaidOut
    from reshard.formats.request import Request
    from reshard.training.state import WritableState


def _read(location: Location, hints: ReadHints) -> Manifest:
    from reshard.formats.colossalai import reader

    return reader.read(location, model=hints.model, wrap=hints.wrap)


class ColossalAI(Writer):
    """Shards under an index, which any of ColossalAI's plugins loads."""

    name = NAME
    weights_alone = True

    def lay_out(self, state: WritableState, request: Request) -> LaidOut:
        """Lay out the directories of weights and optimizer."""
        from reshard.containers.skeletons import LaidOut
        from reshard.formats.colossalai import writer

        skeleton = writer.lay_out(state, request)
        return LaidOut(
            skeleton, tuple(writer.describe_values(state, weights_only=request.weights_only))
        )


FORMAT = Format(
    name=NAME,
    detect=detect,
    read=_read,
    ignored_hints=("key",),
    sources={NAME: Source(writer=NAME)},
    writers=(ColossalAI(),),
    requires=("huggingface",),
)
