"""LoRA matrices of Megatron's linear layers, whose cuts and names follow from those of the layer.

    LAYER.adapter.linear_in.weight               Megatron-Bridge's LoRA, and linear_out
    LAYER.adapter.adapter_q.linear_in.weight     its CanonicalLoRA: a pair for each part
    LAYER.lora_A.default.weight                  ms-swift, and lora_B

The input's matrix is cut as the layer if that is cut by rows, the output's if it is cut by columns.
The other one is whole on every rank in ms-swift; Megatron-Bridge cuts it too, the input's along the
adapter's rank, the output's along its rows. Hugging Face has one layer for each part. The parts of
a fused layer share the input's matrix.

Sources: Megatron-Bridge 0.3.1 and 0.6.2 ``peft/utils.py`` (ParallelLinearAdapter),
``peft/canonical_lora.py``, ``models/conversion/peft_bridge.py``; mcore-bridge 1.6.5
``tuners/lora.py`` (LoraParallelLinear).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from reshard.core.box import Index
from reshard.core.chunks import Chunk
from reshard.layouts.model_parallel.moves import apply_moves, make_row_moves

_MATRIX = re.compile(
    r"(.+)\.(adapter\.(?:adapter_(q|k|v|gate|up)\.)?linear_(?:in|(out))\.weight"
    r"|lora_(?:A|(B))\.default\.weight)"
)
_HALVED = re.compile(r".+\.adapter_(?:gate|up)\.linear_out\.weight")
_OF_RANKS = re.compile(r"(?!.*\.local_experts\.).+\.linear_fc1\.lora_B\.default\.weight")
_PARTS = {"q": 0, "k": 1, "v": 2, "gate": 0, "up": 1}  # in the order of a fused form


class LoraMatrix(NamedTuple):
    """A matrix of an adapter.

    Args:
        weight: name of the adapted weight.
        suffix: what follows the layer's name.
        part: number of the part that is adapted; None: the whole layer.
        is_out: whether it is the output's matrix, ``lora_B``.
    """

    weight: str
    suffix: str
    part: int | None
    is_out: bool

    @property
    def suffix_in_peft(self) -> str:
        """What follows a layer's name in a PEFT model."""
        return f"lora_{'B' if self.is_out else 'A'}.default.weight"

    def choose_cut(self, cut: str) -> str:
        """Return the cut of the matrix, by that of the adapted weight."""
        other = "replicated" if self.suffix.startswith("lora_") else "column"
        if cut == "row":
            return other if self.is_out else "row"
        return cut if self.is_out and self.part is None and cut != "replicated" else other


def parse_matrix(name: str) -> LoraMatrix | None:
    """Return the matrix that has a name; None if it is no name of an adapter's.

    >>> parse_matrix("decoder.layers.0.mlp.linear_fc1.adapter.adapter_up.linear_out.weight")[2:]
    (1, True)
    """
    match = _MATRIX.fullmatch(name)
    if match is None:
        return None
    part = _PARTS[match[3]] if match[3] else None
    return LoraMatrix(f"{match[1]}.weight", match[2], part, bool(match[4] or match[5]))


def restore_rows(
    name: str, shape: Index, chunks: Sequence[Chunk], ranks: int, *, gated: bool
) -> Sequence[Chunk]:
    """Return the chunks of a matrix in torch_dist as those of the matrix in the model.

    Megatron-Bridge takes the matrices of CanonicalLoRA's gate and up for both parts of a gated
    layer: it stores the first half of every tensor-parallel rank's rows, then the second halves.
    ms-swift does not tell the parts of a gated layer's matrix: it stores both of every rank.
    """
    halves, of_ranks = _HALVED.fullmatch(name), _OF_RANKS.fullmatch(name)
    if ranks == 1 or not (halves or (of_ranks and gated)):
        return chunks
    size = shape[0] // (2 * ranks)
    runs = []
    for rank, half in product(range(ranks), range(2)):
        apart, together = (half * ranks + rank) * size, (2 * rank + half) * size
        runs.append((apart, together, size) if halves else (together, apart, size))
    return tuple(apply_moves(chunks, make_row_moves(shape, runs)))
