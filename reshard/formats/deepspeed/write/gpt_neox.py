"""What GPT-NeoX asks of a checkpoint beside DeepSpeed's own: its settings and its sizes.

Source: GPT-NeoX ea7aefd ``megatron/checkpointing.py``: ``save_ds_checkpoint`` keeps ``configs/``,
which no loader opens, only its tools; ``check_checkpoint_args`` wants the run's settings to be the
``args`` of the checkpoint; ``load_checkpoint`` gives up where random states are not there.
``megatron/tokenizer/tokenizer.py`` (``_vocab_size_with_padding``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.containers import skeletons
from reshard.formats.deepspeed import dialects, neox
from reshard.formats.deepspeed.write import carried
from reshard.formats.deepspeed.write.pipeline import layers_of
from reshard.manifest import Skeleton
from reshard.model_parallel.sizes import Sizes
from reshard.training.state import Training

_ARGS, _RANKS = "args", "model_parallel_size"
_UNIT = "make_vocab_size_divisible_by"
_RANDOM = frozenset(
    "random_rng_state np_rng_state torch_rng_state cuda_rng_state rng_tracker_states".split()
)


def settings(state: Training, tag: str) -> Skeleton:
    """The files of ``configs/``, which say how ranks share biases; as they were."""
    if not _is_neox(state):
        return Skeleton((), ())
    held = neox.read_files(state.manifest.origin.path)
    named = {f"{tag}/{neox.FOLDER}/{path.name}": data for path, data in held.items()}
    return skeletons.join(skeletons.lay_out_bytes(name, data) for name, data in named.items())


def of_ranks(state: Training, sizes: Sizes) -> Training:
    """The state with the sizes that a run of so many tensor-parallel ranks has.

    The vocabulary keeps its padding, where a unit times the ranks is as before.
    """
    args = _args(state)
    ranks = args.get(_RANKS)
    if not isinstance(ranks, int) or ranks == sizes.tensor:
        return state
    changed: dict[str, Any] = {**args, _RANKS: sizes.tensor}
    unit = args.get(_UNIT)
    if isinstance(unit, int) and unit * ranks % sizes.tensor == 0:
        changed[_UNIT] = unit * ranks // sizes.tensor
    train = state.manifest.train
    own = {name: value for name, value in train.objects.items() if name != _ARGS}
    train = replace(train, client={**train.client, _ARGS: changed}, objects=own)
    return replace(state, manifest=replace(state.manifest, train=train))


def notes(state: Training, sizes: Sizes) -> Iterator[str]:
    """With which settings GPT-NeoX loads it, where they are not the source's."""
    if not _is_neox(state):
        return
    before, after = _args(state), _args(of_ranks(state, sizes))
    told: dict[str, Any] = {}
    if before != after or state.manifest.origin.mesh.get("pp", 1) != sizes.pipeline:
        told |= {name: after[name] for name in (_RANKS, _UNIT) if name in after}
        told["pipe_parallel_size"] = sizes.pipeline if layers_of(state.manifest) else 0
    if not carried.carried(state)[0].keys() >= _RANDOM:
        told["no_load_rng"] = "true"
    if told:
        shown = ", ".join(f"{name} {value}" for name, value in told.items())
        yield f"GPT-NeoX loads it with {shown}; the source's settings, if any, stay in configs/"
    if before != after and before.get(_UNIT) == after.get(_UNIT):
        yield (
            f"GPT-NeoX pads the vocabulary to a multiple of {_UNIT} x {_RANKS}, which may be others"
            f" than the {after.get('padded_vocab_size')} rows here: it would not load it then"
        )


def _is_neox(state: Training) -> bool:
    origin = state.manifest.origin
    names = (weight.fqn for weight in state.weights)
    return (
        origin.format.startswith("deepspeed") and dialects.detect_dialect(names)[0] == dialects.NEOX
    )


def _args(state: Training) -> Mapping[str, Any]:
    args = state.manifest.train.client.get(_ARGS)
    return args if isinstance(args, Mapping) and _is_neox(state) else {}
