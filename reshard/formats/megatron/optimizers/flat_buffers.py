"""The flat buffers of the distributed optimizer: which parameters fill them, and their slots.

Source: Megatron-LM core_v0.16.1 ``core/optimizer/distrib_optimizer.py``
(get_parameter_state_dp_zero and load_parameter_state_from_dp_zero_legacy).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from reshard.core.chunks import Chunk
from reshard.core.manifest import Entry
from reshard.errors import MIXED, CorruptError
from reshard.formats.megatron import names
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.directory import OPTIMIZER
from reshard.formats.megatron.optimizers import buckets
from reshard.formats.megatron.optimizers.buckets import Bucket, Param
from reshard.formats.megatron.optimizers.frozen import (
    Ambiguous,
    FlatMasters,
    Sample,
    choose_trained,
)
from reshard.formats.megatron.optimizers.rank_optimizer import (
    MASTERS,
    RankParam,
    divide_params,
    get_kind,
)
from reshard.layouts.model_parallel.rules import Table
from reshard.layouts.partition import Member, build_flat_chunks
from reshard.state_dict.tree import as_global
from reshard.system.files import SourceFiles


@dataclass(slots=True)
class FlatStates:
    """The slots in a rank's flat buffers, and the parameters that have no place there."""

    entries: list[Entry] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)


def group_buffers(params: Sequence[RankParam], args: Arguments) -> list[tuple[int, list[Param]]]:
    """Return the flat buffers of an optimizer in order: (model chunk, parameters of one dtype)."""
    shared = (names.EMBEDDING, *([names.OUTPUT] * args.tied)) if args.shares_embedding else ()
    buffers_of: dict[tuple[int, str], list[Param]] = {}
    for param in params:
        members = buffers_of.setdefault((param.chunk, param.dtype), [])
        members.append(Param(param.fqn, param.shape, alone=param.fqn in shared))
    return [
        # The sort is stable: Megatron makes a chunk's buffers in the order in which their dtypes
        # first occur (``distributed_data_parallel.py``, _allocate_buffers_for_parameters).
        (chunk, members)
        for (chunk, _), members in sorted(buffers_of.items(), key=lambda i: i[0][0])
    ]


def read_flat(
    value: Any,
    count: int,
    params: Sequence[RankParam],
    args: Arguments,
    table: Table,
    path: str,
    *,
    stage: int,
    sample: Sample,
) -> FlatStates:
    """Read the slots in the flat buffers of ``distrib_optim.pt``.

    Args:
        count: number of the rank's optimizers.
        sample: returns some elements of a parameter.

    Raises:
        CorruptError: a buffer is not how Megatron lays out these parameters.
    """
    result = FlatStates()
    contents = value if isinstance(value, list) else [value]
    shares = divide_params(count, params, args, table)
    if len(contents) > len(shares):
        raise CorruptError(
            path,
            f"has flat buffers of {len(contents)} optimizers, but there are {len(shares)}",
            MIXED,
        )
    for content, own in zip(contents, shares, strict=False):
        if isinstance(content, dict):  # else another rank has saved this optimizer's buffers
            _read_buffers(result, content, own, args, path, stage, sample)
    return result


def _read_buffers(
    result: FlatStates,
    content: Mapping[Any, Any],
    params: Sequence[RankParam],
    args: Arguments,
    path: str,
    stage: int,
    sample: Sample,
) -> None:
    buffers = group_buffers(params, args)
    refuse_unfilled_buffers(path, content, len(buffers))
    for number, (chunk, members) in enumerate(buffers):
        states = content.get(number)
        if not isinstance(states, dict) or len(states) != 1:
            raise CorruptError(
                path, f"does not contain flat buffer {number}, which {len(members)} parameters fill"
            )
        (state,) = states.values()
        size = args.get_bucket_size(stage=stage, chunk=chunk)
        stored = {slot: pieces for slot, value in state.items() if (pieces := _list_pieces(value))}
        if not stored:
            continue
        masters = next((stored[slot] for slot in MASTERS if slot in stored), [])
        numel, counted = state.get("numel_unpadded"), sum(c.box.volume for _, c in masters)
        if type(numel) is int and masters and numel != counted:
            raise CorruptError(
                path, f"flat buffer {number} has {counted} elements, but states {numel}", MIXED
            )
        own = leave_out_frozen(members, size, [masters], sample) or members
        result.frozen += [param.fqn for param in members if param not in own]
        for slot, pieces in stored.items():
            numels = [piece.box.volume for _, piece in pieces]
            flat = _place_members(own, numels, size)
            if flat is None:
                raise make_layout_error(path, f"flat buffer {number}", members, sum(numels))
            result.entries += split_flat(slot, flat, pieces)


