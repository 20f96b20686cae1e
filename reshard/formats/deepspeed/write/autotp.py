"""Describe how DeepSpeed's AutoTP cuts a model of transformers, by the names of its parameters.

The layers are those of Llama and of the many models that name theirs the same. The names in other
models do not show how AutoTP cuts them.

Source: DeepSpeed 0.19.8 ``module_inject/auto_tp.py`` (``AutoTP.tp_parser``: row-parallel layers
are ``o_proj`` and ``down_proj``; ``_replace``: a head is cut by its rows, with an embedding that is
tied to it), ``module_inject/layers.py`` (``collect_autotp_universal_checkpoint_info``).
"""

from __future__ import annotations

import re
from typing import Any

from reshard.formats.deepspeed.write.pickled_objects import UNIVERSAL_VERSION
from reshard.training.state import WritableState

_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW = ("o_proj", "down_proj")
_HEAD = "lm_head.weight"
_EMBEDDING = re.compile(r"(.*\.)?embed_tokens\.weight")


def describe_cuts(state: WritableState) -> dict[str, Any]:
    """Return the ``universal_checkpoint_info`` of a run with AutoTP; empty if it is not known."""
    names = [weight.fqn for weight in state.weights]
    is_tied = _HEAD not in names or _HEAD in state.manifest.tied
    kinds = {name: _classify(name, is_tied=is_tied) for name in names}
    if None in kinds.values() or "row" not in kinds.values():
        return {}

    def list_patterns(kind: str) -> list[str]:
        return [f"^{re.escape(name)}$" for name, own in kinds.items() if own == kind]

    return {
        "universal_checkpoint_version": UNIVERSAL_VERSION,
        "parameter_with_row_parallelism_patterns": list_patterns("row"),
        "tp_replicated_parameter_patterns": list_patterns("replicated"),
        "vocabulary_parameter_patterns": list_patterns("vocabulary"),
    }


def _classify(name: str, *, is_tied: bool) -> str | None:
    *modules, leaf = name.split(".")
    module = modules[-1] if modules else ""
    if name == _HEAD or (_EMBEDDING.fullmatch(name) and is_tied):
        return "vocabulary"
    if _EMBEDDING.fullmatch(name) or "norm" in module:
        return "replicated"
    if module in _ROW:  # the bias is added once, to the sum over the ranks
        return "row" if leaf == "weight" else "replicated"
    return "column" if module in _COLUMN else None
