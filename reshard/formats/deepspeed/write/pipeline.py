"""Find the layers of a pipeline, and share them among stages.

A layer's number is its position in the user's list of layers, which the files of a pipeline show.
Stages are not in the files that are written, but each stage's optimizer is: they must be those that
DeepSpeed will make (0.19.8 ``runtime/pipe/module.py``, ``_partition_layers``; ``runtime/utils.py``,
``partition_balanced``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from reshard.core.manifest import BUFFER, PARAM, WEIGHT_KINDS, Manifest
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed import dialects
from reshard.formats.deepspeed.layers import TIED, parse_layer
from reshard.layouts.model_parallel.sizes import Sizes, assign_layers
from reshard.units import abridge

_RANK = re.compile(r"mp_rank_(\d+)_(?:model|optim)_states\.pt$")
_GIVE_LAYERS = (
    "state the number of layers of each stage, functions included: --stage-layers N,N,..."
)
Stages = tuple[range, ...]  # the layers of each, by number


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the pipeline.

    Attributes:
        names: name in the layer's file -> the optimizer's name.
        stages: the stages of the source whose optimizers have it, several for a shared module;
            empty if no optimizer shows one.
        has_file: False for the second use of a shared module.
    """

    number: int
    names: Mapping[str, str]
    stages: frozenset[int]
    has_file: bool = True

    @property
    def fqns(self) -> frozenset[str]:
        """The optimizer's names of the layer's tensors."""
        return frozenset(self.names.values())


def is_pipeline(manifest: Manifest) -> bool:
    """Return whether the weights of the source are in files of its layers."""
    weights = manifest.of_kind(PARAM, BUFFER)
    return any(parse_layer(chunk.file) is not None for entry in weights for chunk in entry.chunks)


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
        layers.append(Layer(number, names, _find_stages(names.values(), owners)))
    shared = Counter(fqn for layer in layers for fqn in layer.names.values() if is_shared(fqn))
    stages: dict[str, int] = {}  # module -> the last stage that trains a tensor of it
    for fqn, own in owners.items():
        module = get_shared_module(fqn)
        stages[module] = max(*own, stages.get(module, 0))
    last = manifest.origin.mesh.get("pp", 1) - 1
    once = {
        fqn: _get_local_name(fqn, 0)
        for fqn, count in shared.items()
        if count == 1 and stages.get(get_shared_module(fqn), last) == last
    }
    if once:
        names = {local: fqn for fqn, local in once.items()}
        held = _find_stages(once, owners)
        only = frozenset({last}) if held else held
        layers.append(Layer(layers[-1].number + 1, names, only, has_file=False))
    return tuple(layers)


def is_shared(fqn: str) -> bool:
    """Return whether a tensor is in a module that several layers share."""
    return fqn.startswith(TIED)


def get_shared_module(fqn: str) -> str:
    """Return the key of the shared module that has a tensor."""
    return fqn.removeprefix(TIED).partition(".")[0]


def _get_local_name(fqn: str, number: int) -> str:
    if fqn.startswith(TIED):
        return fqn.removeprefix(TIED).partition(".")[2]
    return fqn.removeprefix(f"{number}.")


def refuse_unknown_uses(manifest: Manifest) -> None:
    """Refuse shared modules if no file states which stages have them, or in which order.

    Raises:
        UnsupportedError: there are such modules.
    """
    layers = list_layers(manifest)
    uses: dict[str, list[Layer]] = {}
    for layer in layers:
        for module in {get_shared_module(fqn) for fqn in layer.fqns if is_shared(fqn)}:
            uses.setdefault(module, []).append(layer)
    unfiled = [module for module, own in uses.items() if not own[-1].has_file]
    unknown = {module for module, own in uses.items() if len(own) < len(own[0].stages)}
    unknown.update(unfiled if len(unfiled) > 1 else ())
    if unknown:
        raise UnsupportedError(
            manifest.origin.path,
            f"contains shared modules with uses without a file ({abridge(sorted(unknown))}): no"
            " file states the order of these layers, which is that of DeepSpeed's optimizer",
            "write --to ds-universal, which DeepSpeed loads by name, or pass --pp 1",
        )


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
    if count == 1:
        return (range(total),), "all on one"
    before = manifest.origin.mesh.get("pp", 1)
    is_known = any(layer.stages for layer in layers)
    if before == count and is_known:
        return _fill_stages(layers, count), "as in the source"
    methods = _list_partition_methods(manifest, layers, total)
    fitting = [name for name, cut in methods.items() if _is_fitting(cut(before), layers)]
    if not fitting:
        raise UsageError(
            manifest.origin.path,
            "has stages that no partition method of DeepSpeed produces",
            _GIVE_LAYERS,
        )
    how = f"as partition_method {fitting[0]!r} shares them"
    if not is_known or len({methods[name](count) for name in fitting}) > 1:
        how += ", which the source does not state: --stage-layers N,N,... sets others"
    return methods[fitting[0]](count), how


def _find_owners(manifest: Manifest) -> dict[str, set[int]]:
    owners: dict[str, set[int]] = {}
    if manifest.origin.mesh.get("pp", 1) == 1:
        return owners
    tensor = manifest.origin.mesh.get("tp", 1)
    for entry in manifest.entries.values():
        for chunk in entry.chunks if entry.kind not in (PARAM, BUFFER) else ():
            if match := _RANK.search(chunk.file):
                owners.setdefault(entry.fqn, set()).add(int(match[1]) // tensor)
    return owners


def _find_stages(fqns: Iterable[str], owners: Mapping[str, Collection[int]]) -> frozenset[int]:
    return frozenset(stage for fqn in fqns for stage in owners.get(fqn, ()))


def _fill_stages(layers: Sequence[Layer], count: int) -> Stages:
    # A shared module may be used on either side of the border of two stages that both have it: then
    # a stage ends as soon as it has everything. A layer of unknown stage is with the one before it.
    lacking: list[set[str]] = [set() for _ in range(count)]
    for layer in layers:
        for stage in layer.stages:
            lacking[stage] |= layer.fqns
    ends = [0] * (count + 1)
    at = 0
    for layer in layers:
        at = min((stage for stage in layer.stages if stage >= at), default=at)
        if not lacking[at] and at + 1 in layer.stages:
            at += 1
        lacking[at] -= layer.fqns
        ends[at + 1] = layer.number + 1
    return _make_ranges(list(accumulate(ends, max)))


def _list_partition_methods(
    manifest: Manifest, layers: Sequence[Layer], total: int
) -> dict[str, Callable[[int], Stages]]:
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


def _is_fitting(stages: Stages, layers: Sequence[Layer]) -> bool:
    last = len(stages) - 1
    found: set[tuple[int, str]] = set()
    for layer in layers:
        # The number of a layer without a file is not known for certain.
        at = last
        if layer.has_file:
            at = next(stage for stage, own in enumerate(stages) if layer.number in own)
        if layer.stages and at not in layer.stages:
            return False
        found |= {(at, fqn) for fqn in layer.fqns}
    return found >= {(n, fqn) for layer in layers for n in layer.stages for fqn in layer.fqns}


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
