"""Collect the states that Megatron's ranks save beside tensors: extra states and random states.

A module's ``_extra_state`` is Transformer Engine's (scales of FP8, for example), and opaque. Each
rank has another one. The torch format stores all of them; torch_dist stores those of the first
tensor rank, which all ranks get when Megatron loads it.

Sources: Megatron-LM core_v0.16.1 ``core/transformer/utils.py``
(``make_sharded_object_for_checkpoint``: tensor- and data-parallel ranks are replicas),
``training/checkpointing.py`` (``get_rng_state``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.containers.pickles.values import Call
from reshard.core.manifest import Manifest
from reshard.formats.megatron import names
from reshard.state_dict.tree import as_global

OPAQUE_KEY = "what ranks saved beside tensors"  # in `TrainState.opaque`
RNG = "rng_state"
_EXPERT = ".experts."
_STREAM = "_io.BytesIO"  # of Transformer Engine before 2
_SHARD = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
_LAYERS = "decoder.layers."

RankKey = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankStates:
    """The states that a source has beside its tensors.

    Args:
        form: ``torch``, ``torch_dist`` or ``fsdp_dtensor``, which has random states alone.
        extra: (tensor, expert) rank -> name in the whole model -> value. The value is None for a
            module that could have a state and has none. In torch_dist (0, 0) has the states of the
            first tensor rank under the directory's keys.
        rng: random states by pipeline and tensor rank. With expert parallelism a third number
            follows: the expert rank, in torch_dist the data-parallel rank.
    """

    form: str
    extra: Mapping[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    rng: Mapping[RankKey, Any] = field(default_factory=dict)

    def list_modules(self) -> set[str]:
        """Return the modules whose states hold anything."""
        return {
            name
            for states in self.extra.values()
            for name, value in states.items()
            if not _is_empty(value)
        }

    @property
    def is_strange(self) -> bool:
        """Whether a state is neither a tensor nor a stream of bytes."""
        values = (value for states in self.extra.values() for value in states.values())
        return any(
            not (
                as_global(value)
                or _is_empty(value)
                or isinstance(value, bytes)
                or _is_stream(value)
            )
            for value in values
        )

    @property
    def of_experts(self) -> bool:
        """Whether experts have states, which the two forms store in different ways."""
        return any(map(is_of_expert, self.list_modules()))

    def make_blank(self) -> RankStates:
        """Return the modules that could have a state, with None for each.

        Experts are left out: their names depend on the rank.
        """
        modules = {
            name: None
            for states in self.extra.values()
            for name in map(name_in_model, states)
            if not is_of_expert(name)
        }
        return RankStates("torch", {(0, 0): modules})


def attach(manifest: Manifest, states: RankStates) -> Manifest:
    """Return the manifest with these states."""
    opaque = {**manifest.train.opaque, OPAQUE_KEY: states}
    return replace(manifest, train=replace(manifest.train, opaque=opaque))


def get_rank_states(manifest: Manifest) -> RankStates:
    """Return the states of a source; empty for one that is not Megatron's."""
    states = manifest.train.opaque.get(OPAQUE_KEY)
    return states if isinstance(states, RankStates) else RankStates("")


def is_of_expert(name: str) -> bool:
    """Return whether a state is of an expert's module."""
    return _EXPERT in name


def _is_empty(value: Any) -> bool:
    """Return whether a state is None or the empty tensor of a module without FP8."""
    tensor = as_global(value)
    return value is None or (tensor is not None and 0 in tensor.shape)


def _is_stream(value: Any) -> bool:
    if not isinstance(value, Call) or value.name != _STREAM or value.args:
        return False
    match value.state:
        # What ``BytesIO.__getstate__`` returns: the contents, the position and the instance's dict.
        case (bytes(), int(), None):
            return True
    return False


def collect_from_ranks(
    states_of: Iterable[tuple[tuple[int, int], Mapping[str, Any]]], rng: Mapping[RankKey, Any]
) -> RankStates:
    """Return the states of a run in the torch format.

    Args:
        states_of: (tensor, expert) rank with its states, once for each of its model chunks.
    """
    extra: dict[tuple[int, int], dict[str, Any]] = {}
    for rank, states in states_of:
        extra.setdefault(rank, {}).update(states)
    return RankStates("torch", extra, {rank: value for rank, value in rng.items() if value})


def collect_from_dist(root: Mapping[str, Any]) -> RankStates:
    """Return the states of a torch_dist directory by its keys."""
    extra, rng = dict[str, Any](), dict[RankKey, Any]()
    for key, value in root.items():
        match = _SHARD.fullmatch(key)
        if match is None or not isinstance(value, list) or len(value) != 1:
            continue
        if match[1] == RNG:
            rng[tuple(map(int, match[2].split(".")))] = value[0]
        elif names.is_extra(match[1]):
            extra[key] = value[0]
    return RankStates("torch_dist", {(0, 0): extra} if extra else {}, rng)


def name_in_model(key: str) -> str:
    """Return the name in the model of a key of torch_dist.

    >>> name_in_model("decoder.layers.mlp.linear_fc1._extra_state/shard_2_4")
    'decoder.layers.2.mlp.linear_fc1._extra_state'
    """
    match = _SHARD.fullmatch(key)
    if match is None:
        return key
    name, numbers = match[1], match[2]
    if name.startswith(_LAYERS) and not name[len(_LAYERS) :][0].isdecimal():
        return name.replace(_LAYERS, f"{_LAYERS}{numbers}.", 1)
    return name


def spell_keys(states: Mapping[str, Any], keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield states under the keys that torch_dist has for their names."""
    for key in keys:
        name = name_in_model(key)
        if name in states:
            yield key, states[name]
