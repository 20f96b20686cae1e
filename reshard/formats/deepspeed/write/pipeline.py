"""Which layers a pipeline has, and on which stage each stands.

A layer's number is its place in the user's list of layers, so it is known from the files of a
pipeline alone. Stages are not in the files that are written, but each stage's optimizer is: they
must be those that DeepSpeed will make (0.19.8 ``runtime/pipe/module.py``, ``_partition_layers``;
``runtime/utils.py``, ``partition_balanced``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from reshard.errors import UsageError
from reshard.formats.deepspeed import dialects
from reshard.formats.deepspeed.layers import TIED, parse_layer
from reshard.manifest import BUFFER, PARAM, WEIGHT_KINDS, Manifest

_RANK = re.compile(r"mp_rank_(\d+)_(?:model|optim)_states\.pt$")
_ONE_MORE = "say which layers each stage has: --stage-layers N,N,..., functions among them counted"
Stages = tuple[range, ...]  # the layers of each, by number


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; ``names`` are those in its file, and what the optimizer calls each."""

    number: int
    names: Mapping[str, str]
    filed: bool = True  # whether it has a file; a shared module's second use may have none

    @property
    def holds(self) -> frozenset[str]:
        """The optimizer's names of what it has."""
        return frozenset(self.names.values())


def layers_of(manifest: Manifest) -> tuple[Layer, ...]:
    """The layers of a pipeline that was saved; none of what was none.

    The last use of a shared module is a function of it in most models: a layer without a file,
    after all others.
    """
    found: dict[int, dict[str, str]] = {}
    for entry in manifest.of_kind(PARAM, BUFFER):
        for number in {parse_layer(chunk.file) for chunk in entry.chunks} - {None}:
            found.setdefault(number or 0, {})[_local(entry.fqn, number or 0)] = entry.fqn
    layers = [Layer(number, names) for number, names in sorted(found.items())]
    shared = Counter(fqn for layer in layers for fqn in layer.holds if fqn.startswith(TIED))
    once = {fqn: _local(fqn, 0) for fqn, count in shared.items() if count == 1}
    if once:
        layers.append(
            Layer(layers[-1].number + 1, {local: f for f, local in once.items()}, filed=False)
        )
    return tuple(layers)


def _local(fqn: str, number: int) -> str:
    if fqn.startswith(TIED):
        return fqn.removeprefix(TIED).partition(".")[2]
    return fqn.removeprefix(f"{number}.")


def stages(
    manifest: Manifest,
    layers: Sequence[Layer],
    count: int,
    given: Sequence[int] | None = None,
) -> tuple[Stages, str]:
    """The layers of each stage, and by what rule.

    Args:
        given: how many layers each has, where somebody says so.

    Raises:
        UsageError: what is given does not add up, or there are fewer layers than stages.
    """
    total = layers[-1].number + 1
    if given is not None:
        if len(given) != count or sum(given) != total:
            raise UsageError(
                f"--stage-layers {','.join(map(str, given))}",
                f"does not share {total} layers among {count} stages",
            )
        return _ranges([0, *accumulate(given)]), "as --stage-layers says"
    if count > len(layers):
        raise UsageError(f"--pp {count}", f"is more than the {len(layers)} layers of the model")
    before = manifest.origin.mesh.get("pp", 1)
    own = _of_source(manifest, layers, before)
    if before == count and own is not None:
        return own, "as in the source"
    methods = _methods(manifest, layers, total)
    fitting = [
        name for name, cut in methods.items() if own is None or _same(cut(before), own, layers)
    ]
    if not fitting:
        raise UsageError(
            manifest.origin.path,
            "has stages that none of DeepSpeed's partition methods makes",
            _ONE_MORE,
        )
    how = f"as partition_method {fitting[0]!r} shares them"
    known = "" if own else ", which the source does not tell: --stage-layers N,N,... says others"
    return methods[fitting[0]](count), how + known


