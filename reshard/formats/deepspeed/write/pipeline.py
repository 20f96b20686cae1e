"""Find the layers of a pipeline, and share them among stages.

A layer's number is its position in the user's list of layers, which the files of a pipeline show.
Stages are not in the files that are written, but each stage's optimizer is: they must be those that
DeepSpeed will make (0.19.8 ``runtime/pipe/module.py``, ``_partition_layers``; ``runtime/utils.py``,
``partition_balanced``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from reshard.core.manifest import BUFFER, PARAM, WEIGHT_KINDS, Manifest
from reshard.errors import UsageError
from reshard.formats.deepspeed import dialects
from reshard.formats.deepspeed.layers import TIED, parse_layer
from reshard.layouts.model_parallel.sizes import Sizes, assign_layers

_RANK = re.compile(r"mp_rank_(\d+)_(?:model|optim)_states\.pt$")
_GIVE_LAYERS = (
    "state the number of layers of each stage, functions included: --stage-layers N,N,..."
)
Stages = tuple[range, ...]  # the layers of each, by number


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    Attributes:
        names: name in the layer's file -> the optimizer's name.
        stage: the stage of the source whose optimizer has it; None if no optimizer shows one.
        has_file: False for the second use of a shared module.
    """

    number: int
    names: Mapping[str, str]
    stage: int | None
    has_file: bool = True

    @property
    def fqns(self) -> frozenset[str]:
        """The optimizer's names of the layer's tensors."""
        return frozenset(self.names.values())


def list_layers(manifest: Manifest) -> tuple[Layer, ...]:
    """Return the layers of a pipeline; empty if the source is not a pipeline.

    A layer may have no tensors, only a file. The last use of a shared module is a function of it in
    most models: a layer without a file, after all others, unless the last stage does not train it.
    """
    names_of: dict[int, dict[str, str]] = {}
    for entry in manifest.of_kind(PARAM, BUFFER):
        for number in {parse_layer(chunk.file) for chunk in entry.chunks}:
            if number is not None:
                name = _get_local_name(entry.fqn, number)
                names_of.setdefault(number, {})[name] = entry.fqn
    if not names_of:
        return ()
    numbers = {number for path in manifest.files if (number := parse_layer(path)) is not None}
    owners = _find_owners(manifest)
    layers = []
    for number in sorted(numbers):
        names = names_of.get(number, {})
        # Several stages hold a shared module. Only its last use, which has no file, shows a stage.
        own = [fqn for fqn in names.values() if not fqn.startswith(TIED)]
        layers.append(Layer(number, names, _find_last_stage(own, owners)))
    shared = Counter(fqn for layer in layers for fqn in layer.fqns if fqn.startswith(TIED))
    stages: dict[str, int] = {}  # module -> the last stage that trains a tensor of it
    for fqn, owner in owners.items():
        module = _get_shared_module(fqn)
        stages[module] = max(owner, stages.get(module, 0))
    last = manifest.origin.mesh.get("pp", 1) - 1
    once = {
        fqn: _get_local_name(fqn, 0)
        for fqn, count in shared.items()
        if count == 1 and stages.get(_get_shared_module(fqn), last) == last
    }
    if once:
        names = {local: fqn for fqn, local in once.items()}
        stage = _find_last_stage(once, owners)
        layers.append(Layer(layers[-1].number + 1, names, stage, has_file=False))
    return tuple(layers)


def _get_shared_module(fqn: str) -> str:
    """Return the key of the shared module that has a tensor."""
    return fqn.removeprefix(TIED).partition(".")[0]


def _get_local_name(fqn: str, number: int) -> str:
    """Return the name that a layer's file has for a tensor."""
    if fqn.startswith(TIED):
        return fqn.removeprefix(TIED).partition(".")[2]
    return fqn.removeprefix(f"{number}.")


def share_layers(
    manifest: Manifest,
    layers: Sequence[Layer],
    count: int,
    given: Sequence[int] | None,
) -> tuple[Stages, str]:
    """Return the layers of each stage, and a description of the rule that shares them.

    Args:
        given: number of layers of each stage, if the user gave it.

    Raises:
        UsageError: the given numbers do not add up, or there are fewer layers than stages.
    """
    total = layers[-1].number + 1
    if given is not None:
        return tuple(assign_layers(Sizes(pipeline=count), total, given)), "as --stage-layers states"
    if count > len(layers):
        raise UsageError(f"--pp {count}", f"is more than the {len(layers)} layers of the model")
    before = manifest.origin.mesh.get("pp", 1)
    known = {layer.number: layer.stage for layer in layers if layer.stage is not None}
    if before == count and known:
        return _fill_stages(known, layers, count), "as in the source"
    methods = _list_partition_methods(manifest, layers, total)
    # The number of a layer without a file is not known for certain.
    shown = {n: known[n] for layer in layers if layer.has_file and (n := layer.number) in known}
    fitting = [name for name, cut in methods.items() if _is_fitting(cut(before), shown)]
    if not fitting:
        raise UsageError(
            manifest.origin.path,
            "has stages that no partition method of DeepSpeed produces",
            _GIVE_LAYERS,
        )
    how = f"as partition_method {fitting[0]!r} shares them"
    if not known:
        how += ", which the source does not state: --stage-layers N,N,... sets others"
    return methods[fitting[0]](count), how