def _list_pieces(value: Any) -> list[tuple[int, Chunk]]:
    tensors = [as_global(piece) for piece in (value if isinstance(value, list) else [value])]
    chunks = [tensor.chunks[0] for tensor in tensors if tensor is not None]
    starts = accumulate((chunk.box.volume for chunk in chunks), initial=0)
    return list(zip(starts, chunks, strict=False))


def leave_out_frozen(
    members: Sequence[Param],
    size: int | None,
    masters: Sequence[Sequence[tuple[int, Chunk]]],
    sample: Sample,
) -> list[Param] | None:
    """Return the parameters that a buffer holds, if it is too small for all of them.

    Args:
        size: elements that close a bucket; None: one bucket takes all.
        masters: the pieces of the masters in each bucket, with their first elements in it.
        sample: returns some elements of a parameter.

    Returns:
        None if the buffer has room for all of them, or its values fit no parameters.
    """
    ends = [max((start + c.box.volume for start, c in pieces), default=0) for pieces in masters]
    whole = {limit: _count_elements(members, limit) for limit in (size, None)}
    if not sum(ends) or sum(ends) in whole.values():
        return None
    bases = accumulate(ends, initial=0)
    pieces = [
        (base + start, chunk)
        for base, bucket in zip(bases, masters, strict=False)
        for start, chunk in bucket
    ]
    with SourceFiles() as files:
        for limit in (limit for limit, numel in whole.items() if sum(ends) < numel):
            # A buffer takes its parameters from the last to the first.
            backwards, masters_there = members[::-1], FlatMasters(limit, pieces, files)
            with suppress(Ambiguous):
                trained = choose_trained(backwards, masters_there, sample)[::-1]
                if _count_elements(trained, limit) == sum(ends):
                    return trained
    return None


def _count_elements(params: Sequence[Param], size: int | None) -> int:
    """Return the elements of a buffer, with the gaps between parameters that are not aligned."""
    return buckets.concatenate(buckets.make_buckets(params, size))[1]


def refuse_unfilled_buffers(path: str, numbers: Iterable[Any], count: int) -> None:
    """Refuse flat buffers that hold none of a rank's parameters: their states would be dropped.

    Args:
        numbers: the numbers of the stored buffers, and keys that are not numbers.
        count: number of buffers that the parameters fill.

    Raises:
        CorruptError: there is such a buffer.
    """
    further = [number for number in numbers if type(number) is int and number >= count]
    if further:
        raise CorruptError(
            path, f"has flat buffer {min(further)}, which no parameter of the model fills", MIXED
        )


def _place_members(
    members: Sequence[Param], numels: Sequence[int], size: int | None
) -> list[Member] | None:
    # A list of several buckets is from before February 2024. A file does not state where buckets
    # end, so the layout is accepted whose total length is that of the file.
    candidates: list[list[Bucket] | None] = [
        buckets.make_buckets(members, size),
        buckets.make_buckets(members, None),
        buckets.fit_buckets(members, numels),
    ]
    for candidate in candidates:
        if candidate is not None:
            flat, total = buckets.concatenate(candidate)
            if total == sum(numels):
                return flat
    return None


class SmallBufferError(CorruptError):
    """A flat buffer has fewer elements than the parameters, as if some of these were frozen."""


def make_layout_error(path: str, what: str, members: Sequence[Param], numel: int) -> CorruptError:
    """Return the error for flat elements that are not those of the parameters."""
    expected = _count_elements(members, None)
    is_small = numel < expected
    # Frozen parameters have no place in a buffer (``_ParamAndGradBuffer``).
    kind = SmallBufferError if is_small else CorruptError
    alone = (
        f"move {OPTIMIZER} of all ranks away"
        if path.endswith(OPTIMIZER)
        else "save it with --no-save-optim"
    )
    frozen = (
        "; or the run froze parameters that its values do not tell: load it in Megatron and save it"
        f" with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, or {alone} to read"
        " only the weights"
        if is_small
        else ""
    )
    problem = (
        f"{what} is not divided as in Megatron's layout of its {len(members)} parameters"
        if numel == expected
        else f"{what} has {numel} elements, but Megatron's layout of its {len(members)} parameters"
        f" has {expected}"
    )
    return kind(
        path,
        problem,
        "it belongs to another run than the weights, or was written by a Megatron version that"
        " reshard does not support; or args in the checkpoint lack the layers of each stage"
        " (pipeline_model_parallel_layout ...), the size of a bucket (ddp_bucket_size) or the form"
        f" of the experts (moe_grouped_gemm, moe_use_legacy_grouped_gemm){frozen}",
    )


def split_flat(
    slot: str, flat: Sequence[Member], pieces: Sequence[tuple[int, Chunk]]
) -> Iterator[Entry]:
    """Yield a slot of each member of a flat tensor, given pieces with their first elements."""
    chunks = build_flat_chunks(flat, pieces)
    for member in flat:
        dtype = pieces[0][1].dtype
        yield Entry(member.fqn, get_kind(slot), dtype, member.shape, tuple(chunks[member.fqn]))
