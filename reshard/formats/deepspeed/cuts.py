"""Find how the tensor-parallel ranks of a DeepSpeed checkpoint share its parameters.

``universal_checkpoint_info`` describes it with regular expressions (DeepSpeed 0.19.8
``checkpoint/ds_to_universal.py``, ``merge_tp_slices``: ``re.match``, dots not escaped, no end);
what none of them matches is cut along dim 0 there. If the names are Megatron's, the table is more
exact: Megatron-DeepSpeed lists ``tied_modules.embed.position_embeddings.weight`` even if the
embedding is not tied and the parameter's name is ``1.position_embeddings.weight``.

AutoTP writes affine maps: the position of each rank's blocks in the whole tensor, with offsets and
strides as in ``torch.as_strided``, in elements (DeepSpeed 0.19.8 ``checkpoint/affine.py``,
``ParamAffineMap.to_dict``; ``module_inject/layers.py``,
``collect_autotp_universal_checkpoint_info``).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate
from math import gcd
from pathlib import Path
from typing import Any

from reshard.core import counts
from reshard.core.box import Index, row_major
from reshard.errors import CorruptError, UnsafeError, UnsupportedError
from reshard.formats.deepspeed import dialects, neox
from reshard.formats.deepspeed.layers import TIED
from reshard.layouts.model_parallel.rules import Table, add_user_rules, load_table
from reshard.layouts.model_parallel.shards import REPLICATED, Split

TENSOR_PARALLEL_INFO = "universal_checkpoint_info"  # key of the model states
_AUTOTP = "autotp"
_EXPERTS = ".deepspeed_moe."
_REPLICATED = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
_VOCABULARY = "vocabulary_parameter_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_GATED = "parameter_with_2_sub_params_cat_dim_0"
_SUB = "parameter_with_sub_params"
_STAGES = "pipeline_replicated_parameter_patterns"
# A checkpoint brings its own regular expressions. With a group that repeats, backtracking may take
# time exponential in the length of the name; otherwise polynomial time, whose degree is the number
# of repetitions.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEATS = re.compile(r"[*+{]")
_MOST_REPEATS = 3
_LONGEST = 512  # characters of a name
_NORM = re.compile(r"(?:norm|_ln)\w*\.weight$|\.ln_\w+\.weight$")
_MLP = (
    ("mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight"),
    ("mlp.linear1.weight", "mlp.linear2.weight"),
)


class Cuts:
    """How each parameter of a checkpoint is cut.

    ``notes`` are the decisions that a user should see, in order (a dict without values).

    Args:
        info: its ``universal_checkpoint_info``; empty if it has none.
        shapes: shapes of the parameters on the first tensor-parallel rank.
        ranks: number of tensor-parallel ranks; a single rank has every tensor whole.
        buffers: names of buffers, which every rank has whole.
        rules: a user's table, which applies where the checkpoint describes nothing.
        may_be_autotp: whether AutoTP before 0.19 may have cut a model that nothing describes.
    """

    def __init__(
        self,
        where: str,
        info: Mapping[str, Any],
        shapes: Mapping[str, Index],
        *,
        ranks: int,
        buffers: Iterable[str] = (),
        rules: Path | None = None,
        may_be_autotp: bool = True,
    ) -> None:
        self._where = where
        self._may_be_autotp = may_be_autotp
        self._ranks = ranks
        self._info = info
        self._shapes = shapes
        self._buffers = frozenset(buffers)
        self._dialect, blocks = dialects.detect_dialect(shapes)
        self.notes: dict[str, None] = {}
        self._rules = rules
        self._constants = {"layers": blocks}
        self._gated = _is_gated(shapes)
        if ranks > 1 or rules is not None:
            _ = self._table  # report errors and notes of the table now

    @property
    def are_known(self) -> bool:
        """Whether the checkpoint, a built-in table or the user describes the cuts at all."""
        return bool(self._info or self._dialect or self._rules or self._has_names_of_autotp)

    @cached_property
    def _has_names_of_autotp(self) -> bool:
        if self._info or self._dialect or not self._may_be_autotp:
            return False
        table = load_table(_AUTOTP)
        return all(table.find(name, {}) for name in self._shapes)

    @cached_property
    def _lists_rows_alone(self) -> bool:
        """Whether the metadata lists only layers that ranks cut by rows, and so no norms.

        Source: DeepSpeed 0.18.9 ``module_inject/layers.py``
        (``collect_autotp_universal_checkpoint_info``), where ``ds_to_universal`` joins norms too.
        """
        norms = [name for name in self._shapes if _NORM.search(name)]
        return any(self._find_declared(name, self._shapes[name]) is None for name in norms)

    @cached_property
    def _layers_of_experts(self) -> dict[str, bool]:
        """The layers -> whether the metadata describe a parameter that is in them."""
        layers = {name.partition(_EXPERTS)[0]: False for name in self._shapes if _EXPERTS in name}
        for name, shape in self._shapes.items() if layers else ():
            layer = _find_layer(name, layers)
            if layer is not None and self._find_declared(name, shape) is not None:
                layers[layer] = True
        return layers

    @cached_property
    def _table(self) -> Table:
        """The rules of all tables; not read for a checkpoint without ranks to join."""
        table = load_table(self._table_name(self._ranks))
        if not self._dialect and not self._has_names_of_autotp:
            table = Table(f"{table.source}, nor of {_AUTOTP!r}: both have other names", ())
        if self._has_names_of_autotp and self._rules is None:
            self.notes[
                "no file states how tensor-parallel ranks share the parameters: reshard takes them"
                " for those of DeepSpeed's AutoTP before 0.19, which has the embedding and the head"
                " whole on every rank"
            ] = None
        return add_user_rules(table, self._rules)

    def _table_name(self, ranks: int) -> str:
        if self._has_names_of_autotp:
            return _AUTOTP
        if self._dialect != dialects.NEOX or ranks == 1:
            return "megatron"
        name, notes = neox.choose_table(self._where)
        self.notes |= dict.fromkeys(notes)
        return name

    def find_split(self, fqn: str, shape: Index) -> Split:
        """Return how tensor-parallel ranks share one parameter."""
        if self._ranks == 1 or fqn in self._buffers or not shape:
            return REPLICATED
        declared = self._find_declared(fqn, shape)
        if declared is not None:
            return declared
        known = self._find_in_tables(fqn)
        if self._info and known is None:
            if self._is_whole_beside_experts(fqn):
                return REPLICATED
            self._refuse_unused(fqn)
            # ds_to_universal joins what no pattern matches.
            return self._find_in_autotp(fqn) if self._lists_rows_alone else Split(0)
        if known is None:
            match = self._table.require(fqn, self._constants, self._dialect)
            return match.rule.split(gated=self._gated)
        if self._info and known not in (Split(0), Split(0, padded=True)):
            self.notes[
                f"no pattern of universal_checkpoint_info matches {fqn!r}: ds_to_universal would"
                " join it along dim 0; reshard reads it as "
                + ("whole on every rank" if known.dim is None else f"cut along dim {known.dim}")
                + (f" in {len(known.parts)} parts" if len(known.parts) > 1 else "")
            ] = None
        return known

    def _find_in_autotp(self, fqn: str) -> Split:
        match = load_table(_AUTOTP).find(fqn, {})
        if match is None:
            raise self._build_error(
                fqn,
                "lists only layers that ranks cut by rows, as AutoTP before DeepSpeed 0.19 does:"
                f" how {fqn!r} is cut is not known",
            )
        self.notes[
            "universal_checkpoint_info lists only layers that ranks cut by rows, as DeepSpeed's"
            " AutoTP before 0.19 does: names show how the other parameters are cut"
        ] = None
        return match.rule.split(gated=False)

    def _is_whole_beside_experts(self, fqn: str) -> bool:
        """Return whether a parameter is the gate, or the residual's coefficient, of an MoE layer.

        Megatron-DeepSpeed's patterns name no parameter of such a layer. Every rank has these two
        whole (DeepSpeed 0.19.8 ``moe/layer.py``).

        Raises:
            UnsupportedError: it is another one, in a layer of which the metadata describe nothing.
        """
        layer = _find_layer(fqn, self._layers_of_experts)
        if layer is None:
            return False
        if fqn.removeprefix(f"{layer}.").startswith(("deepspeed_moe.gate.", "coefficient.")):
            return True
        if self._layers_of_experts[layer]:
            return False
        raise self._build_error(
            fqn,
            f"has no pattern for {fqn!r}, which is in a layer of experts: how it is cut is not"
            " known",
        )

    def _refuse_unused(self, fqn: str) -> None:
        """Refuse to guess if a pattern matches nothing: it may have been meant for ``fqn``."""
        for key in (*_REPLICATED, _GATED, _ROW, _VOCABULARY):
            for text in self._info.get(key) or ():
                if not any(_matches(text, name) for name in self._shapes):
                    raise self._build_error(
                        fqn,
                        f"has {text!r} in its {key}, which matches no parameter, and no pattern"
                        f" that matches {fqn!r}: how {fqn!r} is cut is not known",
                    )

    def _build_error(self, fqn: str, found: str) -> UnsupportedError:
        advice = f"state it in a file: --rules FILE, with a line for {fqn}"
        return UnsupportedError(self._where, found, advice)

    def find_fused(self, fqn: str) -> Mapping[str, Any] | None:
        """Return how the checkpoint describes a parameter that fuses several, if it does."""
        for fused in self._info.get(_SUB) or ():
            if any(_matches(text, fqn) for text in fused["patterns"]):
                return dict(fused)
        return None

    def is_from_first_stage(self, fqn: str) -> bool:
        """Return whether several stages have a parameter and only the first stage's is used.

        A tied embedding is a whole module on the last stage as well. The output layer uses only its
        vocabulary; the rest keeps its initial values there.
        """
        known = self._find_in_tables(fqn)
        if not (self._is_listed(_STAGES, fqn) or (fqn.startswith(TIED) and known)):
            return False
        return not self._is_listed(_VOCABULARY, fqn) and not (known and known.padded)

    def _find_in_tables(self, fqn: str) -> Split | None:
        match = self._table.find(fqn, self._constants, self._dialect)
        return match.rule.split(gated=self._gated) if match else None

    def _is_listed(self, key: str, fqn: str) -> bool:
        return any(_matches(text, fqn) for text in self._info.get(key) or ())

    def _find_declared(self, fqn: str, shape: Index) -> Split | None:
        for text, why in (self._info.get("autotp_unsupported_parameter_patterns") or {}).items():
            if _matches(text, fqn):
                raise UnsupportedError(self._where, f"the cut of {fqn!r} is not known: {why}")
        if any(self._is_listed(key, fqn) for key in _REPLICATED):
            return REPLICATED
        if self._is_listed(_GATED, fqn):
            return Split(0, (1, 1))
        fused = self.find_fused(fqn)
        if fused is not None:
            text = next(text for text in fused["patterns"] if _matches(text, fqn))
            return self._split_fused(fqn, shape, fused, text)
        mapped = self._read_affine_map(fqn)
        is_vocabulary = self._is_listed(_VOCABULARY, fqn)
        if mapped is not None:
            return replace(mapped, padded=is_vocabulary)
        if self._is_listed(_ROW, fqn):
            return Split(1)
        return Split(0, padded=True) if is_vocabulary else None

    def describes(self, fqn: str, shape: Index) -> bool:
        """Return whether the checkpoint itself describes how a parameter is cut."""
        return self._find_declared(fqn, shape) is not None

    def maps_whole(self, fqn: str, shape: Index) -> bool:
        """Return whether an affine map, by which converters join, has this whole shape."""
        affine_map = self._find_affine_map(fqn)
        return affine_map is not None and tuple(affine_map["logical_shape"]) == shape

    def _find_affine_map(self, fqn: str) -> Mapping[str, Any] | None:
        maps = (self._info.get("affine_map") or {}).get("params") or {}
        return next((value for text, value in maps.items() if _matches(text, fqn)), None)

    def _read_affine_map(self, fqn: str) -> Split | None:
        affine_map = self._find_affine_map(fqn)
        if affine_map is None:
            return None
        split = find_affine_split(affine_map)
        if split is None:
            raise UnsupportedError(
                self._where,
                f"stores {fqn!r} in pieces that are not adjacent (affine_map), which reshard does"
                " not read yet",
                "convert the run with DeepSpeed's ds_to_universal, and pass reshard the result",
            )
        return split

    def _split_fused(self, fqn: str, shape: Index, fused: Mapping[str, Any], text: str) -> Split:
        dim, view = int(fused["partition_dim"]), list(fused["shape"])
        # A view may split dim 0 of the tensor. Its other dims are those of the tensor.
        if dim >= len(view) or (dim and len(view) != len(shape)):
            raise UnsupportedError(
                self._where,
                f"cuts {fqn!r} of shape {shape} along dim {dim} of a view {view}, which is"
                " impossible",
            )
        parts = view[dim]
        if not isinstance(parts, (list, tuple)):
            parts = [1] * counts.check_count(self._where, f"the number of parts of {fqn!r}", parts)
        sizes = [counts.check_count(self._where, f"a part of {fqn!r}", size) for size in parts]
        if not sizes:
            raise CorruptError(self._where, f"cuts {fqn!r} into zero parts")
        unit = gcd(*sizes)  # a Split has the ratios of the parts, so it fits any number of ranks
        widths = (self._info.get("sub_param_shard_widths") or {}).get(text) or ()
        return Split(
            dim,
            tuple(size // unit for size in sizes),
            widths=tuple(tuple(int(width) for width in shares) for shares in widths),
        )


@cache
def _compile(text: str) -> re.Pattern[str]:
    if _REPEATED_GROUP.search(text) or len(_REPEATS.findall(text)) > _MOST_REPEATS:
        raise UnsafeError(
            f"universal_checkpoint_info's pattern {text!r}",
            "has nested or too many repetitions, so a search for it may never end",
            "the checkpoint may have been tampered with; if it was not, write simpler patterns into"
            " the model states",
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError) as error:
        raise CorruptError(
            "universal_checkpoint_info", f"contains the pattern {text!r}: {error}"
        ) from error


def _matches(text: str, fqn: str) -> bool:
    if (
        len(fqn) > _LONGEST
    ):  # a pattern that is not searched could be the one that describes the cut
        raise UnsafeError(
            "universal_checkpoint_info",
            f"has patterns, and a search in a name of {len(fqn)} characters may never end",
        )
    return _compile(text).match(fqn) is not None


def _is_gated(shapes: Mapping[str, Index]) -> bool:
    """Return whether the first linear layer has two outputs for each input of the second."""
    for first, second in _MLP:
        for name, shape in shapes.items():
            other = shapes.get(name.removesuffix(first) + second) if name.endswith(first) else None
            if other and len(shape) == len(other) == 2:
                return shape[0] == 2 * other[1]
    return False


def find_affine_split(affine_map: Mapping[str, Any]) -> Split | None:
    """Return the cut of a tensor of which each rank holds one block; None if a rank does not."""
    shape = tuple(int(n) for n in affine_map["logical_shape"])
    ranks = [affine_map["ranks"][rank] for rank in sorted(affine_map["ranks"], key=int)]
    shards = [tuple(int(n) for n in rank["shard_shape"]) for rank in ranks]
    strides = row_major(shape, 1)
    if any(len(local) != len(shape) for local in shards):
        return None
    if all(local == shape for local in shards):
        whole = all(_is_block(rank, shape, 0, strides) for rank in ranks)
        return REPLICATED if whole else None
    for dim in range(len(shape)):
        widths = [local[dim] for local in shards]
        starts = [0, *accumulate(widths)]
        if starts[-1] == shape[dim] and all(
            _is_block(rank, local, start * strides[dim], strides)
            for rank, local, start in zip(ranks, shards, starts, strict=False)
        ):
            return Split(dim, widths=(tuple(widths),))
    return None


def _is_block(rank: Mapping[str, Any], local: Index, offset: int, strides: Index) -> bool:
    """Return whether a rank holds one unscaled block, which begins at ``offset`` of the whole."""
    pieces = [piece for piece in rank["pieces"] if 0 not in piece["shape"]]
    if 0 in local:
        return not pieces
    return len(pieces) == 1 and (
        tuple(pieces[0]["shape"]) == local
        and _read_view(pieces[0]["source"]) == (offset, strides)
        and _read_view(pieces[0]["dest"]) == (0, row_major(local, 1))
        and pieces[0].get("scale", 1.0) == 1.0
    )


def _read_view(stored: Any) -> tuple[int, Index]:
    return int(stored[0]), tuple(int(stride) for stride in stored[1])


def _find_layer(fqn: str, layers: Container[str]) -> str | None:
    ends = (match.start() for match in re.finditer(r"\.", fqn))
    return next((fqn[:end] for end in ends if fqn[:end] in layers), None)
