"""Fused tensors and their parts as runs of rows: one list serves both directions.

One side's tensor consists of the other side's *parts*, *fused* along dim 0:

    plain        one part, unchanged
    gate_up      [gate; up] of a gated linear unit
    gate_up_rows [gate; up], from one part whose rows are of gate and up in turn (GPT-OSS)
    qkv          Megatron's attention: for every group of heads its queries, its key, its value
    qkvg         like qkv, with a gate behind each group's queries; the first part has, for every
                 head, its queries and its gate (Qwen3-Next)
    delta        gated delta nets: [query; key; value; z; beta; alpha]; the two parts have, for each
                 key head, [query; key; value; z] and [beta; alpha] (Qwen3-Next)
    delta_parts  the same, of four parts: query, key and value; z; beta; alpha (Qwen3.5)
    qkv_rows     all queries, all keys, all values
    qkv_stacked  like qkv, with one part that has all queries, all keys, all values (GPT-2, Phi-3)
    rope         rows of a head in pairs (Meta), and in halves (Hugging Face)

Sources: Megatron-LM core_v0.16.1 ``core/transformer/attention.py`` (``linear_qkv``) and ``mlp.py``
(gated linear units); transformers 5 ``models/llama/convert_llama_weights_to_hf.py`` (``permute``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

from reshard.core.box import Index
from reshard.errors import CorruptError, UsageError
from reshard.layouts.model_parallel.architecture import Architecture
from reshard.layouts.model_parallel.moves import Move, make_row_moves

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class RowRun:
    """``count`` neighbouring rows of a part, which are ``step`` rows apart in the fused tensor."""

    part: int
    row: int
    fused: int
    count: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class FusedForm:
    """A fused tensor: the number of rows of each part, and where each run of rows goes."""

    parts: tuple[int, ...]
    runs: tuple[RowRun, ...]

    def cut(self, shape: Index) -> Iterator[tuple[Index, tuple[Move, ...]]]:
        """Yield the shape of each part, and the moves that cut the part from the fused tensor."""
        for part, rows in enumerate(self.parts):
            moves = (
                move
                for run in self.runs
                if run.part == part
                for move in make_row_moves(shape, [(run.fused, run.row, run.count)], run.step)
            )
            yield (rows, *shape[1:]), tuple(moves)

    def fuse(self, tail: Index) -> Iterator[tuple[Move, ...]]:
        """Yield, for each part, the moves that put it into the fused tensor."""
        for part, rows in enumerate(self.parts):
            shape = (rows, *tail)
            yield tuple(
                move
                for row, fused, count, step in _reverse_runs(r for r in self.runs if r.part == part)
                for move in make_row_moves(shape, [(row, fused, count)], step)
            )


def _reverse_runs(runs: Iterable[RowRun]) -> Iterator[tuple[int, int, int, int]]:
    # Runs of neighbouring fused rows stay as they are. The rows of all other runs are joined anew,
    # as a move needs neighbours in its target: rows that are neighbours in the fused tensor, as
    # long as they are equally far apart in the part.
    apart: list[tuple[int, int]] = []
    for run in runs:
        if run.step == 1:
            yield run.row, run.fused, run.count, 1
        else:
            apart += ((run.fused + k * run.step, run.row + k) for k in range(run.count))
    apart.sort()
    at = 0
    while at < len(apart):
        fused, row = apart[at]
        step = apart[at + 1][1] - row if at + 1 < len(apart) else 0
        count = 1
        while step > 0 and apart[at + count : at + count + 1] == [
            (fused + count, row + count * step)
        ]:
            count += 1
        yield row, fused, count, step if count > 1 else 1
        at += count


@lru_cache(maxsize=256)  # the layers of a model repeat a few shapes
def make_form(name: str, rows: int, model: Architecture) -> FusedForm:
    """Return the form of a fused tensor of ``rows`` rows."""
    return _FORMS[name](rows, model)


def make_form_of_parts(name: str, parts: Sequence[int], model: Architecture) -> FusedForm:
    """Return the form of a tensor that is fused from parts with these numbers of rows.

    Raises:
        CorruptError: the form's parts have other numbers of rows.
    """
    form = make_form(name, sum(parts), model)
    if form.parts != tuple(parts):
        raise CorruptError(
            model.source,
            f"requires parts of {list(form.parts)} rows, but its parts have {list(parts)}",
        )
    return form


def _make_plain(rows: int, _model: Architecture) -> FusedForm:
    return _stack(rows)


def _stack(*parts: int) -> FusedForm:
    """Return the form of a tensor whose parts lie one after the other."""
    starts = (0, *accumulate(parts[:-1]))
    return FusedForm(parts, tuple(RowRun(n, 0, at, parts[n]) for n, at in enumerate(starts)))


def _make_gate_up(rows: int, model: Architecture) -> FusedForm:
    if rows % 2:
        raise UsageError(
            model.source, f"{rows} rows cannot be split evenly into a gate and an up projection"
        )
    return _stack(rows // 2, rows // 2)


def _make_gate_up_rows(rows: int, model: Architecture) -> FusedForm:
    half = _make_gate_up(rows, model).parts[0]
    # Two neighbouring rows of the part, gate and up, are half the tensor apart.
    return FusedForm((rows,), tuple(RowRun(0, 2 * row, row, 2, half) for row in range(half)))


def _make_qkv(rows: int, model: Architecture, *, gated: bool = False) -> FusedForm:
    heads, groups = model.require("heads"), model.require("groups")
    wide = 1 + gated  # rows of a head in the first part, in heads: its queries, and its gate
    size = model.head_dim or rows // (wide * heads + 2 * groups)
    if heads % groups or rows != (wide * heads + 2 * groups) * size:
        raise UsageError(
            model.source,
            f"states {heads} heads and {groups} key-value heads of {size} rows, but the fused"
            f" query, {'gate, ' * gated}key and value have {rows} rows",
            "pass the config of this model: --model config.json|DIR",
        )
    per = heads // groups
    together = 1 if gated else per  # heads whose rows are neighbours on both sides
    runs = []
    for group in range(groups):
        at = group * (wide * per + 2) * size
        runs += [
            RowRun(
                0,
                (wide * (group * per + head) + half) * size,
                at + (half * per + head) * size,
                together * size,
            )
            for head in range(0, per, together)
            for half in range(wide)
        ]
        at += wide * per * size
        runs += [RowRun(1, group * size, at, size), RowRun(2, group * size, at + size, size)]
    return FusedForm((wide * heads * size, groups * size, groups * size), tuple(runs))


def _make_delta(rows: int, model: Architecture) -> FusedForm:
    # Sources: Megatron-LM core_v0.16.1 ``core/ssm/gated_delta_net.py`` (forward); transformers 5.23
    # ``models/qwen3_next/modeling_qwen3_next.py`` (fix_query_key_value_ordering).
    keys, values, key, value = _get_delta_sizes(rows, model)
    per = values // keys
    wide = (key, key, per * value, per * value)  # rows of a key head in the first part
    runs = []
    for head in range(keys):
        for part, widths in enumerate((wide, (per, per))):
            at = part * keys * sum(wide)
            row = head * sum(widths)
            for width in widths:
                runs.append(RowRun(part, row, at + head * width, width))
                row, at = row + width, at + keys * width
    return FusedForm((keys * sum(wide), keys * 2 * per), tuple(runs))


def _make_delta_parts(rows: int, model: Architecture) -> FusedForm:
    """Return the form of `_make_delta` whose parts lie one after the other."""
    keys, values, key, value = _get_delta_sizes(rows, model)
    return _stack(2 * keys * key + values * value, values * value, values, values)


def _get_delta_sizes(rows: int, model: Architecture) -> tuple[int, ...]:
    keys, values, key, value = model.delta if len(model.delta) == 4 else (0, 0, 0, 0)
    if not keys or values % keys or rows != 2 * (keys * key + values * value + values):
        raise UsageError(
            model.source,
            f"states gated delta nets of {keys} key heads of {key} and {values} value heads of"
            f" {value} rows, but the fused projection has {rows} rows",
            "pass the config of this model: --model config.json|DIR",
        )
    return model.delta


def _make_qkv_rows(rows: int, model: Architecture) -> FusedForm:
    return _stack(*_make_qkv(rows, model).parts)


def _make_qkv_stacked(rows: int, model: Architecture) -> FusedForm:
    """Return the form of `_make_qkv` whose one part is all queries, all keys, all values."""
    apart = _make_qkv(rows, model)
    starts = (0, apart.parts[0], apart.parts[0] + apart.parts[1])
    runs = tuple(RowRun(0, starts[r.part] + r.row, r.fused, r.count) for r in apart.runs)
    return FusedForm((rows,), runs)


def _make_rope(rows: int, model: Architecture) -> FusedForm:
    """Return the form that turns pairs of rows of a head into halves."""
    size = model.require("head_dim")
    if rows % size or size % 2:
        raise UsageError(model.source, f"{rows} rows cannot be split into heads of {size}")
    half = size // 2
    # Each half of Hugging Face's rows takes every other row of Meta's.
    runs = (
        RowRun(0, head * size + odd * half, head * size + odd, half, 2)
        for head in range(rows // size)
        for odd in range(2)
    )
    return FusedForm((rows,), tuple(runs))


_FORMS: Mapping[str, Callable[[int, Architecture], FusedForm]] = {
    PLAIN: _make_plain,
    "gate_up": _make_gate_up,
    "gate_up_rows": _make_gate_up_rows,
    "qkv": _make_qkv,
    "qkvg": partial(_make_qkv, gated=True),
    "delta": _make_delta,
    "delta_parts": _make_delta_parts,
    "qkv_rows": _make_qkv_rows,
    "qkv_stacked": _make_qkv_stacked,
    "rope": _make_rope,
}
NAMES = tuple(_FORMS)
PARTS: Mapping[str, int] = {  # any other form has one part
    "gate_up": 2,
    "qkv": 3,
    "qkvg": 3,
    "qkv_rows": 3,
    "delta": 2,
    "delta_parts": 4,
}
