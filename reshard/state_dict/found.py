"""What a format hands over: the tree that all ranks saved, and where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.manifest import SourceFile


@dataclass(slots=True)
class Found:
    """What a format has read, before it is known what is what."""

    root: Any  # the tree of all ranks
    where: str
    files: dict[str, SourceFile]
    world: int = 1
    globals: set[str] = field(default_factory=set)
    differing: Sequence[tuple[Any, ...]] = ()
    plain_is_buffer: bool = True  # beside sharded tensors, what is not sharded is a buffer
    ordered: bool = True  # whether weights stand in the model's order
    proved: bool = True  # whether the files say how large each tensor is
    notes: list[str] = field(default_factory=list)
