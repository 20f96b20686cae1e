"""What a run says beside its state: how tensor-parallel ranks share a parameter, who trains it.

A target for other ranks needs both, and nothing but nanotron's own files tells them. A parameter
that ranks share says so at one rank, too: nanotron marks it whatever the size of the group
(``parallel/tensor_parallel/nn.py``); one that says nothing is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.box import Index
from reshard.errors import UsageError
from reshard.formats.nanotron.slices import PAIRS, SHAPE
from reshard.formats.nanotron.stages import Stage

KEY = "nanotron's layout"  # in `TrainState.opaque`
_ALL = "None,None,None"  # a dim that is not cut


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor-parallel ranks share a parameter (``create_sharded_parameter_from_config``).

    Args:
        stage: the pipeline stage whose rank saves it.
        dim: that is cut.
        parts: extents of what is fused along it, each cut by itself; none where nothing is.
        texts: of its header, what is the same at any number of ranks.
    """

    stage: int
    dim: int
    parts: Index
    texts: Mapping[str, str]

    def header(self, fqn: str, shape: Index, ranks: int, rank: int) -> dict[str, str]:
        """The metadata of a rank's file.

        Raises:
            UsageError: the ranks do not divide it.
        """
        pairs, start, local = [], 0, 0
        for part in self.parts or (shape[self.dim],):
            if part % ranks:
                raise UsageError(
                    f"--tp {ranks}",
                    f"does not divide {part} of dim {self.dim} of {fqn!r}, {shape}",
                    "give a divisor of it: nanotron cuts every fused part evenly",
                )
            width = part // ranks
            here = f"{local},{local + width},None" if self.parts else _ALL
            there = f"{start + rank * width},{start + (rank + 1) * width},None"
            pairs.append(f"{self._side(here, shape)}#{self._side(there, shape)}")
            start, local = start + part, local + width
        return {**self.texts, PAIRS: ";".join(pairs)}

    def local(self, shape: Index, ranks: int) -> Index:
        """The shape of a rank's part."""
        return (*shape[: self.dim], shape[self.dim] // ranks, *shape[self.dim + 1 :])

    def _side(self, text: str, shape: Index) -> str:
        return "|".join(text if dim == self.dim else _ALL for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class Layout:
    """What a target needs to know of the run.

    Args:
        cuts: of the parameters whose files name ranks; None: cut in a way that is not known here.
        stages: the optimizer and the scheduler of each pipeline stage.
        config: the model's own (``model_config.json``), where the run has one.
        unnamed: how many parameters have no state, hence no name.
        beside: what else lies in the step's directory.
    """

    cuts: Mapping[str, Cut | None]
    stages: tuple[Stage, ...]
    config: Mapping[str, Any] | None
    unnamed: int
    beside: tuple[str, ...]

    def on(self, stages: Sequence[Sequence[str]], dealt: tuple[Stage, ...]) -> Layout:
        """The same run on other pipeline stages: a parameter's first one saves it."""
        first: dict[str, int] = {}
        for stage, fqns in enumerate(stages):
            for fqn in fqns:
                first.setdefault(fqn, stage)
        cuts = {fqn: cut and replace(cut, stage=first[fqn]) for fqn, cut in self.cuts.items()}
        return replace(self, cuts=cuts, stages=dealt)


def cut(fqn: str, shape: Index, stage: int, headers: Sequence[Mapping[str, str]]) -> Cut | None:
    """How a parameter is cut, by the headers of all ranks' files in rank order.

    Nothing where what would be written for the same ranks is not what the files say.
    """
    ranks, first = len(headers), headers[0]
    if PAIRS not in first or SHAPE not in first:
        return None
    pairs = [pair.split("#") for pair in first[PAIRS].split(";")]
    cuts = [dim for dim, text in enumerate(pairs[0][1].split("|")) if text != _ALL]
    if len(cuts) != 1:
        return None
    (dim,) = cuts
    mine = [local.split("|")[dim] for local, _ in pairs]
    parts = () if mine == [_ALL] else tuple(_width(text) * ranks for text in mine)
    texts = {name: text for name, text in first.items() if name != PAIRS}
    found = Cut(stage, dim, parts, texts)
    try:
        made = [found.header(fqn, shape, ranks, rank) for rank in range(ranks)]
    except UsageError:
        return None
    return found if made == list(headers) else None


def _width(text: str) -> int:
    """The extent of one slice, which the reader has checked."""
    start, stop, _ = text.split(",")
    return int(stop) - int(start) if "None" not in (start, stop) else 0
