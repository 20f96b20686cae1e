"""The pipeline stage that nanotron gives each block of a model, by the costs of the blocks.

Source: nanotron at 2411b02 ``models/base.py`` (``build_model``), and
``models/{llama,qwen,starcoder2}.py`` ``get_block_compute_costs`` and the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

HEAD = "model.lm_head"
_LAYER = "model.decoder"


@dataclass(frozen=True, slots=True)
class _ModelKind:
    """Differences between nanotron's models.

    Args:
        flag: key of ``model_config.json`` that identifies the model.
        first: the block of the embedding.
        matrices: number of matrices of equal size in a layer's MLP.
    """

    flag: str
    first: str
    matrices: int


_FAMILIES = (
    _ModelKind("is_llama_config", "model.token_position_embeddings", 3),
    _ModelKind("is_qwen2_config", "model.token_position_embeddings", 3),
    _ModelKind("is_starcoder2_config", "model.token_embeddings", 2),
)


def list_blocks(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the cost of each block with parameters, in the model's order.

    The result is empty if the configuration is not one of a known model.
    """
    family = next((each for each in _FAMILIES if config.get(each.flag) is True), None)
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    sizes = [size for name in names if type(size := config.get(name)) is int and size > 0]
    if family is None or len(sizes) < len(names):
        return {}
    layers, heads, hidden, vocab_size = sizes
    width = config.get("intermediate_size")
    if width is None and family.matrices == 2:  # only Starcoder2 has a default
        width = 4 * hidden
    if type(width) is not int:
        return {}
    # Four projections of attention; key and value heads count in full, as in nanotron's formula.
    layer = 4 * heads * (hidden // heads) * hidden + family.matrices * width * hidden
    return {
        family.first: 0,
        **{f"{_LAYER}.{number}": layer for number in range(layers)},
        "model.final_layer_norm": 0,
        HEAD: vocab_size * hidden,
    }


def assign_stages(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the stage of each block: a stage ends with the block that exceeds its share.

    >>> assign_stages([0, 40, 40, 40, 0, 16], 2), assign_stages([0, 40, 40, 40, 0, 500], 3)
    ([0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0])
    """
    # The operations and their order are those of ``build_model``: a share that is rounded
    # differently can move a block to another stage.
    shares = [float(sum(costs)) * ((rank + 1) / ranks) for rank in range(ranks)]
    assigned, stage = list[int](), 0
    for so_far in accumulate(costs):
        assigned.append(stage)
        stage += so_far > shares[stage]
    return assigned
