"""How the tensor-parallel ranks of a DeepSpeed checkpoint share its parameters.

``universal_checkpoint_info`` says it in regular expressions (DeepSpeed 0.19.8
``checkpoint/ds_to_universal.py``, ``merge_tp_slices``: ``re.match``, dots not escaped, no end);
what none of them finds is cut along dim 0 there. Where the names are Megatron's the table knows
better: Megatron-DeepSpeed names ``tied_modules.embed.position_embeddings.weight`` also where the
embedding is not tied, and the parameter is called ``1.position_embeddings.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from math import gcd
from pathlib import Path
from typing import Any

from reshard import counts
from reshard.box import Index
from reshard.errors import CorruptError, UnsafeError, UnsupportedError
from reshard.formats.deepspeed import affine, dialects, neox
from reshard.formats.deepspeed.layers import TIED
from reshard.model_parallel.rules import Table, builtin, with_users
from reshard.model_parallel.shards import REPLICATED, Split

_REPLICATED = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
_VOCABULARY = "vocabulary_parameter_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_GATED = "parameter_with_2_sub_params_cat_dim_0"
_SUB = "parameter_with_sub_params"
_STAGES = "pipeline_replicated_parameter_patterns"
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEATS = re.compile(r"[*+{]")
_MOST_REPEATS = 3
_LONGEST = 512  # letters of a name
_MLP = (
    ("mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight"),
    ("mlp.linear1.weight", "mlp.linear2.weight"),
)


class Cuts:
    """The cut of every parameter of one checkpoint.

    ``are_known`` is whether anything says how parameters are cut.

    Args:
        where: the checkpoint, for messages.
        info: its ``universal_checkpoint_info``; empty where it has none.
        shapes: of the parameters as the first tensor-parallel rank holds them.
        ranks: how many there are; a single one has everything whole.
        buffers: names that are no parameters: every rank has the whole.
        rules: a user's table; its lines count where the checkpoint says nothing.
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
    ) -> None:
        self._where = where
        self._ranks = ranks
        self._info = info
        self._names = tuple(shapes)
        self._buffers = frozenset(buffers)
        self._dialect, blocks = dialects.of_names(shapes)
        self.notes: dict[str, None] = {}
        self._rules = rules
        self._constants = {"layers": blocks}
        self._gated = _is_gated(shapes)
        self.are_known = bool(info) or self._dialect is not None or rules is not None
        if ranks > 1 or rules is not None:
            _ = self._table  # what is wrong with it, or to be noted, is said at once

    @cached_property
    def _table(self) -> Table:
        """The lines of all tables; a checkpoint without ranks to join is spared reading them."""
        megatron = builtin(self._table_name(self._ranks))
        none = Table(f"{megatron.source}, whose names are others", ())
        return with_users(megatron if self._dialect else none, self._rules)

    def _table_name(self, ranks: int) -> str:
        """Of the built-in table; which of them GPT-NeoX's settings say."""
        if self._dialect != dialects.NEOX or ranks == 1:
            return "megatron"
        said = neox.settings(self._where)
        if said is None:
            self.notes[
                "nothing says whether GPT-NeoX ran with gpt_j_residual, where row-parallel layers"
                " have biases that add up: they are taken for copies (copy its configs/"
                " beside the states, or say summed with --rules)"
            ] = None
            return "megatron"
        return "neox_parallel" if neox.has_summed_biases(said) else "megatron"

    def split(self, fqn: str, shape: Index) -> Split:
        """How tensor-parallel ranks share one parameter.

        Raises:
            UsageError: nothing says it.
            UnsupportedError: the checkpoint says that it cannot be told.
            CorruptError, UnsafeError: a pattern of the checkpoint is none, or takes for ever to
                search for.
        """
        if self._ranks == 1 or fqn in self._buffers or not shape:
            return REPLICATED
        said = self._said(fqn, shape)
        known = self._known(fqn)
        if said is not None:
            return said
        if self._info and known is None:
            self._refuse_unused(fqn)
            return Split(0)
        if known is None:
            found = self._table.need(fqn, self._constants, self._dialect)
            return found.rule.split(gated=self._gated)
        if self._info and known not in (Split(0), Split(0, padded=True)):
            self.notes[
                f"no pattern of universal_checkpoint_info finds {fqn!r}: ds_to_universal would join"
                " it along dim 0; here it is "
                + ("whole on every rank" if known.dim is None else f"cut along dim {known.dim}")
            ] = None
        return known

    def _refuse_unused(self, fqn: str) -> None:
        """A pattern that finds nothing may have been meant for what none finds.

        Raises:
            UnsupportedError: there is one, as ds_to_universal asserts as well.
        """
        for key in (*_REPLICATED, _GATED, _ROW, _VOCABULARY):
            for text in self._info.get(key) or ():
                if not any(_finds(text, name) for name in self._names):
                    raise UnsupportedError(
                        self._where,
                        f"has {text!r} among its {key}, which finds no parameter, and nothing that"
                        f" finds {fqn!r}: it does not say how that is cut",
                        f"say it in a file: --rules FILE, with a line for {fqn}",
                    )

    def fused(self, fqn: str) -> Mapping[str, Any] | None:
        """What the checkpoint says of a parameter that is several in one.

        Raises:
            CorruptError, UnsafeError: as `split`.
        """
        for said in self._info.get(_SUB) or ():
            if any(_finds(text, fqn) for text in said["patterns"]):
                return dict(said)
        return None

    def is_first_stages(self, fqn: str) -> bool:
        """Whether several stages have a parameter and only the first one's is used.

        A tied embedding is a whole module on the last stage as well, of which the output layer
        uses the vocabulary alone; the rest there has its first values.

        Raises:
            CorruptError, UnsafeError: as `split`.
        """
        if not (self._found(_STAGES, fqn) or (fqn.startswith(TIED) and self._known(fqn))):
            return False
        known = self._known(fqn)
        return not self._found(_VOCABULARY, fqn) and not (known and known.padded)

    def _known(self, fqn: str) -> Split | None:
        """What the tables say."""
        found = self._table.find(fqn, self._constants, self._dialect)
        return found.rule.split(gated=self._gated) if found else None

    def _found(self, key: str, fqn: str) -> bool:
        patterns = self._info.get(key) or ()
        return any(_finds(text, fqn) for text in patterns)

    def _said(self, fqn: str, shape: Index) -> Split | None:
        for text, why in (self._info.get("autotp_unsupported_parameter_patterns") or {}).items():
            if _finds(text, fqn):
                raise UnsupportedError(self._where, f"says that {fqn!r} cannot be told: {why}")
        if any(self._found(key, fqn) for key in _REPLICATED):
            return REPLICATED
        if self._found(_GATED, fqn):
            return Split(0, (1, 1))
        fused = self.fused(fqn)
        if fused is not None:
            text = next(text for text in fused["patterns"] if _finds(text, fqn))
            return self._fused(fqn, shape, fused, text)
        mapped = self._map(fqn)
        if mapped is not None:
            return replace(mapped, padded=self._found(_VOCABULARY, fqn))
        if self._found(_ROW, fqn):
            return Split(1)
        return Split(0, padded=True) if self._found(_VOCABULARY, fqn) else None

    def _map(self, fqn: str) -> Split | None:
        """What AutoTP's affine map says: of so many ranks the widths, else the dim alone.

        Raises:
            UnsupportedError: ranks hold other than one block each.
        """
        maps = (self._info.get("affine_map") or {}).get("params") or {}
        found = next((value for text, value in maps.items() if _finds(text, fqn)), None)
        if found is None:
            return None
        split = affine.split(found)
        if split is None:
            raise UnsupportedError(
                self._where,
                f"has {fqn!r} in pieces that lie apart (affine_map), which is not read yet",
                "give reshard what DeepSpeed's ds_to_universal makes of it",
            )
        return split

    def _fused(self, fqn: str, shape: Index, fused: Mapping[str, Any], text: str) -> Split:
        """Several parameters in one, each cut by itself."""
        dim, view = int(fused["partition_dim"]), list(fused["shape"])
        if dim >= len(view) or (dim and len(view) != len(shape)):
            raise UnsupportedError(
                self._where, f"cuts {fqn!r} of {shape} along dim {dim} of a view {view}"
            )
        said = view[dim]
        if not isinstance(said, (list, tuple)):
            said = [1] * counts.count(self._where, f"the number of parts of {fqn!r}", said)
        sizes = [counts.count(self._where, f"a part of {fqn!r}", size) for size in said]
        unit = gcd(*sizes)
        if not sizes:
            raise CorruptError(self._where, f"cuts {fqn!r} into no parts")
        widths = (self._info.get("sub_param_shard_widths") or {}).get(text) or ()
        return Split(
            dim,
            tuple(size // unit for size in sizes),
            widths=tuple(tuple(int(width) for width in each) for each in widths),
        )


@cache
def _compiled(text: str) -> re.Pattern[str]:
    """A file's regular expression, if it is one that ends: DeepSpeed's are names with numbers.

    Raises:
        UnsafeError: what is repeated repeats something itself, so that a search can take for ever.
    """
    if _REPEATED_GROUP.search(text) or len(_REPEATS.findall(text)) > _MOST_REPEATS:
        raise UnsafeError(
            f"universal_checkpoint_info's pattern {text!r}",
            "repeats what it repeats: a search for it may take for ever",
            "the checkpoint was tampered with; if it was not, say how parameters are cut in a file:"
            " --rules FILE",
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError) as error:
        raise CorruptError("universal_checkpoint_info", f"holds {text!r}: {error}") from error


def _finds(text: str, fqn: str) -> bool:
    return len(fqn) <= _LONGEST and _compiled(text).match(fqn) is not None


def _is_gated(shapes: Mapping[str, Index]) -> bool:
    """Whether the first linear layer makes two values for each that the second takes."""
    for first, second in _MLP:
        for name, shape in shapes.items():
            other = shapes.get(name.removesuffix(first) + second) if name.endswith(first) else None
            if other:
                return shape[0] == 2 * other[1]
    return False
