"""Describe in a universal checkpoint how tensor-parallel ranks share each parameter.

Source: DeepSpeed 0.19.8 ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``), which writes it,
and ``checkpoint/universal_checkpoint.py`` (``load_hp_checkpoint_state``), which cuts by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.containers.pickles.values import Call
from reshard.core.box import Index
from reshard.core.manifest import Entry, Skeleton
from reshard.formats.deepspeed.write.grid import DeepSpeedTarget, make_cuts
from reshard.layouts.model_parallel import shards
from reshard.layouts.model_parallel.vocabulary import take_first_rows
from reshard.training.state import WritableState, change_entries

_SUBPARAMS = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"
NOT_DESCRIBED = "its tensors have no tensor-parallel marks: load it at a tensor-parallel size of 1"


class SplitMetadata:
    """The metadata of every parameter of a model-parallel run.

    ``is_known`` is False for a single tensor-parallel rank of a run that declares nothing: its
    tensors get no metadata.

    Args:
        target: the grid, and a user's table.
    """

    def __init__(self, state: WritableState, target: DeepSpeedTarget) -> None:
        tensor = target.parallel.tensor
        # For a single tensor-parallel rank, `Cuts` would describe every tensor as whole.
        self._cuts, info = make_cuts(state, target, max(tensor, 2))
        vocabulary = info.get("original_vocab_size")
        self._vocabulary = vocabulary if isinstance(vocabulary, int) else None
        self.is_known = tensor > 1 or len(info) > 1  # every such dict states its version
        self._tensor = tensor
        self._shapes = {weight.fqn: weight.shape for weight in state.weights}

    def describe(self, fqn: str) -> dict[str, Any]:
        """Return the keys beside a parameter's values."""
        if not self.is_known:
            return {"cat_dim": 0}
        shape = self._shapes[fqn]
        split = self._cuts.find_split(fqn, shape)
        if split.dim is None:
            return {}
        if len(split.parts) > 1:
            fused = self._cuts.find_fused(fqn)
            if fused is not None:
                return {"sub_param_shape": _make_sub_param_shape(fused, shape)}
            return {"cat_dim": split.dim, "param_n_sub_params": len(split.parts)}
        return {"cat_dim": split.dim, **({"vocab_tensor": True} if split.padded else {})}

    def divide_sums(self, skeleton: Skeleton) -> Skeleton:
        """Store one rank's share of tensors that ranks add up: DeepSpeed gives it to each rank."""

        def share(entry: Entry) -> Entry:
            split = self._cuts.find_split(entry.fqn, self._shapes[entry.fqn])
            return shards.scale_shares(entry, split, self._tensor)

        if not self.is_known:
            return skeleton
        return replace(skeleton, entries=tuple(map(share, skeleton.entries)))

    def strip_padding(self, state: WritableState) -> WritableState:
        """Return the state without padding rows of vocabularies, in weights and moments alike."""
        if not self.is_known or self._vocabulary is None:
            return state
        padded = {fqn for fqn in self._shapes if self._is_padded(fqn)}
        rows = self._vocabulary

        def strip(entry: Entry) -> Entry:
            return take_first_rows(entry, rows) if entry.fqn in padded and entry.shape else entry

        return change_entries(state, strip)

    def _is_padded(self, fqn: str) -> bool:
        is_vocabulary = "vocab_tensor" in self.describe(fqn)
        return is_vocabulary and self._shapes[fqn][0] > (self._vocabulary or 0)

    def list_notes(self) -> list[str]:
        """Return the notes for the user."""
        if not self.is_known:
            return [NOT_DESCRIBED]
        notes = []
        summed = [
            fqn for fqn, shape in self._shapes.items() if self._cuts.find_split(fqn, shape).summed
        ]
        if summed:
            notes.append(
                f"load it at a tensor-parallel size of {self._tensor} alone: ranks add up"
                f" {len(summed)} biases ({summed[0]!r} ...), and DeepSpeed gives each rank the"
                " share of one that is stored; for another size write --to deepspeed --tp N"
            )
        if self._vocabulary is not None:
            notes += [
                f"{fqn!r} is cut to the {self._vocabulary} rows of its vocabulary, without the"
                " padding"
                for fqn in self._shapes
                if self._is_padded(fqn)
            ]
        return [*notes, *self._cuts.notes]


def _make_sub_param_shape(fused: Mapping[str, Any], shape: Index) -> Call:
    """Return the parts of a fused parameter; equal parts if the run states only their number."""
    dim = int(fused["partition_dim"])
    view = [tuple(n) if isinstance(n, (list, tuple)) else int(n) for n in fused["shape"]]
    parts = view[dim]
    view[dim] = parts if isinstance(parts, tuple) else (shape[dim] // parts,) * parts
    state = {"patterns": list(fused["patterns"]), "shape": tuple(view), "partition_dim": dim}
    return Call(_SUBPARAMS, (), state)
