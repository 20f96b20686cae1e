"""Stage 0 around a fused optimizer: which parameters the one flat tensor of a group holds.

``FP16_Optimizer`` (DeepSpeed 0.19.8 ``runtime/fp16/fused_optimizer.py``) joins the masters of each
param group and names none. The sizes tell which shapes a group has, if what looks alike stands in
one group; within it parameters stand in the order in which the user gave them, which for nearly
everybody is the model's. So it is only where each weight begins, ends and is in the middle as its
master.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import isclose, prod

from reshard.box import Index
from reshard.containers.torch_objects import Tensor, weight_at
from reshard.files import SourceFiles
from reshard.formats.deepspeed.states import ModelStates
from reshard.state_dict.optimizer_names import AmbiguousError

_SHAPES = 200  # and more are no model's; the search goes a step deeper with each
_SEARCHED = 100_000  # steps of the search, and
_TRIED = 100  # assignments that fit by size, before it is given up
_REL, _ABS = 2**-8, 2**-24  # half a unit of bfloat16's last place; float16's smallest number

_Names = list[list[str]]


def name_groups(
    model: ModelStates, candidates: Mapping[str, Index], flats: Sequence[Tensor]
) -> _Names:
    """The members of each group.

    Args:
        candidates: parameters of the module in its order; frozen ones are among them.

    Raises:
        AmbiguousError: more than one assignment fits, or none.
    """
    alike: dict[Index, list[str]] = {}
    for fqn, shape in candidates.items():
        alike.setdefault(shape, []).append(fqn)
    sizes = {shape: prod(shape) * len(fqns) for shape, fqns in alike.items()}
    fitting = islice(_assignments(sizes, [flat.numel for flat in flats]), _TRIED)
    named = (
        [[f for f, shape in candidates.items() if owners[shape] == n] for n in range(len(flats))]
        for owners in fitting
    )
    with SourceFiles() as files:
        found = list(islice((n for n in named if _agree(files, model.module, n, flats)), 2))
    if len(found) != 1:
        raise AmbiguousError(
            list(candidates), "were joined by a fused optimizer in an order that no file tells"
        )
    return found[0]


def _assignments(
    sizes: Mapping[Index, int], wanted: Sequence[int]
) -> Iterator[dict[Index, int | None]]:
    """The group of each shape, None of what is in none, so that every group is full."""
    order = sorted(sizes, key=lambda shape: -sizes[shape])
    steps = iter(range(_SEARCHED if len(order) <= _SHAPES else 0))

    def search(at: int, left: list[int], rest: int) -> Iterator[dict[Index, int | None]]:
        if sum(left) > rest or next(steps, None) is None:
            return
        if at == len(order):
            yield {}
            return
        size = sizes[order[at]]
        for owner in (*range(len(left)), None):
            after = [n - size if number == owner else n for number, n in enumerate(left)]
            if min(after, default=0) >= 0:
                for others in search(at + 1, after, rest - size):
                    yield {order[at]: owner, **others}

    return search(0, list(wanted), sum(sizes.values()))


def _agree(
    files: SourceFiles, module: Mapping[str, Tensor], groups: _Names, flats: Sequence[Tensor]
) -> bool:
    for names, flat in zip(groups, flats, strict=True):
        at = 0
        for fqn in names:
            weight = module[fqn]
            for place in sorted({0, weight.numel // 2, weight.numel - 1}) if weight.numel else ():
                own = weight_at(files, weight.chunk, place)
                master = weight_at(files, flat.chunk, at + place)
                if not isclose(own, master, rel_tol=_REL, abs_tol=_ABS):
                    return False
            at += weight.numel
    return True