def _of_source(manifest: Manifest, layers: Sequence[Layer], count: int) -> Stages | None:
    """The stages of the source, as its ranks' files tell; None where they do not."""
    tensor = manifest.origin.mesh.get("tp", 1)
    ends = [0] * (count + 1)
    owners: dict[str, int] = {}
    for entry in manifest.entries.values():
        for chunk in entry.chunks if entry.kind not in (PARAM, BUFFER) else ():
            if match := _RANK.search(chunk.file):
                stage = int(match[1]) // tensor
                owners[entry.fqn] = max(owners.get(entry.fqn, 0), stage)
    if count == 1 or not owners:
        return None
    at = 0
    for layer in layers:
        own = (fqn for fqn in layer.holds if not (layer.filed and fqn.startswith(TIED)))
        on = [owners[fqn] for fqn in own if fqn in owners]
        at = max(at, max(on, default=at))
        ends[at + 1] = layer.number + 1
    return _ranges(list(accumulate(ends, max)))


def _methods(
    manifest: Manifest, layers: Sequence[Layer], total: int
) -> dict[str, Callable[[int], Stages]]:
    """DeepSpeed's ways to cut, the likeliest first."""
    sizes = {entry.fqn: entry.numel for entry in manifest.of_kind(*WEIGHT_KINDS)}
    buffers = {entry.fqn for entry in manifest.of_kind(BUFFER)}
    parameters, blocks = [0] * total, [0] * total
    kinds = Counter(frozenset(layer.names) for layer in layers)
    common = max(kinds, key=lambda kind: (kinds[kind], len(kind)))
    for layer in layers:
        trained = layer.holds - buffers - manifest.frozen
        parameters[layer.number] = sum(sizes[fqn] for fqn in trained)
        blocks[layer.number] = int(frozenset(layer.names) == common)
    methods = {
        "parameters": lambda count: balanced(parameters, count),
        "type:": lambda count: balanced(blocks, count),
        "uniform": lambda count: uniform(total, count),
    }
    order = ["parameters", "uniform", "type:"]
    if dialects.detect_dialect(sizes)[0] is not None:
        order = ["type:", "parameters", "uniform"]
    return {name: methods[name] for name in order}


def _same(a: Stages, b: Stages, layers: Sequence[Layer]) -> bool:
    """Whether two ways put every layer that has a file on the same stage."""

    def placed(stages: Stages) -> list[int]:
        return [next(n for n, s in enumerate(stages) if x.number in s) for x in layers if x.filed]

    return placed(a) == placed(b)


def _ranges(ends: Sequence[int]) -> Stages:
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def uniform(total: int, count: int) -> Stages:
    """As many in each; the first stages have one more where they do not divide."""
    if total <= count:
        return _ranges([min(n, total) for n in range(count + 1)])
    size, rest = divmod(total, count)
    return _ranges([n * size + min(n, rest) for n in range(count + 1)])


def balanced(weights: Sequence[int], count: int) -> Stages:
    """Where the heaviest and the lightest stage differ least; of equals the last one found."""
    total = len(weights)
    if total <= count:
        return uniform(total, count)
    sums = [0, *accumulate(weights)]
    empty = (0.0, 0.0, float("inf"), 0)  # cost, heaviest, lightest, where the last stage begins
    best: dict[tuple[int, int], tuple[float, float, float, int]] = {(0, 0): empty}
    for stop in range(1, total + 1):
        for stage in range(1, min(stop, count) + 1):
            for start in range(stage - 1, stop):
                if (start, stage - 1) not in best:
                    continue
                _, most, least, _ = best[start, stage - 1]
                held = sums[stop] - sums[start]
                most, least = max(most, held), min(least, held)
                known = best.get((stop, stage))
                if known is None or known[0] >= most - least:
                    best[stop, stage] = (most - least, most, least, start)
    ends = [total]
    for stage in range(count, 0, -1):
        ends.append(best[ends[-1], stage][3])
    return _ranges(ends[::-1])
