"""Adapt what GPT-NeoX needs of a checkpoint beside DeepSpeed's own: its settings and its sizes.

Source: GPT-NeoX ea7aefd ``megatron/checkpointing.py``: ``save_ds_checkpoint`` keeps ``configs/``,
which its tools read and its loader does not; ``check_checkpoint_args`` compares the run's settings
with the ``args`` of the checkpoint; ``load_checkpoint`` fails if random states are missing.
``megatron/tokenizer/tokenizer.py`` (``_vocab_size_with_padding``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.containers import skeletons
from reshard.core.manifest import Skeleton
from reshard.formats.deepspeed import dialects, neox
from reshard.formats.deepspeed.write.pipeline import is_pipeline
from reshard.formats.deepspeed.write.spec import RANDOM_STATES, select_extra_state
from reshard.layouts.model_parallel.sizes import Sizes
from reshard.training.state import WritableState

_ARGS, _RANKS = "args", "model_parallel_size"
_UNIT = "make_vocab_size_divisible_by"


def copy_settings(state: WritableState, tag: str) -> Skeleton:
    """Return unchanged copies of the files of ``configs/``, which state how ranks share biases."""
    if not _is_neox(state):
        return Skeleton((), ())
    files = neox.read_files(state.manifest.origin.path)
    named = {f"{tag}/{neox.FOLDER}/{path.name}": data for path, data in files.items()}
    return skeletons.join(skeletons.lay_out_bytes(name, data) for name, data in named.items())


def adapt_settings(state: WritableState, sizes: Sizes) -> WritableState:
    """Return the state with the sizes of a run of other tensor-parallel ranks in its ``args``.

    The vocabulary keeps its padding if a unit times the ranks is as before.
    """
    args = _get_args(state)
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


def describe_settings(state: WritableState, sizes: Sizes) -> Iterator[str]:
    """Yield the settings with which GPT-NeoX loads the output, if they are not the source's."""
    if not _is_neox(state):
        return
    before, after = _get_args(state), _get_args(adapt_settings(state, sizes))
    changed: dict[str, Any] = {}
    if before != after or state.manifest.origin.mesh.get("pp", 1) != sizes.pipeline:
        changed |= {name: after[name] for name in (_RANKS, _UNIT) if name in after}
        changed["pipe_parallel_size"] = sizes.pipeline if is_pipeline(state.manifest) else 0
    if not select_extra_state(state)[0].keys() >= RANDOM_STATES:
        changed["no_load_rng"] = "true"
    if changed:
        shown = ", ".join(f"{name} {value}" for name, value in changed.items())
        yield (
            f"GPT-NeoX loads the output with {shown}; configs/ keeps the source's settings, if any"
        )
    if before != after and before.get(_UNIT) == after.get(_UNIT):
        yield (
            f"GPT-NeoX pads the vocabulary to a multiple of {_UNIT} x {_RANKS}; it loads the output"
            f" only if that results in the {after.get('padded_vocab_size')} rows stored there"
        )


def _is_neox(state: WritableState) -> bool:
    names = (weight.fqn for weight in state.weights)
    is_neox = dialects.detect_dialect(names)[0] == dialects.NEOX
    return is_neox and state.manifest.origin.format.startswith("deepspeed")


def _get_args(state: WritableState) -> Mapping[str, Any]:
    args = state.manifest.train.client.get(_ARGS)
    return args if isinstance(args, Mapping) and _is_neox(state) else {}