def _find_owners(manifest: Manifest) -> dict[str, int]:
    """Return the last stage whose optimizer has each parameter; empty if there is one stage."""
    owners: dict[str, int] = {}
    if manifest.origin.mesh.get("pp", 1) == 1:
        return owners
    tensor = manifest.origin.mesh.get("tp", 1)
    for entry in manifest.entries.values():
        for chunk in entry.chunks if entry.kind not in (PARAM, BUFFER) else ():
            if match := _RANK.search(chunk.file):
                stage = int(match[1]) // tensor
                owners[entry.fqn] = max(owners.get(entry.fqn, 0), stage)
    return owners


def _find_last_stage(fqns: Iterable[str], owners: Mapping[str, int]) -> int | None:
    return max((owners[fqn] for fqn in fqns if fqn in owners), default=None)


def _fill_stages(known: Mapping[int, int], layers: Sequence[Layer], count: int) -> Stages:
    """Return the stages of all layers; other layers are on the stage of those before them.

    Args:
        known: number of a layer -> its stage.
    """
    ends = [0] * (count + 1)
    at = 0
    for layer in layers:
        at = max(at, known.get(layer.number, at))
        ends[at + 1] = layer.number + 1
    return _make_ranges(list(accumulate(ends, max)))


def _list_partition_methods(
    manifest: Manifest, layers: Sequence[Layer], total: int
) -> dict[str, Callable[[int], Stages]]:
    """Return DeepSpeed's partition methods, the likeliest first."""
    sizes = {entry.fqn: entry.numel for entry in manifest.of_kind(*WEIGHT_KINDS)}
    buffers = {entry.fqn for entry in manifest.of_kind(BUFFER)}
    parameters, blocks = [0] * total, [0] * total
    # No file names the classes of layers: the most frequent set of names is taken for the block.
    kinds = Counter(frozenset(layer.names) for layer in layers if layer.names)
    common = max(kinds, key=lambda kind: (kinds[kind], len(kind)))
    for layer in layers:
        trained = layer.fqns - buffers - manifest.frozen
        parameters[layer.number] = sum(sizes[fqn] for fqn in trained)
        blocks[layer.number] = int(frozenset(layer.names) == common)
    methods = {
        "parameters": lambda count: balance(parameters, count),
        "type:": lambda count: balance(blocks, count),
        "uniform": lambda count: share_uniformly(total, count),
    }
    # PipelineModule's default is "parameters"; Megatron's descendants pass "type:" and a class.
    order = ["parameters", "uniform", "type:"]
    if dialects.detect_dialect(sizes)[0] is not None:
        order = ["type:", "parameters", "uniform"]
    return {name: methods[name] for name in order}


def _is_fitting(stages: Stages, known: Mapping[int, int]) -> bool:
    """Return whether a division puts the known layers on their stages."""
    return all(number in stages[stage] for number, stage in known.items())


def _make_ranges(ends: Sequence[int]) -> Stages:
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def share_uniformly(total: int, count: int) -> Stages:
    """Return stages of equal length; the first ones have one more if they do not divide."""
    if total <= count:
        return _make_ranges([min(n, total) for n in range(count + 1)])
    size, rest = divmod(total, count)
    return _make_ranges([n * size + min(n, rest) for n in range(count + 1)])


def balance(weights: Sequence[int], count: int) -> Stages:
    """Return the stages whose heaviest and lightest differ least; of equals the last one found."""
    total = len(weights)
    if total <= count:
        return share_uniformly(total, count)
    sums = [0, *accumulate(weights)]
    empty = (0.0, 0.0, float("inf"), 0)  # cost, heaviest, lightest, first layer of the last stage
    best: dict[tuple[int, int], tuple[float, float, float, int]] = {(0, 0): empty}
    for stop in range(1, total + 1):
        for stage in range(1, min(stop, count) + 1):
            for start in range(stage - 1, stop):
                if (start, stage - 1) not in best:
                    continue
                _, most, least, _ = best[start, stage - 1]
                weight = sums[stop] - sums[start]
                most, least = max(most, weight), min(least, weight)
                known = best.get((stop, stage))
                if known is None or known[0] >= most - least:
                    best[stop, stage] = (most - least, most, least, start)
    ends = [total]
    for stage in range(count, 0, -1):
        ends.append(best[ends[-1], stage][3])
    return _make_ranges(ends[::-1])
