"""Tensors without values that record how they are made of other tensors.

The conversion code of transformers runs on them as on any tensor; afterwards each result states
which blocks of which parameters it consists of. An operation that is not a movement of elements is
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.core.box import Box, Index
from reshard.core.views import Permute, Put, Reshape, Take, View, append_view
from reshard.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a tensor: the tensor that it comes from, and the views that lead here."""

    fqn: str
    views: tuple[View, ...] = ()


@dataclass(frozen=True, slots=True)
class Zeros:
    """A part of a tensor of zeros: the shape of that tensor, and the views that lead here."""

    shape: Index
    views: tuple[View, ...] = ()


Part = TypeVar("Part", TensorPart, Zeros)


def _view_parts(parts: Iterable[Part], view: View) -> Iterator[Part]:
    """Yield parts under one more view, without those of which nothing remains."""
    for part in parts:
        views = append_view(part.views, view)
        if views is not None:
            yield replace(part, views=views)


@dataclass(frozen=True, slots=True)
class Traced:
    """A tensor as pieces of other tensors.

    Args:
        zeros: the rest, which is zero: padding, for example of a vocabulary.
    """

    shape: Index
    pieces: tuple[TensorPart, ...]
    zeros: tuple[Zeros, ...] = ()

    def view(self, view: View, shape: Sequence[int]) -> Traced:
        """Return the tensor under a view of the given shape."""
        pieces, zeros = _view_parts(self.pieces, view), _view_parts(self.zeros, view)
        return Traced(tuple(shape), tuple(pieces), tuple(zeros))

    def reshape(self, shape: Sequence[int]) -> Traced:
        """Return the tensor in another shape, of which one size can be -1."""
        sizes = tuple(shape)
        if -1 in sizes:
            # The product includes the -1, so its negative is that of the known sizes.
            known = -prod(sizes) or 1
            sizes = tuple(prod(self.shape) // known if n == -1 else n for n in sizes)
        return self.view(Reshape(self.shape, sizes), sizes)

    def permute(self, dims: Sequence[int]) -> Traced:
        """Return the tensor with its dims in another order."""
        order = tuple(dim % len(self.shape) for dim in dims)
        return self.view(Permute(order), [self.shape[dim] for dim in order])

    def narrow(self, dim: int, start: int, stop: int) -> Traced:
        """Return the elements `start` to `stop` along a dim."""
        origin, shape = [0] * len(self.shape), list(self.shape)
        origin[dim], shape[dim] = start, stop - start
        return self.view(Take(self.shape, Box(tuple(origin), tuple(shape))), shape)


def concatenate(parts: Sequence[Traced], dim: int) -> Traced:
    """Return tensors joined along a dim."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    start = 0
    placed: list[Traced] = []
    for part in parts:
        origin = [0] * len(shape)
        origin[dim] = start
        start += part.shape[dim]
        placed.append(part.view(Put(tuple(shape), Box(tuple(origin), part.shape)), shape))
    pieces = (piece for part in placed for piece in part.pieces)
    zeros = (block for part in placed for block in part.zeros)
    return Traced(tuple(shape), tuple(pieces), tuple(zeros))


Operation = Callable[..., Traced | list[Traced]]


def _transpose(tensor: Traced, first: int, second: int) -> Traced:
    dims = list(range(len(tensor.shape)))
    dims[first], dims[second] = dims[second], dims[first]
    return tensor.permute(dims)


def _unsqueeze(tensor: Traced, dim: int) -> Traced:
    shape = list(tensor.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return tensor.reshape(shape)


def _squeeze(tensor: Traced, dims: int | Sequence[int] | None = None) -> Traced:
    count = len(tensor.shape)
    chosen = range(count) if dims is None else [dims] if isinstance(dims, int) else dims
    removed = {dim % count for dim in chosen if tensor.shape[dim] == 1}
    return tensor.reshape([n for dim, n in enumerate(tensor.shape) if dim not in removed])


def _select(tensor: Traced, dim: int, index: int) -> Traced:
    dim, index = dim % len(tensor.shape), index % tensor.shape[dim]
    shape = [n for at, n in enumerate(tensor.shape) if at != dim]
    return tensor.narrow(dim, index, index + 1).reshape(shape)


def _slice(
    tensor: Traced, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> Traced:
    size = tensor.shape[dim]
    first, last, _ = slice(start, stop).indices(size)
    if step == 1:
        return tensor.narrow(dim % len(tensor.shape), first, max(first, last))
    # With a step that divides the dim the slice is one index of a folded dim; else it is no block.
    if size % step or last != size or first >= step:
        raise UnsupportedError("slice", f"selects every {step}th of {size} elements")
    dim %= len(tensor.shape)
    folded = [*tensor.shape[:dim], size // step, step, *tensor.shape[dim + 1 :]]
    return _select(tensor.reshape(folded), dim + 1, first)


def _index(tensor: Traced, indices: Sequence[torch.Tensor | None]) -> Traced:
    chosen = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(chosen) != 1 or chosen[0][1].ndim != 1:
        raise UnsupportedError("index", "is not a list of numbers, or a mask, of one dim")
    dim, index = chosen[0]
    # An index with one byte for each element is a mask.
    numbers = index if index.dtype.itemsize > 1 else index.nonzero().flatten()
    return _index_select(tensor, dim, numbers)


def _index_select(tensor: Traced, dim: int, index: torch.Tensor) -> Traced:
    dim %= len(tensor.shape)
    numbers = [number % tensor.shape[dim] for number in index.tolist()]
    # Numbers that follow one another have the same difference to their place in the list.
    runs = [list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    parts = [tensor.narrow(dim, run[0][1], run[-1][1] + 1) for run in runs]
    return concatenate(parts, dim) if parts else tensor.narrow(dim, 0, 0)


def _make_zeros(_: Traced, shape: Sequence[int]) -> Traced:
    return Traced(tuple(shape), (), (Zeros(tuple(shape)),))


def _split(tensor: Traced, sizes: int | Sequence[int], dim: int = 0) -> list[Traced]:
    dim %= len(tensor.shape)
    whole_size = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole_size - at) for at in range(0, whole_size, sizes)]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [tensor.narrow(dim, at, at + n) for at, n in zip(starts, sizes, strict=True)]


def _unbind(tensor: Traced, dim: int = 0) -> list[Traced]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    return concatenate(tensors, dim % len(tensors[0].shape))


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    dim %= len(tensors[0].shape) + 1
    return concatenate([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _keep(tensor: Traced, *_: object) -> Traced:
    return tensor


_OPERATIONS: dict[str, Operation] = {
    "alias": _keep,
    "cat": _cat,
    "clone": _keep,
    "contiguous": _keep,
    "detach": _keep,
    "index": _index,
    "index_select": _index_select,
    "new_zeros": _make_zeros,
    "permute": Traced.permute,
    "select": _select,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "t": lambda tensor: tensor.permute(range(len(tensor.shape))[::-1]),
    "transpose": _transpose,
    "unbind": _unbind,
    "unsqueeze": _unsqueeze,
    "view": Traced.reshape,
    "_unsafe_view": Traced.reshape,
}
_WITHOUT_EFFECT = frozenset({"memory_format", "pin_memory"})


def start_trace(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a traced tensor that stands for a parameter or buffer."""
    shape = tuple(tensor.shape)
    traced: torch.Tensor = _tracer()(Traced(shape, (TensorPart(fqn),)), tensor.dtype)
    return traced


def read_trace(tensor: Any) -> Traced:
    """Return how a tensor is made of the traced ones.

    Raises:
        UnsupportedError: it is not one of `start_trace`, nor made of them.
    """
    traced = getattr(tensor, "traced", None)
    if not isinstance(traced, Traced):
        raise UnsupportedError(
            type(tensor).__name__, "does not consist only of the model's tensors"
        )
    return traced


@cache
def _tracer() -> Any:
    # torch is imported only when it is needed. It takes every operation apart into the few of its
    # ATen library, which ``__torch_dispatch__`` receives: ``chunk`` arrives as ``split``,
    # ``flatten`` as ``view``.
    import torch

    class TracedTensor(torch.Tensor):
        # Its device is not "meta", where the numbers of an index would have no values either.
        traced: Traced

        @staticmethod
        def __new__(cls: type[TracedTensor], traced: Traced, dtype: torch.dtype) -> TracedTensor:
            made: TracedTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's documented way
                cls, traced.shape, dtype=dtype, device=torch.device("cpu")
            )
            made.traced = traced
            return made

        @classmethod
        def __torch_dispatch__(  # type: ignore[override] # torch passes them by position
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            return _dispatch(cls, func, args, kwargs or {})

    def _dispatch(cls: type[TracedTensor], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        operation = _OPERATIONS.get(name)
        values = [_unwrap(value) for value in args]
        others = {key: value for key, value in kwargs.items() if key not in _WITHOUT_EFFECT}
        # Other options, for example a dtype, would change values and not only their positions.
        if operation is None or others:
            raise UnsupportedError(f"aten.{name}", "does not move whole elements")
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        result = operation(*values)
        if isinstance(result, list):
            return [cls(part, first.dtype) for part in result]
        return cls(result, first.dtype)

    return TracedTensor


def _unwrap(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_unwrap(item) for item in value]
    return getattr(value, "traced", value)
