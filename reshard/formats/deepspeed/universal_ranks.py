"""Find the model-parallel ranks that a universal directory was converted from.

``ds_to_universal --no_strict`` (DeepSpeed 0.19.8) joins along dim 0 what no pattern matches, also
tensors that every tensor-parallel rank held whole: such a file holds a copy for each rank.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from reshard.core.box import whole
from reshard.core.manifest import Entry
from reshard.formats.deepspeed.cuts import Cuts
from reshard.formats.deepspeed.states import ModelStates, Shapes
from reshard.layouts.model_parallel.shards import gather, scale_shares

_OF_PARTS = ("param_n_sub_params", "sub_param_shape")  # keys of a tensor that was joined by parts


@dataclass(frozen=True, slots=True)
class SourceRanks:
    """The ranks of the converted run.

    Args:
        tensor: tensor-parallel ranks of a stage.
        pipeline: number of stages.
        shapes: shapes of the parameters of all stages on each stage's first rank, one dict for each
            group.
    """

    tensor: int
    pipeline: int
    shapes: Shapes
    cuts: Cuts
    notes: dict[str, None] = field(default_factory=dict)

    def normalize(self, entry: Entry, stored: Container[Any]) -> Entry:
        """Return the entry of the whole tensor.

        If the file holds a copy for each rank, the copies become replicas; if it holds the ranks'
        pieces one after the other, they are joined as they were cut. If the ranks add the tensor
        up, the file holds the share of one rank, and each rank gets that share.

        Args:
            stored: what the file states beside the tensor.

        Raises:
            UsageError: neither the checkpoint nor a table describes how it was cut.
        """
        local = next((group[entry.fqn] for group in self.shapes if entry.fqn in group), None)
        if self.tensor == 1 or not local or self.cuts.maps_whole(entry.fqn, entry.shape):
            return entry
        split = self.cuts.find_split(entry.fqn, local)
        is_by_rank = len(split.parts) > 1 and not (
            self.cuts.describes(entry.fqn, local) or any(key in stored for key in _OF_PARTS)
        )
        # Only a join along dim 0 that does not fit the cut needs a correction.
        expected = tuple(n * self.tensor if dim == split.dim else n for dim, n in enumerate(local))
        is_joined = entry.shape == (local[0] * self.tensor, *local[1:])
        if not is_joined or (entry.shape == expected and not is_by_rank):
            return scale_shares(entry, split, self.tensor)
        self.notes.setdefault(
            f"{entry.fqn!r} is stored {self.tensor} times, because ds_to_universal --no_strict"
            f" joins what no pattern matches: its shape is {entry.shape}. It is read once and the"
            " copies are compared; DeepSpeed itself does not load this directory into such a model"
            if split.dim is None
            else f"{entry.fqn!r} is stored rank after rank, because ds_to_universal joins along dim"
            " 0 what no pattern matches. It is read as the ranks shared it; DeepSpeed itself loads"
            f" it right only at a tensor-parallel size of {self.tensor}"
        )
        first = entry.chunks[0]
        nbytes = local[0] * first.byte_strides[0]
        pieces = [
            replace(first, box=whole(local), byte_offset=first.byte_offset + rank * nbytes)
            for rank in range(self.tensor)
        ]
        return gather([replace(entry, shape=local, chunks=(piece,)) for piece in pieces], split)


def find_source_ranks(models: Sequence[ModelStates], where: str, rules: Path | None) -> SourceRanks:
    """Find the ranks from the model states of all ranks, in the order of their numbers.

    The ranks of a stage hold the same parameters; those of another stage hold others.
    """
    first = models[0]
    names = [list(group) for group in first.shapes]
    same = takewhile(lambda model: [list(group) for group in model.shapes] == names, models)
    tensor = len(list(same)) if any(names) else 1
    shapes: Shapes = []
    for model in models[::tensor]:
        for number, group in enumerate(model.shapes):
            shapes += [{} for _ in range(number + 1 - len(shapes))]
            for name, shape in group.items():
                shapes[number].setdefault(name, tuple(shape))
    cuts = Cuts(
        where,
        first.tensor_parallel_info,
        {name: shape for group in shapes for name, shape in group.items()},
        ranks=tensor,
        rules=rules,
    )
    return SourceRanks(tensor, len(models) // tensor, shapes, cuts)
