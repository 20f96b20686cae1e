"""The stamp: what one file states about the save that it belongs to, under one key of its root.

A file that reshard, the trainer, or a user's hook wrote states the id of its save, its rank, the
number of ranks, the step, and its own final name. A file that was renamed, or copied from another
rank, step or run, then contradicts its place. The module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from reshard.core.counts import MOST
from reshard.core.manifest import Claim
from reshard.core.schema import COUNT, TEXT, expect, maybe, record
from reshard.errors import CorruptError, shown
from reshard.system.paths import get_stem

KEY = "reshard_stamp"
# What a claim is about (`Claim.about`).
FILE_NAME, SAVE, STEP, WORLD_SIZE = "file name", "save", "step", "world size"

_KIND = record(save_id=TEXT, rank=COUNT, world_size=COUNT, step=maybe(COUNT), file=TEXT)
_REMEDY = "the file was altered after it was saved: fetch it again"


@dataclass(frozen=True, slots=True)
class Stamp:
    """The save, the rank and the name that one file belongs to.

    Args:
        save_id: equal in all files of one save, different in every other save.
        rank: the rank that the file belongs to, from 0 on.
        step: the optimizer step of the save; None where the writer does not know it.
        file: the final name of the file, without its directory; empty if the writer of the
            stamp does not know it.
    """

    save_id: str
    rank: int
    world_size: int
    step: int | None
    file: str

    def as_dict(self) -> dict[str, str | int | None]:
        """Return the stamp as the plain dict that a file holds under `KEY`."""
        return asdict(self)


class Save(NamedTuple):
    """One save that is to be written: what the stamps of its files have in common."""

    save_id: str
    step: int | None

    def stamp(self, file: str, rank: int, world_size: int) -> Stamp:
        """Return the stamp of one of its files, which may be in subdirectories of the save."""
        return Stamp(self.save_id, rank, world_size, self.step, file.rpartition("/")[2])


def read(root: Any, where: object = "this file") -> Stamp | None:
    """Return the stamp of a file, or None if the file has none.

    Args:
        root: the root object of the file, of any type; or the ``__metadata__`` of a safetensors
            header, where the stamp is a JSON text.

    Raises:
        CorruptError: the file has a stamp that is malformed. Keys that a later version may add
            are ignored.
    """
    value = root.get(KEY) if isinstance(root, Mapping) else None
    if value is None:
        return None
    document = _parsed(value, where) if isinstance(value, str) else value
    expect(where, document, _KIND, KEY)
    stamp = Stamp(**{name: document[name] for name in Stamp.__dataclass_fields__})
    if not stamp.rank < stamp.world_size <= MOST:
        problem = f"{KEY} states rank {stamp.rank} of {stamp.world_size} ranks, which is impossible"
        raise CorruptError(where, problem, _REMEDY)
    return stamp


def list_claims(stamp: Stamp | None) -> list[Claim]:
    """Return what a stamp states, to be compared with the other files of the checkpoint."""
    if stamp is None:
        return []
    claims = _list_save_claims(stamp.save_id, stamp.world_size, stamp.step)
    if not stamp.file:
        return [*claims]
    # As in torch's archives, see `checks.identity.claims`.
    return [*claims, Claim(FILE_NAME, get_stem(stamp.file), KEY)]


@lru_cache(maxsize=1)  # the files of a save have them in common
def _list_save_claims(save_id: str, world_size: int, step: int | None) -> tuple[Claim, ...]:
    stated = {
        SAVE: save_id,
        WORLD_SIZE: str(world_size),
        STEP: "" if step is None else str(step),
    }
    return tuple(Claim(about, value, KEY) for about, value in stated.items() if value)


def take(root: Any, attribute: Any, where: object) -> tuple[Any, Stamp | None]:
    """Return the root of a file without its stamp, and the stamp, which is not training state.

    Args:
        attribute: the stamp that a container in the file has as an attribute, or None. A module's
            state dict has it there, because ``load_state_dict`` refuses unknown keys.

    Raises:
        CorruptError: as in `read`.
    """
    if not isinstance(root, dict) or KEY not in root:
        return root, read({KEY: attribute}, where)
    return {key: value for key, value in root.items() if key != KEY}, read(root, where)


def _parsed(text: str, where: object) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(where, f"{KEY} is {shown(text)}, not JSON", _REMEDY) from error
