"""How a universal checkpoint says of each parameter how tensor-parallel ranks share it.

Source: DeepSpeed 0.19.8 ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``), which writes it,
and ``checkpoint/universal_checkpoint.py`` (``load_hp_checkpoint_state``), which cuts by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.box import Index
from reshard.formats.deepspeed.cuts import Cuts
from reshard.formats.deepspeed.write.grid import Wanted
from reshard.manifest import Entry, Skeleton
from reshard.model_parallel import shards
from reshard.model_parallel.vocabulary import take_first_rows
from reshard.pickles.values import Call
from reshard.training.state import Training

_INFO = "universal_checkpoint_info"
_SUBPARAMS = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"
_MANY = 2  # tensor-parallel ranks, for what a single one would have whole


class Marks:
    """The marks of every parameter of a model-parallel run.

    Args:
        wanted: its grid, and a user's table. A single tensor-parallel rank of a run that says
            nothing leaves no marks.
    """

    def __init__(self, state: Training, wanted: Wanted) -> None:
        found = state.manifest.train.opaque.get(_INFO)
        info: Mapping[str, Any] = found if isinstance(found, dict) else {}
        words = info.get("original_vocab_size")
        self._words = words if isinstance(words, int) else None
        tensor = wanted.sizes.tensor
        self.known = tensor > 1 or len(info) > 1
        self._tensor = tensor
        self._shapes = {weight.fqn: weight.shape for weight in state.weights}
        self._cuts = Cuts(
            state.manifest.origin.path,
            info,
            self._shapes,
            ranks=max(tensor, _MANY),
            buffers=[weight.fqn for weight in state.weights if weight.is_buffer],
            rules=wanted.rules,
        )

    def of(self, fqn: str) -> dict[str, Any]:
        """What stands beside a parameter's values.

        Raises:
            UsageError: nothing says how it is cut.
        """
        if not self.known:
            return {"cat_dim": 0}
        shape = self._shapes[fqn]
        split = self._cuts.split(fqn, shape)
        fused = self._cuts.find_fused(fqn)
        if split.dim is None:
            return {}
        if fused is not None and len(split.parts) > 1:
            return {"sub_param_shape": _sub_params(fused, shape)}
        if len(split.parts) > 1:
            return {"cat_dim": split.dim, "param_n_sub_params": len(split.parts)}
        return {"cat_dim": split.dim, **({"vocab_tensor": True} if split.padded else {})}

    def shares(self, made: Skeleton) -> Skeleton:
        """Of what ranks add up the share of one, as DeepSpeed gives each rank the same values."""

        def share(entry: Entry) -> Entry:
            split = self._cuts.split(entry.fqn, self._shapes[entry.fqn])
            return shards.scale_shares(entry, split, self._tensor)

        return replace(made, entries=tuple(map(share, made.entries))) if self.known else made

    def without_padding(self, state: Training) -> Training:
        """The state whose vocabularies have their words alone, in weights and moments alike."""
        words = self._words
        if not self.known or words is None:
            return state

        def cut(entry: Entry) -> Entry:
            padded = "vocab_tensor" in self.of(entry.fqn) and entry.shape[0] > words
            return take_first_rows(entry, words) if padded else entry

        weights = {
            w.fqn: replace(w, value=(value := cut(w.value)), shape=value.shape)
            for w in state.weights
        }
        groups = tuple(
            replace(
                group,
                members=tuple(
                    replace(
                        member,
                        weight=weights[member.fqn],
                        slots={slot: cut(entry) for slot, entry in member.slots.items()},
                    )
                    for member in group.members
                ),
            )
            for group in state.groups
        )
        return replace(state, weights=tuple(weights.values()), groups=groups)

    def notes(self) -> list[str]:
        """What the user must be told of them."""
        if not self.known:
            return ["its tensors are not marked for tensor parallelism: load it at a degree of 1"]
        padded = [
            fqn
            for fqn, shape in self._shapes.items()
            if self._words is not None
            and shape[:1] > (self._words,)
            and "vocab_tensor" in self.of(fqn)
        ]
        summed = [fqn for fqn, shape in self._shapes.items() if self._cuts.split(fqn, shape).summed]
        return [
            *self._of_summed(summed),
            *(f"{fqn!r} is cut to its {self._words} words, without the padding" for fqn in padded),
            *self._cuts.notes,
        ]

    def _of_summed(self, fqns: Sequence[str]) -> Iterator[str]:
        if fqns:
            yield (
                f"load it at a tensor parallel size of {self._tensor} alone: ranks add up"
                f" {len(fqns)} biases ({fqns[0]!r} ...), of which DeepSpeed gives each rank what"
                " stands there, the share of one; for another size write --to deepspeed --tp N"
            )


def _sub_params(fused: Mapping[str, Any], shape: Index) -> Call:
    """The fused parts of a parameter, their extents where the run says no more than a number."""
    dim = int(fused["partition_dim"])
    view = [tuple(n) if isinstance(n, (list, tuple)) else int(n) for n in fused["shape"]]
    said = view[dim]
    view[dim] = said if isinstance(said, tuple) else (shape[dim] // said,) * said
    state = {"patterns": list(fused["patterns"]), "shape": tuple(view), "partition_dim": dim}
    return Call(_SUBPARAMS, (), state)
