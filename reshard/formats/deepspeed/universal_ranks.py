"""The model-parallel ranks that a universal directory was made of, as their model states tell.

``ds_to_universal --no_strict`` (DeepSpeed 0.19.8) joins along dim 0 whatever no pattern finds, also
what every tensor-parallel rank held whole: such a tensor stands in its file once a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import prod
from pathlib import Path

from reshard.box import Index, whole
from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.cuts import Cuts
from reshard.formats.deepspeed.states import ModelStates, Shapes
from reshard.manifest import Entry
from reshard.model_parallel.shards import Split, shared
from reshard.state_dict.plain_values import to_plain

_INFO = "universal_checkpoint_info"


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the ranks held.

    Args:
        tensor: tensor-parallel ranks of a stage.
        pipeline: stages.
        shapes: of the parameters of all stages, a dict a group, as each stage's first rank held
            them.
    """

    tensor: int
    pipeline: int
    shapes: Shapes
    cuts: Cuts
    notes: dict[str, None] = field(default_factory=dict)

    def checked(self, entry: Entry) -> Entry:
        """The whole tensor; of one that stands there once a rank, the ranks' copies as replicas.

        Of what ranks add up the share of one stands there, which each of them is given.

        Raises:
            UnsupportedError: it was joined along another dim than it was cut.
            UsageError: nothing says how it was cut.
        """
        local = next((held[entry.fqn] for held in self.shapes if entry.fqn in held), None)
        if self.tensor == 1 or not local:
            return entry
        split = self.cuts.split(entry.fqn, local)
        joined = (local[0] * self.tensor, *local[1:])
        if entry.shape != joined or entry.shape == _wanted(local, split, self.tensor):
            return shared(entry, split, self.tensor)
        if split.dim is not None:
            raise UnsupportedError(
                entry.chunks[0].file,
                f"joins {entry.fqn!r} along dim 0, which the ranks shared along dim {split.dim}:"
                f" it is {entry.shape}, not {_wanted(local, split, self.tensor)}",
                "read the run that it was made of",
            )
        self.notes.setdefault(
            f"{entry.fqn!r} stands there {self.tensor} times over, as ds_to_universal --no_strict"
            f" joins what no pattern finds: {entry.shape}. It is taken once, the copies are"
            " compared, and DeepSpeed itself loads this directory into no such model"
        )
        rows = prod(local) * entry.dtype.itemsize
        first = entry.chunks[0]
        copies = [
            replace(first, box=whole(local), byte_offset=first.byte_offset + rank * rows)
            for rank in range(self.tensor)
        ]
        return replace(entry, shape=local, chunks=tuple(copies))


def ranks_of(models: Sequence[ModelStates], where: str, rules: Path | None) -> Ranks:
    """What the model states of all ranks tell, in the order of their numbers.

    The ranks of a stage hold the same parameters, those of another stage others.
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
    info = to_plain(first.root.get(_INFO))
    cuts = Cuts(
        where,
        info if isinstance(info, dict) else {},
        {name: shape for group in shapes for name, shape in group.items()},
        ranks=tensor,
        rules=rules,
    )
    return Ranks(tensor, len(models) // tensor, shapes, cuts)


def _wanted(local: Index, split: Split, ranks: int) -> Index:
    """The shape of what the ranks share so."""
    return tuple(n * ranks if dim == split.dim else n for dim, n in enumerate(local))
