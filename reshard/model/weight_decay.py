"""Find the parameters that HF Trainer's optimizer decays.

The Trainer makes two param groups: the parameters with weight decay, then those without.

Sources: transformers 5.23 ``trainer.py`` (``create_optimizer``, ``get_decay_parameter_names``) and
``trainer_pt_utils.py`` (``get_parameter_names``); 4.30 to 4.48 ``trainer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from reshard.model.adapter_names import TRAINED, parse_part
from reshard.model.shapes import ModelShapes

Division = tuple[tuple[str, ...], tuple[str, ...]]  # with decay and without
FindDivisions = Callable[[], tuple[Division, ...]]

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
# Up to 4.48, names of norms did not count. The classes that some models registered beside
# nn.LayerNorm are left out here: they have no shape in common with a decayed parameter.
_NO_DECAY_BEFORE = re.compile("bias")


def find_decays(
    fqns: Sequence[str], model: ModelShapes | None, *, names: re.Pattern[str] = _NO_DECAY
) -> list[bool] | None:
    """Return for each parameter whether the Trainer decays it; None if the model must be known.

    Args:
        names: matches names of parameters that are not decayed.

    >>> find_decays(["base_model.model.q.lora_A.default.weight", "norm.weight"], None)
    [True, False]
    >>> find_decays(["transformer.ln_f.weight"], None)  # whether it is an nn.LayerNorm is unknown
    """
    found = [_decays(fqn, model, names) for fqn in fqns]
    return None if None in found else [bool(decay) for decay in found]


def find_no_divisions() -> tuple[Division, ...]:
    """Return no division: nothing is known of the training program."""
    return ()


def divide_parameters(model: ModelShapes) -> tuple[Division, ...]:
    """Return the different ways in which versions of the Trainer divide a model's parameters."""
    divisions = []
    for names in (_NO_DECAY, _NO_DECAY_BEFORE):
        decays = find_decays(list(model.parameters), model, names=names) or []
        pairs = list(zip(model.parameters, decays, strict=True))
        with_decay = tuple(fqn for fqn, decay in pairs if decay)
        divisions.append((with_decay, tuple(fqn for fqn, decay in pairs if not decay)))
    return tuple(dict.fromkeys(divisions))


def _decays(fqn: str, model: ModelShapes | None, names: re.Pattern[str]) -> bool | None:
    if names.search(fqn.lower()):
        return False
    part = parse_part(fqn)
    if part is not None and part.role in TRAINED:
        return True
    if model is None or fqn not in model.parameters:
        return None
    return fqn not in model.layer_norms
