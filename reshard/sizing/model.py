"""The sizes of a model: its tensors, block by block, and what a block saves for backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from reshard.core.box import Index


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter.

    Args:
        name: relative to the block; the full name for a tensor outside of all blocks.
        is_cut: tensor-parallel ranks cut it.
        is_expert: it belongs to routed experts, which expert-parallel ranks divide.
    """

    name: str
    shape: Index
    is_cut: bool = True
    is_expert: bool = False

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a forward pass saves for backward, in elements per token.

    Args:
        narrow: elements in the dtype of the computation.
        wide: elements that are always float32.
        narrow_cut, wide_cut: elements that tensor-parallel ranks divide among themselves.
        score: bytes per pair of tokens, of attention that is not memory-efficient; also divided.
        grouped_heads: heads whose scores attention saves in float32, because several of them share
            a key; also divided. torch's memory-efficient kernels group heads in 16 bits only.
    """

    narrow: float = 0
    wide: float = 0
    narrow_cut: float = 0
    wide_cut: float = 0
    score: float = 0
    grouped_heads: float = 0

    def __add__(self, other: Saved) -> Saved:
        return Saved(
            self.narrow + other.narrow,
            self.wide + other.wide,
            self.narrow_cut + other.narrow_cut,
            self.wide_cut + other.wide_cut,
            self.score + other.score,
            self.grouped_heads + other.grouped_heads,
        )

    def count_bytes(self, itemsize: int, seq_len: int, tp: int) -> float:
        """Return the bytes per token on one tensor-parallel rank."""
        whole = itemsize * self.narrow + 4 * self.wide
        score = self.score + 4 * self.grouped_heads * (itemsize == 4)
        cut = itemsize * self.narrow_cut + 4 * self.wide_cut + seq_len * score
        return whole + cut / tp


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """A repeated layer.

    Args:
        name: full name of the module, for example ``model.layers.0``; empty for a whole model.
    """

    name: str
    tensors: tuple[Parameter, ...]
    saved: Saved

    @property
    def numel(self) -> int:
        """The number of elements of all tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    def named_tensors(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the full name of every parameter, and the parameter."""
        for tensor in self.tensors:
            yield f"{self.name}.{tensor.name}" if self.name else tensor.name, tensor


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model as far as a forecast needs it.

    Args:
        source: what the user named: a path, a cached model, a number of parameters.
        counted_by: how the parameters were counted, for the report.
        before: tensors before the blocks, such as the embedding.
        after: tensors after the blocks, such as the final norm and the output layer.
        saved: what is saved for backward outside of the blocks.
        hidden: width of the residual stream.
        vocab: rows of the output layer.
        positions: the longest sequence; None if it is not limited or not known.
        block_class: class of the blocks in transformers; empty if it is not known.
        frozen: full names of parameters that are not trained.
        notes: what the forecast assumes about the model.
    """

    source: str
    counted_by: str
    before: tuple[Parameter, ...]
    blocks: tuple[BlockSizes, ...]
    after: tuple[Parameter, ...]
    saved: Saved
    hidden: int
    vocab: int
    positions: int | None = None
    block_class: str = ""
    frozen: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())

    @property
    def numel(self) -> int:
        """The number of parameters; tied ones count once."""
        return sum(t.numel for _, t in self.named_tensors())

    @property
    def largest_block(self) -> int:
        """The number of parameters of the largest block."""
        return max((block.numel for block in self.blocks), default=0)

    def named_tensors(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the full name of every parameter, and the parameter."""
        for tensor in self.before:
            yield tensor.name, tensor
        for block in self.blocks:
            yield from block.named_tensors()
        for tensor in self.after:
            yield tensor.name, tensor
