"""Facts of a run beside its state: how tensor-parallel ranks share a parameter, who trains it.

A target for other ranks needs both, and only nanotron's own files state them. A parameter that
ranks share is marked even with one rank: nanotron marks it whatever the size of the group
(``parallel/tensor_parallel/nn.py``); an unmarked one is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.core.box import Index
from reshard.errors import UsageError
from reshard_nanotron.slices import PAIRS, SHAPE
from reshard_nanotron.stages import Stage

KEY = "nanotron's layout"  # in `TrainState.opaque`
_ALL = "None,None,None"  # slice of a dim that is not cut


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """The cut of a parameter over tensor-parallel ranks (``create_sharded_parameter_from_config``).

    Args:
        parts: extents of the fused parts along it, each cut by itself; empty if there are none.
        texts: entries of its header that are the same for any number of ranks.
    """

    stage: int
    dim: int
    parts: Index
    texts: Mapping[str, str]

    def make_header(self, fqn: str, shape: Index, ranks: int, rank: int) -> dict[str, str]:
        """Return the metadata of a rank's file.

        Raises:
            UsageError: the ranks do not divide the parameter.
        """
        pairs, start, local = [], 0, 0
        for part in self.parts or (shape[self.dim],):
            if part % ranks:
                raise UsageError(
                    f"--tp {ranks}",
                    f"does not divide {part} of dim {self.dim} of {fqn!r}, {shape}",
                    "pass a divisor of it: nanotron cuts every part of a fused tensor evenly",
                )
            width = part // ranks
            here = f"{local},{local + width},None" if self.parts else _ALL
            there = f"{start + rank * width},{start + (rank + 1) * width},None"
            pairs.append(f"{self._format_side(here, shape)}#{self._format_side(there, shape)}")
            start, local = start + part, local + width
        return {**self.texts, PAIRS: ";".join(pairs)}

    def compute_local_shape(self, shape: Index, ranks: int) -> Index:
        """Return the shape of a rank's part."""
        return (*shape[: self.dim], shape[self.dim] // ranks, *shape[self.dim + 1 :])

    def _format_side(self, text: str, shape: Index) -> str:
        return "|".join(text if dim == self.dim else _ALL for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of the run that a target needs.

    Args:
        cuts: cuts of the parameters whose files name ranks; None: cut in an unknown way.
        stages: the optimizer and the scheduler of each pipeline stage.
        config: the model's ``model_config.json``, if the run has one.
        unnamed: number of parameters without state, and therefore without a name.
        beside: names of other files in the step's directory.
    """

    cuts: Mapping[str, ParameterCut | None]
    stages: tuple[Stage, ...]
    config: Mapping[str, Any] | None
    unnamed: int
    beside: tuple[str, ...]

    def move_to_stages(
        self, stages: Sequence[Sequence[str]], optimizers: tuple[Stage, ...]
    ) -> RunFacts:
        """Return the run on other pipeline stages; the first stage of a parameter saves it.

        Args:
            stages: the names of each stage's parameters.
            optimizers: the optimizer and the scheduler of each stage.
        """
        first: dict[str, int] = {}
        for stage, fqns in enumerate(stages):
            for fqn in fqns:
                first.setdefault(fqn, stage)
        cuts = {fqn: cut and replace(cut, stage=first[fqn]) for fqn, cut in self.cuts.items()}
        return replace(self, cuts=cuts, stages=optimizers)


def derive_cut(
    fqn: str, shape: Index, stage: int, headers: Sequence[Mapping[str, str]]
) -> ParameterCut | None:
    """Return how a parameter is cut, from the headers of all ranks' files in rank order.

    The result is None if `ParameterCut` would write other headers than those in the files.
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
    parts = () if mine == [_ALL] else tuple(_parse_width(text) * ranks for text in mine)
    texts = {name: text for name, text in first.items() if name != PAIRS}
    derived = ParameterCut(stage, dim, parts, texts)
    try:
        written = [derived.make_header(fqn, shape, ranks, rank) for rank in range(ranks)]
    except UsageError:
        return None
    # The cut is understood only if it makes exactly the headers in the files.
    return derived if written == list(headers) else None


def _parse_width(text: str) -> int:
    start, stop, _ = text.split(",")
    return int(stop) - int(start) if "None" not in (start, stop) else 0
